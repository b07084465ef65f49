"""``locret-plan --model phi3-mini --gpu-memory 24GiB``: memory of a run before it starts. Needs no GPU, weights or
Hub."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..config.recipes import known_recipes, read_recipe, recipes_folder
from ..config.schema import Values
from ..config.serve_options import PLAN, PlanOptions
from ..naming import nearest, parse_bytes, show
from .command import entry

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from ..planning.inference_plan import BackboneSizes, Setting

D_HIDDEN = 1024
"""Width of heads, if neither the user nor the recipe gives one."""


def resolve(name: str) -> tuple[PretrainedConfig, Values]:
    """``(configuration, {dotted key: value} of the recipe)`` of a recipe, a folder or a Hub id.

    Backbones of the recipes that ship are read from ``recipes/configs``; anything else is transformers' to find.

    Raises:
        ValueError: nothing of that name; suggests the nearest recipe.
    """
    from transformers import AutoConfig

    from ..backbones.load import load_config, resolve_model

    stem, recipe = name, Values()
    if name in known_recipes() or name.endswith((".yaml", ".yml")):
        read = read_recipe(name)
        stem, recipe = read.name, read.values
        name = str(recipe.get("backbone.model") or "")
        if not name:
            raise ValueError(f"model={stem}: this recipe names no backbone; give a folder or a Hub id")
    shipped = shipped_configs()
    for key, raw in shipped.items():
        if key == stem or raw["_name_or_path"] == name:
            raw = {k: v for k, v in raw.items() if k != "_name_or_path"}
            return AutoConfig.for_model(str(raw.pop("model_type")), **raw), recipe
    known = [*known_recipes(), *(str(raw["_name_or_path"]) for raw in shipped.values())]
    path = resolve_model(name)
    if "/" not in name and not Path(path).exists():
        raise ValueError(f"model={name!r} is neither a recipe nor a folder.{nearest(name, known)}")
    try:
        return load_config(name), recipe
    except FileNotFoundError as error:
        raise ValueError(f"{error}{nearest(name, known)}") from error


def shipped_configs() -> dict[str, dict[str, object]]:
    """The configurations in ``recipes/configs``, by recipe; ``_name_or_path`` is the Hub id."""
    files = sorted((recipes_folder() / "configs").glob("*.json"))
    return {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in files}


def run(args: PlanOptions) -> int:
    """Print the plan; returns 0 if it fits. Otherwise raises ValueError with the budget and chunk that would fit."""
    from ..backbones.weights import gguf_types, suffix
    from ..planning import fitting_settings as fitting
    from ..planning.inference_plan import BackboneSizes, Caches, Setting, decoding_bytes, full_cache_bytes
    from ..policies.grammar import parse_policy

    if args.ranks > 1 and args.engine != "vllm":
        raise ValueError(f"ranks={args.ranks} is for a plan of locret-vllm: give --engine vllm too")
    cap = parse_bytes(args.gpu_memory, "gpu_memory") - parse_bytes(args.reserve, "reserve")
    if cap <= 0:
        raise ValueError(f"gpu_memory={args.gpu_memory} must be above reserve={args.reserve}")
    config, recipe = resolve(args.model)
    policy, types = parse_policy(args.policy), gguf_types(config)
    if types and args.weight_bits is not None:
        raise ValueError(f"weight_bits={args.weight_bits} cannot be combined with the packed weights of {args.model!r}")
    backbone = BackboneSizes.of(config)
    d_hidden, bits = _given(args.d_hidden, recipe, "heads.d_hidden", D_HIDDEN), args.weight_bits
    say = [
        f"{args.model}: {backbone.parameters / 1e9:.2f}e9 parameters, {args.dtype}{suffix(bits, types)}; cap {show(cap)} "
        f"({args.gpu_memory} less {args.reserve} reserve)"
    ]
    if (states := len(backbone.spec.states)) and not backbone.spec.state_sizes:
        say.append(f"the states of {states} layers are not counted: a configuration does not say their size")
    given = {key.removeprefix("infer."): value for key, value in recipe.items() if key.startswith("infer.")}
    planned = replace(args.run, one_shot=False).resolved(given, args.context)
    planned = replace(planned, one_shot=args.one_shot)
    setting = Setting(args.context, planned, dtype=args.dtype, d_hidden=d_hidden, policy=policy, weight_bits=bits)
    if args.engine == "vllm":
        print("\n".join([*say, *_vllm(args, config, backbone, setting, cap)]))
        return 0
    plan = fitting.require_fit(backbone, setting, cap)
    if (sessions := args.sessions) is not None:
        caches = Caches.of(backbone.spec, setting, [policy], sessions, args.documents, args.shared_prefixes)
        peak = plan.peak + (caches.count - 1) * caches.each + decoding_bytes(backbone, setting, sessions)
        server = f"server: {caches}; peak {show(peak)}"
        print("\n".join([*say, f"policy {args.policy}, {setting}", *plan.lines(), server]))
        if peak > cap:
            raise fitting.DoesNotFit(f"{caches} need {show(peak)}, above the cap of {show(cap)}")
        return 0
    full = full_cache_bytes(backbone.spec, args.context, args.dtype)
    say += [
        f"policy {args.policy}, context {args.context}, {setting}",
        *plan.lines(),
        f"full attention's cache would take {show(full)}, {full / plan.cache:.1f} times as much",
    ]
    if setting.budget >= setting.context:
        say.append("the budget holds the whole context: nothing is evicted")
    elif setting.evicts:
        say.append(
            f"at chunk {setting.chunk} the largest budget that fits is {fitting.largest_budget(backbone, setting, cap)}; "
            f"at budget {setting.budget} the largest chunk is {fitting.largest_chunk(backbone, setting, cap)}"
        )
    print("\n".join(say))
    return 0


def _vllm(
    args: PlanOptions, config: PretrainedConfig, backbone: BackboneSizes, setting: Setting, cap: int
) -> list[str]:
    """Lines of a plan of ``locret-vllm``. The kit's own forward stands in for vLLM's memory besides the pages.

    Raises:
        ValueError: a policy or setting that pages do not support. DoesNotFit: no page fits, or fewer than requested.
    """
    import torch

    from ..cache.pages import page_bytes
    from ..planning.fitting_settings import DoesNotFit
    from ..planning.inference_plan import plan_inference
    from ..vllm.server_settings import Pages, check_policy, check_settings

    check_policy(setting.policy)
    check_settings(args.run)
    plan = plan_inference(backbone, setting)
    dtype = getattr(torch, setting.dtype)
    each = page_bytes(config, setting.chunked, [setting.policy], dtype, args.ranks)
    beside = (plan.weights + plan.heads) // args.ranks + plan.workspace
    pages = Pages.within(each, max(0, cap - beside))
    if not pages.requests or pages.requests < (args.sessions or 0):
        raise DoesNotFit(
            f"{pages.requests} requests of {show(each)} fit next to {show(beside)} of weights and workspace"
        )
    if args.sessions is not None:
        pages = Pages(each, args.sessions)
    rows = {"weights": plan.weights // args.ranks, "heads": plan.heads // args.ranks, "workspace": plan.workspace}
    lines = [f"{name:<10} {show(size):>11}" for name, size in {**rows, "pages": pages.bytes}.items()]
    return [f"policy {args.policy}, {setting}", *lines, f"vLLM: {pages}"]


def _given(value: int | None, recipe: Values, key: str, default: int) -> int:
    return int(str(recipe.get(key, default))) if value is None else value


main = entry(PLAN, run)
"""The exit status is 1 if nothing fits, too."""


if __name__ == "__main__":
    sys.exit(main())
