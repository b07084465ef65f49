"""Backbone, heads and caches' settings of an evaluation, from what ``locret-eval`` was given."""

import hashlib
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import torch

from ..backbones import demo
from ..backbones.load import choose_adapter, load_backbone
from ..backbones.probe import describe
from ..config.eval_options import FROZEN_KEYS, EvalConfig, load_eval_config
from ..evals.engine import RANDOM_HEADS, UNTRAINED, Run, Setup, Variant, read_rows, variants
from ..evals.tasks import find_tasks
from ..files import as_object, read_json
from ..heads import RetainingHeads
from ..naming import last_part
from ..runtime.report import weights_hash
from ..settings import PUBLISHED, Resolved, read_protect
from ..text.template import set_defaults

CONFIG = "config.json"


@dataclass(frozen=True)
class EvalParts:
    """Policies, budgets and heads that an evaluation compares, before the backbone is loaded."""

    model: str
    """The backbone's name."""
    adapter: str | None
    heads: dict[str, RetainingHeads]
    """Heads by their name in rows: the last part of the checkpoint's path, or 'untrained'."""
    hashes: dict[str, str]
    """Hashes of the heads' weights."""

    @property
    def trained(self) -> list[str]:
        """Names of the checkpoints."""
        return [name for name in self.heads if name != UNTRAINED]


def load_parts(config: EvalConfig) -> EvalParts:
    """Heads, and the names of backbone and adapter.

    Raises:
        ValueError: neither heads nor a backbone, heads of different backbones or adapters, or two of one name.
    """
    if not config.ckpt and not config.model:
        raise ValueError("give ckpt=PATH (heads, which name their backbone) or model=NAME")
    heads = {last_part(path): RetainingHeads.from_pretrained(path, backbone=config.model) for path in config.ckpt}
    if len(heads) < len(config.ckpt):
        raise ValueError(f"ckpt={config.ckpt} must end in different names: rows tell heads apart by them")
    first = next(iter(heads.values()), None)
    model = config.model or (first.config.backbone if first else "")
    for name, checkpoint in heads.items():
        if not config.model and checkpoint.config.backbone != model:
            raise ValueError(f"ckpt={name} is for {checkpoint.config.backbone}, not for {model}: give model=NAME")
    adapter = _adapter(config.adapter, heads)
    if RANDOM_HEADS in config.policies:
        if first is None:
            raise ValueError(f"policy={RANDOM_HEADS} takes its sizes from heads: give ckpt=PATH_OR_REPO")
        torch.manual_seed(config.seed)
        heads[UNTRAINED] = RetainingHeads(first.config)
    return EvalParts(model, adapter, heads, {name: weights_hash(checkpoint) for name, checkpoint in heads.items()})


def _adapter(given: str | None, heads: Mapping[str, RetainingHeads]) -> str | None:
    """The adapter to load: the given one, with a warning if heads were trained with another; otherwise the heads'.

    Raises:
        ValueError: none is given, and heads were trained with different ones.
    """
    recorded = [checkpoint.config.adapter for checkpoint in heads.values()]
    adapter, _ = choose_adapter(recorded[0] if recorded else None, given)
    for name, checkpoint in heads.items():
        _, warning = choose_adapter(checkpoint.config.adapter, adapter or "none")
        if warning and given is None:
            both = f"adapter={checkpoint.config.adapter or 'none'}, others with {adapter or 'none'}"
            advice = "evaluate them apart, or give adapter=NAME or adapter=none"
            raise ValueError(f"ckpt={name} was trained with {both}: {advice}")
        if warning:
            print(f"{name}: {warning}", file=sys.stderr)
    return adapter


def run_config(config: EvalConfig, parts: EvalParts) -> dict[str, object]:
    """Settings that the folder's rows share, and the heads and plugins that there are rows of, for its ``config.json``. Rows of
    other settings, or of other heads or plugins by the same name, are an error. Other checkpoints may come in later.

    Raises:
        ValueError: the folder holds rows of another setting, other heads or an edited plugin; names it.
    """
    out, path = Path(config.out), Path(config.out) / CONFIG
    if not (above := next(place for place in (out, *out.absolute().parents) if place.exists())).is_dir():
        raise ValueError(f"out={config.out}: {above} is no folder")
    heads = {
        name: {"weights": parts.hashes[name], "inference": one.config.inference} for name, one in parts.heads.items()
    }
    holds = f"out={config.out} holds"
    now = {**asdict(config), "model": parts.model, "adapter": parts.adapter, "heads": heads}
    before: dict[str, object] = {}
    if path.exists() and any(file.stat().st_size for file in out.glob("rows.*.jsonl")):
        before = as_object(read_json(path), str(path))
        defaults = {item.name: item.default for item in fields(config)}
        for key in FROZEN_KEYS:
            then = before.get(key, defaults[key])
            if then != now[key]:
                raise ValueError(f"{holds} rows with {key}={then}, not {key}={now[key]}: choose another out")
    plugins: dict[str, str] = dict(before.get("plugins") or {})  # type: ignore[call-overload]
    if config.plugin is not None and config.plugin.endswith(".py"):
        digest = hashlib.sha256(Path(config.plugin).read_bytes()).hexdigest()[:16]
        if plugins.setdefault(config.plugin, digest) != digest:
            theirs = f"rows with plugin={config.plugin} of SHA-256 {plugins[config.plugin]}"
            raise ValueError(f"{holds} {theirs}, not {digest}: choose another out")
    known = before.get("heads") or {}
    assert isinstance(known, dict)
    scored = {row.heads for row in read_rows(out) if row.error is None} if before else set()
    for name, facts in heads.items():
        for what, value in facts.items():
            if known.get(name, facts)[what] != value and (what != "weights" or name in scored):
                theirs = f"rows of heads {name} with {what}={known[name][what]}"
                raise ValueError(f"{holds} {theirs}, not {what}={value}: choose another out")
    return {**now, "heads": {**known, **heads}, "plugins": plugins}


def load_setup(config: EvalConfig, parts: EvalParts) -> Setup:
    """The backbone with its heads on it.

    Raises:
        ValueError, OSError: see `load_backbone`; ValueError also for heads of another backbone.
    """
    device, bits, adapter = config.device, config.weight_bits, parts.adapter
    if device in (None, "auto", "cuda") and torch.cuda.is_available():  # a device of its own for each local process
        device = f"cuda:{int(os.environ.get('LOCAL_RANK', 0)) % torch.cuda.device_count()}"
    demo.provide(parts.model)
    model, tokenizer = load_backbone(parts.model, dtype=config.dtype, device=device, adapter=adapter, weight_bits=bits)
    set_defaults(tokenizer, config.template_kwargs, config.think, config.reasoning_effort)
    for checkpoint in parts.heads.values():
        checkpoint.check_backbone(describe(model).spec)
        checkpoint.to(model.device, model.dtype)
    published = {name: checkpoint.config.inference for name, checkpoint in parts.heads.items()}
    return Setup(
        model, tokenizer, parts.model, lambda variant, tokens: settings_of(config, published, variant, tokens), 
        parts.heads, parts.hashes, parts.adapter, chat=config.chat, ending=config.ending, seed=config.seed,
        max_new_tokens=config.max_new_tokens, max_thought_tokens=config.max_thought_tokens,
    )  # fmt: skip


def settings_of(
    config: EvalConfig, published: Mapping[str, Mapping[str, object]], variant: Variant, prompt_length: int | None
) -> Resolved:
    """A variant's settings as `locret-infer` scales them, from those that its heads are ``published`` with; policies without
    heads take what all checkpoints agree on.

    Raises:
        ValueError: checkpoints differ in a setting that a policy without heads takes from them; names it.
    """
    given = replace(config.run, budget=variant.budget or None)
    if not variant.budget:  # nothing is evicted, so bounds of a budget are none of its own
        given = replace(given, stabilizers=None, local_len=None)
    scaled = {name: given.resolved(theirs, prompt_length) for name, theirs in (published or {"-": {}}).items()}
    settings = scaled.get(variant.heads, next(iter(scaled.values())))
    for name in PUBLISHED[1:] if variant.budget and variant.heads not in scaled else ():
        if len(several := {getattr(settings, name) for settings in scaled.values()}) > 1:
            values = " and ".join(sorted(map(str, several)))
            raise ValueError(f"policy={variant.policy}: the checkpoints have {name}={values}: give {name}=...")
    return settings


def run_of(config: EvalConfig, parts: EvalParts) -> Run:
    """Load tasks and the backbone, for the ``parts`` of `load_parts`."""
    columns = variants(config.policies, config.budgets, parts.trained, config.kv_bits)
    tasks = find_tasks(
        config.tasks, haystacks=config.haystacks, data=config.data, samples=config.samples, metric=config.metric
    )
    return Run(
        setup=load_setup(config, parts), tasks=tasks, variants=columns, lengths=config.lengths, samples=config.samples,
        out=Path(config.out), keep=config.keep, share_prefix=config.share_prefix,
        rank=int(os.environ.get("RANK", 0)), world_size=int(os.environ.get("WORLD_SIZE", 1)),
    )  # fmt: skip


def engine_for_harness(settings: dict[str, object]) -> tuple[Setup, Variant]:
    """Backbone and variant of ``--model_args policy=...,budget=...`` and this command's keys."""
    given = {name: value for name, value in settings.items() if value is not None}
    if "adapter" in settings:  # the harness has made None of the word
        given["adapter"] = settings["adapter"] or "none"
    policy, budget = given.pop("policy", "full"), given.pop("budget", 1024)
    if not torch.cuda.is_available() and str(given.get("device", "")).startswith("cuda"):
        del given["device"]  # the harness's own default
    words = [f"{name}={str(value).lower() if isinstance(value, bool) else value}" for name, value in given.items()]
    config = load_eval_config(["tasks=lm_eval", "out=-", f"policies=[{policy}]", f"budgets=[{budget}]", *words])
    if read_protect(config.protect) - {"first"}:
        raise ValueError(f"protect={config.protect}: lm_eval makes the prompts, so only 'first' is supported")
    parts = load_parts(config)
    variant = variants(config.policies, config.budgets, parts.trained, config.kv_bits)[0]
    return load_setup(config, parts), variant
