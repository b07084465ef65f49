"""Options of ``locret-train`` and ``locret-publish``. This module knows no model and imports neither torch nor
Lightning."""

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Gt, Interval, MinLen, Predicate

from ..backbones.gguf import is_gguf
from ..settings import PUBLISHED, SMOOTH_L1, Bytes, Count, PositionScheme, RunSettings, Slots
from ..validation import Description
from .infer_options import Dtype
from .schema import Command

Strategy = Literal["auto", "ddp", "fsdp", "deepspeed_stage_2", "deepspeed_stage_3", "deepspeed_stage_3_offload"]
SHARDED = ("fsdp", "deepspeed_stage_3", "deepspeed_stage_3_offload")
"""Strategies that shard the backbone's weights."""


@dataclass
class BackboneConfig:
    """The frozen language model."""

    model: str
    """Hub id, folder or GGUF file. A relative path is searched from the current folder, then from the installed project."""
    dtype: Dtype = "auto"
    """Data type of the backbone. auto is bfloat16, or float32 on CPUs without instructions for it."""
    weight_bits: Literal[8, 4] | None = None
    """Quantise the layers' weights to n bits with bitsandbytes while loading. Null does not quantise."""
    adapter: str | None = None
    """PEFT adapter for the backbone: Hub id or folder."""
    revision: str | None = None
    """Hub revision of the model: branch, tag or commit."""
    device_map: Literal["auto", "balanced", "balanced_low_0", "sequential"] | None = None
    """Spread a backbone that is too large for one GPU over several, in one process: accelerate's 'auto', 'balanced',
    'balanced_low_0' or 'sequential'. Layers that do not fit go to CPU memory. Null uses one device."""
    gpu_memory: Bytes | None = None
    """Maximum memory per GPU for the weights of a spread backbone, such as 18GiB. Null leaves accelerate's margin."""


@dataclass
class HeadsSection:
    """The retaining heads."""

    d_hidden: Slots = 1024
    """Width of a head's hidden layer."""
    init: str | None = None
    """Initial heads: a folder, a file or a Hub repository. Null starts from random heads."""
    dtype_saved: Literal["bfloat16", "float32"] = "bfloat16"
    """Data type of the saved weights: 'bfloat16' or 'float32'. Training is in float32."""


@dataclass
class TargetConfig:
    """The heads' target."""

    kind: Literal["logit", "log_prob"] = "logit"
    """'logit' (the paper's: the largest raw attention logit) or 'log_prob' (the logit minus each query's
    log-sum-exp)."""
    lead: Count = 0
    """Prompt tokens before each answer that count as its queries. The last one predicts the answer's first token."""


@dataclass
class LossConfig:
    """A loss of the predictions, plus smoothing along the sequence."""

    kind: str = SMOOTH_L1
    """'smooth_l1' (the paper's, with a parameter: ``smooth_l1(beta=0.5)``), or a loss from ``plugin``."""
    top_weight: Annotated[float, Ge(1)] = 1.0
    """Weight of the 5% of each KV head's slots with the highest targets. 1 is the paper's loss."""
    smoothing: Annotated[float, Ge(0)] = 0.0025
    """Weight (alpha) of the mean squared difference between neighbouring predictions in each layer."""


@dataclass
class PoolSection:
    """LoCoCo's pool, for trains=pool."""

    slots: Slots = 64
    """Merged slots per head. They are part of ``infer.budget``."""
    kernel: Annotated[int, Ge(1), Predicate(lambda number: number % 2 == 1), Description("odd and at least 1")] = 21
    """Width of the convolution in slots; odd."""
    norm: bool = False
    """Apply trained layer norms to slots before the convolution."""
    policy: str = "h2o"
    """The policy that selects the slots to keep: a name or an expression."""
    heads: str | None = None
    """Retaining heads (a folder, a file or a Hub id), if the policy needs them."""


@dataclass
class DataConfig:
    """The training samples."""

    sources: Annotated[list[str], MinLen(1)] = field(default_factory=lambda: ["synthetic"])
    """'synthetic' (facts hidden in ``texts``), 'code(FOLDER)' (questions about the folder's Python files; without a
    folder the standard library's), 'self-study(TEXT)' (the backbone writes questions about 128 passages of a text;
    'self-study(TEXT, N)' about N), files or folders of records, folders saved by ``datasets``, or Hub data set ids. Hub
    data sets, and local ones of more than 64 MiB, are read as needed and shuffled within blocks of 512 records."""
    think: bool | None = None
    """Turn the chat template's thinking on or off in training conversations. Null leaves the template's default."""
    weights: list[Annotated[float, Gt(0)]] | None = None
    """Share of samples from each source. Null gives equal shares."""
    texts: Annotated[list[str], MinLen(1)] = field(default_factory=lambda: ["pydoc"])
    """Real text for synthetic samples: 'pydoc', 'jargon', files or folders."""
    max_tokens: Annotated[int, Ge(2)] = 10240
    """Maximum sample length in tokens, prompt and answer together."""
    lengths: Annotated[list[Slots], MinLen(1)] | None = None
    """Lengths in tokens of samples that are made, up to ``max_tokens``. One is drawn for each sample. Null is
    ``max_tokens``."""
    truncate: Literal["middle", "end"] = "middle"
    """Place of the cut in a longer record's user message: the 'middle', which keeps a question at either end, or the
    'end', as in Locret's published code."""
    val_samples: Count = 8
    """Number of validation samples. Their data is set aside and never trained on: a record each, or a tenth of each
    text. 0 skips validation and sets nothing aside."""
    split: str = "train"
    """Split of a data set from the Hub or saved by ``datasets``."""
    batch: Slots = 1
    """Samples per forward, grouped by length and padded to the longest; a divisor of ``optim.accumulate``. It
    changes speed and memory, not the curve: targets and loss ignore the padding."""
    num_workers: Annotated[int, Interval(ge=0, le=1024)] = 0
    """Worker processes per device that prepare samples. 0 prepares them in the training process."""


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
    """Optimiser steps of linear warm-up. Shorter runs do not reach the peak."""
    steps: Slots = 3000
    """Optimiser steps of the whole run."""
    accumulate: Slots = 1
    """Samples per device and optimiser step (gradient accumulation)."""


@dataclass
class TrainerConfig:
    """The machine, validation and checkpoints."""

    accelerator: str = "auto"
    """Accelerator by Lightning's name: 'auto', 'cpu', 'gpu', ..."""
    devices: Slots = 1
    """Devices per machine."""
    strategy: Strategy = "auto"
    """'auto' (one device), 'ddp' (copies on every device), 'fsdp' (heads and backbone sharded), 'deepspeed_stage_2'
    (copies, optimiser sharded), 'deepspeed_stage_3' (all sharded) or 'deepspeed_stage_3_offload' (in the CPU's memory)."""
    num_nodes: Slots = 1
    """Number of machines."""
    val_every: Slots = 100
    """Optimiser steps between validations."""
    save_every: Slots = 100
    """Optimiser steps between checkpoints."""
    keep_best: Count = 2
    """Number of heads to keep in ``out/best``, those with the highest validation recall, ready for inference. 0
    keeps none."""


@dataclass(frozen=True, kw_only=True)
class InferConfig(RunSettings):
    """Defaults for inference, written into the checkpoint."""

    HIDDEN: ClassVar[tuple[str, ...]] = tuple(item.name for item in fields(RunSettings) if item.name not in PUBLISHED)

    budget: Slots = 6000
    """Slots per KV head and layer, everything included."""
    chunk: Slots = 3072
    """Prefill chunk length in tokens."""
    stabilizers: Count = 2500
    """Newest slots that are never evicted during prefill (n_s). They are part of the budget."""
    local_len: Count = 100
    """Last prompt tokens that are never evicted."""
    positions: PositionScheme = "compact"
    """Positions for RoPE: 'compact' (a slot's rank in the cache), 'original' (its position in the text) or
    'clipped(SPAN)' (in between)."""
    policy: str | None = None
    """A policy's name or an expression of the grammar; null is locret."""

    def published(self) -> dict[str, object]:
        """The inference settings that a checkpoint stores."""
        return {name: getattr(self, name) for name in PUBLISHED}


@dataclass(kw_only=True)
class TrainConfig:
    """Train retaining heads, or a pool, on a frozen backbone.

    Examples:
      locret-train recipe=smollm2-135m optim.steps=200 out=runs/mine
      locret-train recipe=phi3-mini data.sources=[path/to/records.jsonl]
      locret-train model=Qwen/Qwen3-4B out=runs/qwen3-4b

    model=NAME is backbone.model=NAME; without a recipe it takes recipe=auto, which chooses the width for the model and the
    length for the device. Keys that are not given are the recipe's, then the defaults. An unknown key or recipe is an error
    that names the nearest; --help all lists the keys.
    """

    recipe: str
    """Recipe: its name, or the path of its YAML file."""
    trains: Literal["heads", "pool"] = "heads"
    """'heads' (retaining heads, from each layer's targets) or 'pool' (LoCoCo's convolutions, for ``merge=lococo``).
    For a pool, the sections ``heads``, ``target`` and ``loss`` have no effect. ``data.batch`` and
    ``trainer.keep_best`` apply to heads only."""
    plugin: str | None = None
    """A module or a Python file that defines your own loss or policies."""
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
    """Output folder for checkpoints and logs."""
    seed: Annotated[int, Interval(ge=0, lt=2**32)] = 0
    """Seed of the heads and the samples."""
    resume: str = "never"
    """Continue a run: 'auto' (from the newest checkpoint in ``out``, if any), 'never' (refuse an ``out`` with a run
    in it), or a checkpoint's path. Settings may differ from the checkpoint's; changes are listed on stderr."""

    def __post_init__(self) -> None:
        """Raise ValueError, with the fields' names, if fields contradict each other."""
        self.recipe = Path(self.recipe).stem if self.recipe.endswith((".yaml", ".yml")) else self.recipe
        self.out = self.out.replace("${recipe}", self.recipe)
        if "${" in self.out:
            raise ValueError(f"out={self.out}: only the name ${{recipe}} is filled in")
        data, optim, infer, backbone = self.data, self.optim, self.infer, self.backbone
        if data.weights is not None and len(data.weights) != len(data.sources):
            raise ValueError(
                f"{data.weights=} must be {len(data.sources)} positive numbers, one for each of data.sources"
            )
        if data.lengths is not None and max(data.lengths) > data.max_tokens:
            raise ValueError(f"{data.lengths=} must be at most {data.max_tokens=}")
        if optim.accumulate % data.batch:
            raise ValueError(f"{optim.accumulate=} must be a multiple of {data.batch=}")
        spread, strategy = backbone.device_map, self.trainer.strategy
        if is_gguf(backbone.model) and (needy := self._needs_float()):
            advice = "leave it out, or name the float model's folder or Hub id"
            raise ValueError(f"{needy} needs float weights, and {backbone.model=} holds packed ones: {advice}")
        if spread and strategy != "auto":
            raise ValueError(
                f"backbone.device_map={spread} spreads one process's backbone, trainer.strategy={strategy} runs one process "
                "a device: choose trainer.strategy=auto, or fsdp or deepspeed_stage_3 without a map, which shard the backbone"
            )
        if backbone.weight_bits and strategy in SHARDED:
            said = f"packs weights, which trainer.strategy={strategy} would shard"
            raise ValueError(f"{backbone.weight_bits=} {said}: choose auto, ddp or deepspeed_stage_2")
        if backbone.gpu_memory and not spread:
            raise ValueError(f"backbone.gpu_memory={backbone.gpu_memory} needs a backbone.device_map, such as auto")
        if self.trains == "pool" and infer.policy is not None:
            raise ValueError(f"infer.policy={infer.policy} has no effect on a pool: name pool.policy")
        if self.trains == "pool" and self.pool.slots >= infer.budget:
            raise ValueError(f"pool.slots={self.pool.slots} must be below {infer.budget=}")
        for name in ("stabilizers", "local_len"):
            if getattr(infer, name) >= infer.budget:
                raise ValueError(f"infer.{name}={getattr(infer, name)} must be below {infer.budget=}")
        if self.resume not in ("auto", "never") and not Path(self.resume).exists():
            raise ValueError(f"resume={self.resume} must be 'auto', 'never' or the path of a checkpoint")
        if (self.plugin, infer.policy, self.loss.kind) != (None, None, SMOOTH_L1):  # torch for these alone
            from ..policies import grammar, registry

            if self.plugin is not None:
                registry.load_plugin(self.plugin)
            grammar.parse_loss(self.loss.kind)
            grammar.parse_policy(infer.policy or "locret")

    def _needs_float(self) -> str | None:
        """The first setting that acts on the backbone's float weights, as ``key=value``."""
        acting = {f"backbone.{name}": getattr(self.backbone, name) for name in ("adapter", "weight_bits", "device_map")}
        acting["trains"] = self.trains if self.trains == "pool" else None
        acting["trainer.strategy"] = self.trainer.strategy if self.trainer.strategy in SHARDED else None
        return next((f"{name}={value}" for name, value in acting.items() if value is not None), None)


@dataclass(frozen=True, kw_only=True)
class PublishOptions:
    """Put retaining heads on the Hugging Face Hub, with card, curves and results.

    Examples:
      locret-publish runs/mine/heads user/name --dry-run
    """

    ckpt: str
    """Retaining heads: a folder or a .pt file; a .bin needs --base-model."""
    repo: str
    """USER/NAME of the repository on the Hub. It is created if missing."""
    private: bool = False
    """Create a private repository. A public one that exists is refused."""
    dry_run: bool = False
    """Print the files and the model card, and upload nothing."""
    message: str = "Upload retaining heads"
    """Commit message."""
    base_model: str | None = None
    """USER/NAME of the backbone on the Hub; USER/NAME:Q4_K_M of a GGUF file. Default: named by the heads."""
    adapter: str | None = None
    """USER/NAME of the PEFT adapter on the Hub. Default: named by the heads."""
    license: str | None = None
    """Licence of the heads. Default: from the model card next to the heads, or apache-2.0."""


PUBLISH = Command(
    "locret-publish", PublishOptions, "HEADS USER/NAME [--key value | key=value ...]", positional=("ckpt", "repo")
)
