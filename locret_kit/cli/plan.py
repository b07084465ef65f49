"""``locret-plan --model phi3-mini --gpu-memory 24GiB``: memory of a run before it starts. Needs no GPU, weights or
Hub."""

from __future__ import annotations

import json
from collections.abc import Iterator
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

    from ..planning.backbone_sizes import BackboneSizes
    from ..planning.inference_plan import Setting

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

    given, values = name, Values()
    if name in known_recipes() or name.endswith((".yaml", ".yml")):
        values = read_recipe(name).values
        if not (name := str(values.get("backbone.model") or "")):
            raise ValueError(f"model={given}: this recipe names no backbone; give a folder or a Hub id")
    shipped = shipped_configs()
    for recipe, raw in shipped.items():
        if name in (raw["_name_or_path"], read_recipe(recipe).values["backbone.model"]):
            raw = {k: v for k, v in raw.items() if k != "_name_or_path"}
            return AutoConfig.for_model(str(raw.pop("model_type")), **raw), values
    known = [*known_recipes(), *(str(raw["_name_or_path"]) for raw in shipped.values())]
    path = resolve_model(name)
    if "/" not in name and not Path(path).exists():
        raise ValueError(f"model={name!r} is neither a recipe nor a folder.{nearest(name, known)}")
    try:
        return load_config(name), values
    except FileNotFoundError as error:
        raise ValueError(f"{error}{nearest(name, known)}") from error


def shipped_configs() -> dict[str, dict[str, object]]:
    """The configurations in ``recipes/configs``, by recipe; ``_name_or_path`` is the Hub id."""
    files = sorted((recipes_folder() / "configs").glob("*.json"))
    return {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in files}


def run(args: PlanOptions) -> int:
    """Print the plan; returns 0 if it fits. Otherwise raises ValueError with the budget and chunk that would fit."""
    from ..backbones.weight_bits import gguf_types, suffix
    from ..cache.options import check_reread
    from ..planning.backbone_sizes import BackboneSizes
    from ..planning.inference_plan import Setting
    from ..policies.grammar import parse_policy

    if args.ranks > 1 and args.engine != "vllm":
        raise ValueError(f"ranks={args.ranks} is for a plan of locret-vllm: give --engine vllm too")
    if isinstance(args.budget, float) and (args.sessions or args.engine == "vllm"):
        raise ValueError(f"budget={args.budget}: a server's slots must be known before the start: give an integer")
    cap = parse_bytes(args.gpu_memory, "gpu_memory") - parse_bytes(args.reserve, "reserve")
    if cap <= 0:
        raise ValueError(f"gpu_memory={args.gpu_memory} must be above reserve={args.reserve}")
    config, recipe = resolve(args.model)
    types, bits = gguf_types(config), args.weight_bits
    if types and bits is not None:
        raise ValueError(f"weight_bits={bits} cannot be combined with the packed weights of {args.model!r}")
    backbone = BackboneSizes.of(config)
    published = {name.removeprefix("infer."): value for name, value in recipe.items()}
    chunked = replace(args.run, one_shot=False)
    settings = chunked.resolved(published, args.context)
    if args.sessions and args.engine == "kit" and (args.document_budget or 0) > settings.budget:
        settings = replace(chunked, budget=args.document_budget).resolved(published, args.context)
    settings = replace(settings, one_shot=args.one_shot)
    d_hidden = args.d_hidden or int(str(recipe.get("heads.d_hidden", D_HIDDEN)))
    policy = parse_policy(args.policy)
    setting = Setting(args.context, settings, dtype=args.dtype, d_hidden=d_hidden, policy=policy, weight_bits=bits)
    check_reread(policy, setting.schedule)
    print(
        f"{args.model}: {backbone.parameters / 1e9:.2f}e9 parameters, {args.dtype}{suffix(bits, types)}; cap {show(cap)} "
        f"({args.gpu_memory} less {args.reserve} reserve)"
    )
    if (states := len(backbone.spec.states)) and not backbone.spec.state_sizes:
        print(f"the states of {states} layers are not counted: a configuration does not say their size")
    if args.engine == "vllm":
        lines = _vllm(args, config, backbone, setting, cap)
    else:
        lines = _server(args, backbone, setting, cap) if args.sessions else _one_text(backbone, setting, cap)
    for line in lines:
        print(line)
    return 0


def _one_text(backbone: BackboneSizes, setting: Setting, cap: int) -> Iterator[str]:
    """Lines of a plan of one text. Raises DoesNotFit with what would fit."""
    from ..planning.fitting_settings import largest_budget, largest_chunk, require_fit
    from ..planning.inference_plan import full_cache_bytes

    plan, full = require_fit(backbone, setting, cap), full_cache_bytes(backbone.spec, setting.context, setting.dtype)
    yield f"policy {setting.policy.name}, context {setting.context}, {setting}"
    yield from plan.lines()
    yield f"full attention's cache would take {show(full)}, {full / plan.cache:.1f} times as much"
    if setting.budget >= setting.context:
        yield "the budget holds the whole context: nothing is evicted"
    elif setting.evicts:
        budget, chunk = largest_budget(backbone, setting, cap), largest_chunk(backbone, setting, cap)
        yield f"at chunk {setting.chunk} the largest budget that fits is {budget}"
        yield f"at budget {setting.budget} the largest chunk that fits is {chunk}"


def _server(args: PlanOptions, backbone: BackboneSizes, setting: Setting, cap: int) -> Iterator[str]:
    """Lines of a plan of ``locret-serve``. Raises DoesNotFit."""
    from ..planning.fitting_settings import DoesNotFit, require_fit
    from ..planning.server_caches import Caches, decoding_bytes

    plan, sessions = require_fit(backbone, setting, cap), args.sessions or 1
    caches = Caches.of(
        backbone.spec, setting, [setting.policy], sessions, args.documents, args.shared_prefixes, args.thoughts
    )
    peak = plan.peak + (caches.count - 1) * caches.each + decoding_bytes(backbone, setting, sessions)
    yield f"policy {args.policy}, {setting}"
    yield from plan.lines()
    yield f"server: {caches}; peak {show(peak)}"
    if peak > cap:
        raise DoesNotFit(f"{caches} need {show(peak)}, above the cap of {show(cap)}")


def _vllm(
    args: PlanOptions, config: PretrainedConfig, backbone: BackboneSizes, setting: Setting, cap: int
) -> Iterator[str]:
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
    plan, dtype = plan_inference(backbone, setting), getattr(torch, setting.dtype)
    each = page_bytes(config, setting.chunked, [setting.policy], dtype, args.ranks)
    sizes = {"weights": plan.weights // args.ranks, "heads": plan.heads // args.ranks, "workspace": plan.workspace}
    beside = sum(sizes.values())
    pages = Pages.within(each, max(0, cap - beside))
    if not pages.requests or pages.requests < (args.sessions or 0):
        raise DoesNotFit(
            f"{pages.requests} requests of {show(each)} fit next to {show(beside)} of weights and workspace"
        )
    if args.sessions is not None:
        pages = Pages(each, args.sessions)
    yield f"policy {args.policy}, {setting}"
    yield from (f"{name:<10} {show(size):>11}" for name, size in {**sizes, "pages": pages.bytes}.items())
    yield f"vLLM: {pages}"


main = entry(PLAN, run)
"""The exit status is 1 if nothing fits, too."""
