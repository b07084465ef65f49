"""The training configuration: its schema and its bounds. This module knows no model and imports neither torch nor Lightning.

Errors are one-line ValueErrors that name the key, the value and what is allowed.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import MISSING

from ..naming import nearest


@dataclass
class BackboneConfig:
    """The frozen language model."""

    model: str = MISSING
    """Hub id or folder. A relative folder is looked for here first, then beside the installed project."""
    dtype: str = "auto"
    """'auto', 'float32', 'bfloat16' or 'float16'; auto is bfloat16 where the hardware computes in it."""
    weight_bits: int | None = None
    """8 or 4: bits of the layers' weights, quantised by bitsandbytes as they are loaded; null leaves them in ``dtype``."""
    adapter: str | None = None
    """PEFT adapter to put on the backbone: Hub id or folder."""
    revision: str | None = None
    """Hub revision of the model: branch, tag or commit."""
    device_map: str | None = None
    """For a backbone that no one GPU holds, in one process: 'auto', 'balanced', 'balanced_low_0' or 'sequential' spread
    its layers over the GPUs, and over the CPU's memory what is left, as accelerate places them. Null: on one device."""
    gpu_memory: str | None = None
    """Most of each GPU that a spread backbone's weights may take, such as 18GiB; null leaves accelerate's margin."""


@dataclass
class HeadsSection:
    """The retaining heads."""

    d_hidden: int = 1024
    """Width of a head's hidden layer."""
    init: str | None = None
    """Heads to begin with: a folder, a file or a Hub repository; null begins with random ones."""
    dtype_saved: str = "bfloat16"
    """'bfloat16' or 'float32': the type of the saved weights. Training is in float32."""


@dataclass
class TargetConfig:
    """What the heads learn to predict."""

    kind: str = "logit"
    """'logit' (the paper's raw attention logits) or 'log_prob' (minus each query's log-sum-exp)."""
    floor: float = -12.0
    """Lower clip of 'log_prob' targets, nats."""
    lead: int = 0
    """Prompt tokens before each answer whose queries count as the answer's; the last one predicts its first token."""


@dataclass
class LossConfig:
    """SmoothL1 regression plus smoothing along the sequence."""

    top_fraction: float = 0.05
    """Share of each KV head's slots, those of highest target, that weigh ``top_weight``."""
    top_weight: float = 1.0
    """Weight of those slots; 1 is the paper's loss."""
    smoothing: float = 0.0025
    """Weight (alpha) of the mean squared difference of neighbouring predictions, in each layer."""
    beta: float = 1.0
    """Where SmoothL1 goes from quadratic to linear, in the target's unit."""


@dataclass
class DataConfig:
    """The training samples."""

    sources: list[str] = field(default_factory=lambda: ["synthetic"])
    """'synthetic', files or folders of records, or Hub data set ids."""
    weights: list[float] | None = None
    """Share of samples from each source; null draws from all sources alike."""
    texts: list[str] = field(default_factory=lambda: ["pydoc"])
    """Real text that synthetic samples are made of: 'pydoc', 'jargon', files or folders."""
    max_tokens: int = 10240
    """Longest sample, prompt and answer together, tokens."""
    repetitive: float = 0.3
    """Share of synthetic samples whose haystack is one repeated paragraph."""
    val_samples: int = 8
    """Samples held out for validation; 0 skips it."""
    split: str = "train"
    """Split of a Hub data set."""
    batch: int = 1
    """Samples of one forward, those of like length together, padded to the longest; a divisor of ``optim.accumulate``.
    It changes speed and memory, not the curve: targets and loss never see the padding."""
    num_workers: int = 0
    """Processes that make training samples ahead of each device; 0 makes them in the training process."""


@dataclass
class OptimConfig:
    """AdamW with linear warm-up and decay."""

    lr: float = 5e-4
    """Peak learning rate."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    """AdamW's two decay rates."""
    weight_decay: float = 0.0
    """AdamW's decoupled weight decay."""
    clip_value: float = 0.5
    """Largest absolute value of a gradient element; 0 does not clip."""
    warmup_steps: int = 2000
    """Optimiser steps of linear warm-up; the peak is not reached in a run of fewer steps."""
    steps: int = 3000
    """Optimiser steps of the whole run."""
    accumulate: int = 1
    """Samples on each device whose gradients make one optimiser step."""


@dataclass
class TrainerConfig:
    """Where training runs, and what it writes when."""

    accelerator: str = "auto"
    """Lightning's name: 'auto', 'cpu', 'gpu', ..."""
    devices: int = 1
    """Devices on each node."""
    strategy: str = "auto"
    """'auto' (one device), 'ddp' (copies on every device), 'fsdp' (heads and backbone sharded), 'deepspeed_stage_2'
    (copies, optimiser sharded), 'deepspeed_stage_3' (all sharded) or 'deepspeed_stage_3_offload' (in the CPU's memory)."""
    num_nodes: int = 1
    """Machines."""
    log_every: int = 1
    """Optimiser steps between log lines."""
    val_every: int = 100
    """Optimiser steps between validations."""
    save_every: int = 100
    """Optimiser steps between checkpoints."""
    keep_best: int = 2
    """Heads of the highest validation recall kept in ``out/best``, ready for inference; 0 keeps none."""


@dataclass
class InferConfig:
    """Defaults for inference, written into the checkpoint."""

    budget: int = 6000
    """Slots a KV head keeps in one layer, everything counted."""
    chunk: int = 3072
    """Tokens of one prefill chunk."""
    stabilizers: int = 2500
    """Newest slots that no eviction touches during prefill (n_s); part of the budget."""
    local_len: int = 100
    """Last prompt tokens that are never evicted."""
    positions: str = "compact"
    """'compact' (a slot's rank in the cache), 'original' (its place in the text) or 'clipped(SPAN)' (between)."""
    policy: str | None = None
    """A policy's name or an expression of the grammar; null is locret."""


@dataclass
class PoolSection:
    """LoCoCo's pool, where ``trains`` is 'pool'."""

    slots: int = 64
    """Merged slots of a head; part of ``infer.budget``."""
    kernel: int = 21
    """Slots that a convolution sees at once; odd."""
    gate: float = 0.5
    """Part of the convolution in the mixing weights at first; the rest is each merged slot's own token."""
    policy: str = "h2o"
    """What chooses the slots that stay: a policy's name or an expression."""
    heads: str | None = None
    """Retaining heads (a folder, a file or a Hub id), for policies that score with them."""


@dataclass
class TrainConfig:
    """Everything a training run needs."""

    recipe: str = MISSING
    """Name of the recipe, or path of its YAML file."""
    trains: str = "heads"
    """'heads' (retaining heads) or 'pool' (LoCoCo's convolutions, for ``merge=lococo``; the sections ``heads``, ``target`` and
    ``loss``, ``data.batch`` and ``trainer.keep_best`` are not used then)."""
    backbone: BackboneConfig = field(default_factory=BackboneConfig)
    heads: HeadsSection = field(default_factory=HeadsSection)
    target: TargetConfig = field(default_factory=TargetConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    infer: InferConfig = field(default_factory=InferConfig)
    pool: PoolSection = field(default_factory=PoolSection)
    out: str = "runs/${recipe}"
    """Folder for checkpoints and logs."""
    seed: int = 0
    """Seeds the heads and the samples."""
    resume: str = "never"
    """'auto' (the newest checkpoint in ``out``, if any), 'never' (an ``out`` that holds a run is refused), or a
    checkpoint's path."""

    def validate(self) -> None:
        """Raise ValueError at the first field that is out of bounds, naming field, value and bound."""
        for key, (allowed, bound) in _BOUNDS.items():
            value = _get(self, key)
            if value is not None and not allowed(value):
                raise ValueError(f"{key}={value} must be {bound}")
        for key, names in _CHOICES.items():
            value = _get(self, key)
            if value is not None and value not in names:
                raise ValueError(f"{key}={value} must be one of: {', '.join(names)}.{nearest(value, names)}")
        weights, sources, infer = self.data.weights, self.data.sources, self.infer
        if weights is not None and (len(weights) != len(sources) or not all(0 < w < float("inf") for w in weights)):
            raise ValueError(
                f"data.weights={weights} must be {len(sources)} positive numbers, one for each of data.sources"
            )
        if self.optim.accumulate % self.data.batch:
            raise ValueError(
                f"optim.accumulate={self.optim.accumulate} must be a multiple of data.batch={self.data.batch}"
            )
        spread, strategy = self.backbone.device_map, self.trainer.strategy
        if spread and strategy != "auto":
            raise ValueError(
                f"backbone.device_map={spread} spreads one process's backbone, trainer.strategy={strategy} runs one process "
                "a device: choose trainer.strategy=auto, or fsdp or deepspeed_stage_3 without a map, which shard the backbone"
            )
        if self.backbone.weight_bits and strategy in ("fsdp", "deepspeed_stage_3", "deepspeed_stage_3_offload"):
            raise ValueError(
                f"backbone.weight_bits={self.backbone.weight_bits} packs weights, which trainer.strategy={strategy} would shard: "
                "choose auto, ddp or deepspeed_stage_2"
            )
        if self.backbone.gpu_memory and not spread:
            raise ValueError(
                f"backbone.gpu_memory={self.backbone.gpu_memory} needs a backbone.device_map, such as auto"
            )
        if self.trains == "pool" and self.infer.policy is not None:
            raise ValueError(f"infer.policy={self.infer.policy} has no effect on a pool: name pool.policy")
        if self.trains == "pool" and self.pool.slots >= infer.budget:
            raise ValueError(f"pool.slots={self.pool.slots} must be below infer.budget={infer.budget}")
        for name in ("stabilizers", "local_len"):
            if getattr(infer, name) >= infer.budget:
                raise ValueError(f"infer.{name}={getattr(infer, name)} must be below infer.budget={infer.budget}")
        if self.resume not in ("auto", "never") and not Path(self.resume).exists():
            raise ValueError(f"resume={self.resume} must be 'auto', 'never' or the path of a checkpoint")


def _get(config: Any, key: str) -> Any:
    for name in key.split("."):
        config = getattr(config, name)
    return config


Bound = tuple[Callable[[Any], bool], str]


def _at_least(low: int) -> Bound:
    return lambda x: low <= x < float("inf"), f"at least {low}"


def _reads_as_positions(x: str) -> bool:
    from ..cache.geometry.positions import Positions

    try:
        return Positions.parse(x, 1) is not None
    except ValueError:
        return False


def _reads_as_policy(x: str) -> bool:
    from ..policies.grammar import parse_policy

    return parse_policy(x) is not None  # its own error says what is there


_POSITIVE: Bound = (lambda x: 0 < x < float("inf"), "above 0")
_NOT_EMPTY: Bound = (lambda x: bool(x) and all(x), "a list of at least one name")

_BOUNDS: dict[str, Bound] = {
    "backbone.weight_bits": (lambda x: x in (8, 4), "8 or 4"),
    "backbone.gpu_memory": (lambda x: bool(re.fullmatch(r"\d+(\.\d+)?[KMGT]i?B", x)), "a size such as 18GiB"),
    "heads.d_hidden": _at_least(1),
    "target.floor": (lambda x: float("-inf") < x < 0, "below 0"),
    "target.lead": _at_least(0),
    "loss.top_fraction": (lambda x: 0 < x <= 1, "above 0 and at most 1"),
    "loss.top_weight": _at_least(1),
    "loss.smoothing": _at_least(0),
    "loss.beta": _POSITIVE,
    "data.sources": _NOT_EMPTY,
    "data.texts": _NOT_EMPTY,
    "data.max_tokens": _at_least(2),
    "data.repetitive": (lambda x: 0 <= x <= 1, "within [0, 1]"),
    "data.val_samples": _at_least(0),
    "data.batch": _at_least(1),
    "data.num_workers": _at_least(0),
    "optim.lr": (lambda x: 0 < x <= 1, "above 0 and at most 1"),
    "optim.betas": (lambda x: len(x) == 2 and all(0 <= b < 1 for b in x), "two numbers, each at least 0 and below 1"),
    "optim.weight_decay": _at_least(0),
    "optim.clip_value": _at_least(0),
    "optim.warmup_steps": _at_least(0),
    "optim.steps": _at_least(1),
    "optim.accumulate": _at_least(1),
    "trainer.devices": _at_least(1),
    "trainer.num_nodes": _at_least(1),
    "trainer.log_every": _at_least(1),
    "trainer.val_every": _at_least(1),
    "trainer.save_every": _at_least(1),
    "trainer.keep_best": _at_least(0),
    "pool.slots": _at_least(1),
    "pool.kernel": (lambda x: x >= 1 and x % 2 == 1, "odd and at least 1"),
    "pool.gate": (lambda x: 0 < x < 1, "above 0 and below 1"),
    "infer.budget": _at_least(1),
    "infer.chunk": _at_least(1),
    "infer.stabilizers": _at_least(0),
    "infer.local_len": _at_least(0),
    "infer.policy": (_reads_as_policy, "a policy"),
    "infer.positions": (_reads_as_positions, "compact, original, clipped or clipped(SPAN)"),
    "seed": _at_least(0),
}

_CHOICES = {
    "trains": ("heads", "pool"),
    "backbone.dtype": ("auto", "float32", "bfloat16", "float16"),
    "heads.dtype_saved": ("bfloat16", "float32"),
    "target.kind": ("logit", "log_prob"),
    "backbone.device_map": ("auto", "balanced", "balanced_low_0", "sequential"),
    "trainer.strategy": ("auto", "ddp", "fsdp", "deepspeed_stage_2", "deepspeed_stage_3", "deepspeed_stage_3_offload"),
}
