"""The options of ``locret-train`` and ``locret-publish``. This module knows no model and imports neither torch nor Lightning."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Gt, Interval, MinLen, Predicate

from ..backbones.gguf import is_gguf
from ..settings import PUBLISHED, SMOOTH_L1, Bytes, Count, Description, RunSettings, Slots, is_positions
from .infer_options import Dtype
from .schema import Command

Strategy = Literal["auto", "ddp", "fsdp", "deepspeed_stage_2", "deepspeed_stage_3", "deepspeed_stage_3_offload"]


@dataclass
class BackboneConfig:
    """The frozen language model."""

    model: str
    """Hub id or folder. A relative folder is looked for here first, then beside the installed project."""
    dtype: Dtype = "auto"
    """auto is bfloat16, unless a CPU is slower with it."""
    weight_bits: Literal[8, 4] | None = None
    """Bits of the layers' weights, quantised by bitsandbytes as they are loaded; null leaves them in ``dtype``."""
    adapter: str | None = None
    """PEFT adapter to put on the backbone: Hub id or folder."""
    revision: str | None = None
    """Hub revision of the model: branch, tag or commit."""
    device_map: Literal["auto", "balanced", "balanced_low_0", "sequential"] | None = None
    """For a backbone that no one GPU holds, in one process: 'auto', 'balanced', 'balanced_low_0' or 'sequential' spread
    its layers over the GPUs, and over the CPU's memory what is left, as accelerate places them. Null: on one device."""
    gpu_memory: Bytes | None = None
    """Most of each GPU that a spread backbone's weights may take, such as 18GiB; null leaves accelerate's margin."""


@dataclass
class HeadsSection:
    """The retaining heads."""

    d_hidden: Slots = 1024
    """Width of a head's hidden layer."""
    init: str | None = None
    """Heads to begin with: a folder, a file or a Hub repository; null begins with random ones."""
    dtype_saved: Literal["bfloat16", "float32"] = "bfloat16"
    """'bfloat16' or 'float32': the type of the saved weights. Training is in float32."""


@dataclass
class TargetConfig:
    """The target that the heads learn to predict."""

    kind: Literal["logit", "log_prob"] = "logit"
    """'logit' (the paper's: the largest raw attention logit) or 'log_prob' (the same minus each query's log-sum-exp)."""
    lead: Count = 0
    """Prompt tokens before each answer whose queries count as the answer's; the last one predicts its first token."""


@dataclass
class LossConfig:
    """A loss of the predictions plus smoothing along the sequence."""

    kind: str = SMOOTH_L1
    """'smooth_l1' (the paper's; ``smooth_l1(beta=0.5)``), or a loss of ``plugin``, with its parameters."""
    top_weight: Annotated[float, Ge(1)] = 1.0
    """Weight of the twentieth of each KV head's slots that have the highest targets; 1 is the paper's loss."""
    smoothing: Annotated[float, Ge(0)] = 0.0025
    """Weight (alpha) of the mean squared difference of neighbouring predictions, in each layer."""


@dataclass
class PoolSection:
    """LoCoCo's pool, where ``trains`` is 'pool'."""

    slots: Slots = 64
    """Merged slots of a head; part of ``infer.budget``."""
    kernel: Annotated[int, Ge(1), Predicate(lambda number: number % 2 == 1), Description("odd and at least 1")] = 21
    """Slots that a convolution sees at once; odd."""
    norm: bool = False
    """Whether slots are layer-normed before the convolution, by norms that are trained with it."""
    policy: str = "h2o"
    """The policy that chooses the slots that stay: a name or an expression."""
    heads: str | None = None
    """Retaining heads (a folder, a file or a Hub id), for policies that score with them."""


@dataclass
class DataConfig:
    """The training samples."""

    sources: Annotated[list[str], MinLen(1)] = field(default_factory=lambda: ["synthetic"])
    """'synthetic', files or folders of records, folders that ``datasets`` saved, or Hub data set ids. Those of the Hub, and local
    ones of more than 64 MiB, are read as steps need them, and shuffled within some 512 records."""
    think: bool | None = None
    """Whether conversations are rendered with the chat template's thoughts switched on or off; null leaves its own choice."""
    weights: list[Annotated[float, Gt(0)]] | None = None
    """Share of samples from each source; null draws from all sources alike."""
    texts: Annotated[list[str], MinLen(1)] = field(default_factory=lambda: ["pydoc"])
    """Real text that synthetic samples are made of: 'pydoc', 'jargon', files or folders."""
    max_tokens: Annotated[int, Ge(2)] = 10240
    """Longest sample, prompt and answer together, tokens."""
    truncate: Literal["middle", "end"] = "middle"
    """Part of a longer record's user message that is cut: its 'middle', so that a question at either end stays, or its 'end',
    as Locret's published code cuts prompts."""
    val_samples: Count = 8
    """Validation samples. What they are made of is set aside, and never trained on: a record each, or a tenth of each text.
    0 skips validation and sets nothing aside."""
    split: str = "train"
    """Split of a Hub data set, or of a saved one that has several."""
    batch: Slots = 1
    """Samples of one forward, those of like length together, padded to the longest; a divisor of ``optim.accumulate``.
    It changes speed and memory, not the curve: targets and loss never see the padding."""
    num_workers: Annotated[int, Interval(ge=0, le=1024)] = 0
    """Processes that make training samples ahead of each device; 0 makes them in the training process."""


@dataclass
class OptimConfig:
    """AdamW with linear warm-up and decay."""

    lr: Annotated[float, Interval(gt=0, le=1)] = 5e-4
    """Peak learning rate."""
    weight_decay: Annotated[float, Ge(0)] = 0.0
    """AdamW's decoupled weight decay."""
    clip_value: Annotated[float, Ge(0)] = 0.5
    """Largest absolute value of a gradient element; 0 does not clip."""
    warmup_steps: Count = 2000
    """Optimiser steps of linear warm-up; the peak is not reached in a run of fewer steps."""
    steps: Slots = 3000
    """Optimiser steps of the whole run."""
    accumulate: Slots = 1
    """Samples on each device whose gradients make one optimiser step."""


@dataclass
class TrainerConfig:
    """The machine, and what training writes when."""

    accelerator: str = "auto"
    """Lightning's name: 'auto', 'cpu', 'gpu', ..."""
    devices: Slots = 1
    """Devices on each node."""
    strategy: Strategy = "auto"
    """'auto' (one device), 'ddp' (copies on every device), 'fsdp' (heads and backbone sharded), 'deepspeed_stage_2'
    (copies, optimiser sharded), 'deepspeed_stage_3' (all sharded) or 'deepspeed_stage_3_offload' (in the CPU's memory)."""
    num_nodes: Slots = 1
    """Machines."""
    val_every: Slots = 100
    """Optimiser steps between validations."""
    save_every: Slots = 100
    """Optimiser steps between checkpoints."""
    keep_best: Count = 2
    """Heads of the highest validation recall kept in ``out/best``, ready for inference; 0 keeps none."""


@dataclass(frozen=True, kw_only=True)
class InferConfig(RunSettings):
    """Defaults for inference, written into the checkpoint."""

    HIDDEN: ClassVar[tuple[str, ...]] = tuple(item.name for item in fields(RunSettings) if item.name not in PUBLISHED)

    budget: Slots = 6000
    """Slots a KV head keeps in one layer, everything counted."""
    chunk: Slots = 3072
    """Tokens of one prefill chunk."""
    stabilizers: Count = 2500
    """Newest slots that no eviction touches during prefill (n_s); part of the budget."""
    local_len: Count = 100
    """Last prompt tokens that are never evicted."""
    positions: Annotated[str, Predicate(is_positions)] = "compact"
    """'compact' (a slot's rank in the cache), 'original' (its place in the text) or 'clipped(SPAN)' (between)."""
    policy: str | None = None
    """A policy's name or an expression of the grammar; null is locret."""

    def published(self) -> dict[str, object]:
        """The settings that a checkpoint brings to inference."""
        return {name: getattr(self, name) for name in PUBLISHED}


@dataclass(kw_only=True)
class TrainConfig:
    """Everything a training run needs."""

    recipe: str
    """Name of the recipe, or path of its YAML file."""
    trains: Literal["heads", "pool"] = "heads"
    """'heads' (retaining heads, from each layer's targets) or 'pool' (LoCoCo's convolutions, for ``merge=lococo``; the sections
    ``heads``, ``target`` and ``loss`` are not used then). ``data.batch`` and ``trainer.keep_best`` are of 'heads' alone."""
    plugin: str | None = None
    """A module, or a Python file, that brings a loss or policies of your own."""
    backbone: BackboneConfig
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
    seed: Annotated[int, Interval(ge=0, lt=2**32)] = 0
    """Seeds the heads and the samples."""
    resume: str = "never"
    """'auto' (the newest checkpoint in ``out``, if any), 'never' (an ``out`` that holds a run is refused), or a
    checkpoint's path. Settings other than the checkpoint's count from there on, and are named on stderr."""

    def __post_init__(self) -> None:
        """Raise ValueError at fields that do not go together, naming them."""
        self.recipe = Path(self.recipe).stem if self.recipe.endswith((".yaml", ".yml")) else self.recipe
        self.out = self.out.replace("${recipe}", self.recipe)
        if "${" in self.out:
            raise ValueError(f"out={self.out}: of all names only ${{recipe}} is filled in")
        weights, sources, infer = self.data.weights, self.data.sources, self.infer
        if weights is not None and len(weights) != len(sources):
            raise ValueError(
                f"data.weights={weights} must be {len(sources)} positive numbers, one for each of data.sources"
            )
        if self.optim.accumulate % self.data.batch:
            raise ValueError(
                f"optim.accumulate={self.optim.accumulate} must be a multiple of data.batch={self.data.batch}"
            )
        if is_gguf(self.backbone.model):
            raise ValueError(
                f"backbone.model={self.backbone.model!r} holds packed weights, which are for running alone: train on the float "
                "model's folder or Hub id; its heads then run on this file (--ckpt HEADS --model FILE.gguf)"
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
        if (self.plugin, self.infer.policy, self.loss.kind) != (None, None, SMOOTH_L1):  # torch for these alone
            from ..policies import grammar, registry

            if self.plugin is not None:
                registry.load_plugin(self.plugin)
            grammar.parse_loss(self.loss.kind)
            grammar.parse_policy(self.infer.policy or "locret")


PUBLISH_USAGE = """usage: locret-publish HEADS USER/NAME [--key value | key=value ...]

Put retaining heads on the Hugging Face Hub, with card, curves and results.

  locret-publish runs/mine/heads user/name --dry-run"""


@dataclass(frozen=True, kw_only=True)
class PublishOptions:
    """Heads to publish, and their names on the Hub."""

    ckpt: str
    """Retaining heads: a folder or a .pt file; a .bin needs --base-model."""
    repo: str
    """USER/NAME: where they go; made if it is not there."""
    private: bool = False
    """Make a new repository private."""
    dry_run: bool = False
    """Print the files and the card, and send nothing."""
    message: str = "Upload retaining heads"
    """Message of the commit."""
    base_model: str | None = None
    """USER/NAME: the backbone as others load it. Default: what the heads say."""
    adapter: str | None = None
    """USER/NAME: the PEFT adapter as others load it. Default: what the heads say."""
    license: str | None = None
    """Default: the card's beside the heads, or apache-2.0."""


PUBLISH = Command("locret-publish", PublishOptions, PUBLISH_USAGE, positional=("ckpt", "repo"))
