"""Memory of a run, predicted from a transformers configuration alone: integers in, bytes out, no tensor allocated.

The terms follow what the code keeps alive, storage by storage; ``tests/test_plan.py`` counts the same on PyTorch's meta
device for the ``locret`` policy. A fused attention kernel is assumed: where PyTorch needs an explicit mask (on a CPU),
``chunk * rows`` elements and its scratch come on top. Scratch of attention statistics and of selecting stays below that of
rotating the keys and is not a phase here. Library workspaces and the CUDA context are the caller's ``reserve``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ..backbones.families import BackboneSpec, require_adapter, spec_of
from ..cache.schedule import Schedule
from ..policies.base import Policy

ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
INT32_MAX = 2**31 - 1
STEP = 64
"""Budgets and chunks that are proposed are multiples of this."""
ROTATION_COPIES = 4
"""Copies alive while ``rope.rotate`` turns a tensor: the halves swapped, both products, their sum."""


class DoesNotFit(ValueError):
    """A plan above its cap; the message names settings that would fit."""


@dataclass(frozen=True)
class Backbone:
    """The sizes of a backbone that memory depends on."""

    spec: BackboneSpec
    vocab: int
    hidden: int
    intermediate: int
    parameters: int

    @classmethod
    def of(cls, config: Any) -> Backbone:
        """Read a (text) configuration. Raises ``UnsupportedArchitecture`` where the kit has no adapter."""
        require_adapter(config)
        spec, hidden, inter = spec_of(config), config.hidden_size, config.intermediate_size
        return cls(spec, config.vocab_size, hidden, inter, parameters_of(config))

    @property
    def fused(self) -> bool:
        """Whether q, k, v come from one projection, and gate and up from another (Phi-3)."""
        return self.spec.model_type == "phi3"


def parameters_of(config: Any) -> int:
    """Weights of the language model, tied embeddings once."""
    spec, hidden, inter = spec_of(config), config.hidden_size, config.intermediate_size
    kind, q_dim = spec.model_type, spec.n_heads * spec.head_dim
    layer = hidden * spec.qkv_dim + q_dim * hidden + 3 * hidden * inter
    layer += (4 if kind == "gemma3_text" else 2) * hidden  # norms before (Gemma: and after) attention and MLP
    if kind in ("qwen3", "gemma3_text"):
        layer += 2 * spec.head_dim  # norms of q and k
    if kind == "qwen2":
        layer += spec.qkv_dim
    elif getattr(config, "attention_bias", False):
        layer += spec.qkv_dim + hidden
    if getattr(config, "mlp_bias", False):
        layer += 2 * inter + hidden
    embeddings = config.vocab_size * hidden * (1 if config.tie_word_embeddings else 2)
    return embeddings + spec.n_layers * layer + hidden


@dataclass(frozen=True)
class Setting:
    """One way to run inference, batch 1."""

    context: int
    """Prompt tokens."""
    budget: int
    chunk: int
    dtype: str = "bfloat16"
    """Of weights, heads, keys and values."""
    d_hidden: int = 1024
    """Width of the retaining heads; 0 for a policy that needs none."""
    statistics: int = 0
    """Running statistics (float32) that the policy keeps for each slot."""
    recent: int = 0
    """Newest queries that the policy keeps at hand in each layer."""
    ragged: bool = False
    """Whether heads differ in rows; the rows are as many, each head has its own start and length."""

    @classmethod
    def for_policy(cls, policy: Policy, context: int, budget: int, chunk: int, *, dtype: str, d_hidden: int) -> Setting:
        """What a policy keeps beside keys and values; heads only where it needs them."""
        return cls(
            context, budget, chunk, dtype, d_hidden if policy.needs_heads else 0,
            statistics=len(policy.statistics - {"count"}), recent=policy.score.recent(chunk), ragged=policy.ragged,
        )  # fmt: skip

    def __post_init__(self) -> None:
        Schedule(self.budget, self.chunk, prompt_length=self.context)  # names the field that is out of bounds
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"dtype={self.dtype!r} must be one of: {', '.join(ITEM_BYTES)}")
        for name in ("d_hidden", "statistics", "recent"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 0")
        if max(self.context, self.capacity) > INT32_MAX:
            raise ValueError(
                f"context={self.context} and budget+chunk={self.capacity} must be at most {INT32_MAX} (32-bit positions)"
            )

    @property
    def capacity(self) -> int:
        """Rows of a key/value head."""
        return Schedule(self.budget, self.chunk).capacity

    def __str__(self) -> str:
        return f"budget {self.budget}, chunk {self.chunk}"


@dataclass(frozen=True)
class Plan:
    """Predicted bytes. The phases of a layer never coincide, so only the largest counts towards the peak."""

    weights: int
    heads: int
    """The heads and, in training, their gradients and optimiser state."""
    cache: int
    phases: dict[str, int]
    """Bytes that come and go, at the widest moment of each phase."""

    @property
    def workspace(self) -> int:
        return max(self.phases.values())

    @property
    def peak(self) -> int:
        return self.weights + self.heads + self.cache + self.workspace

    def lines(self) -> list[str]:
        """A table for people."""
        rows = {"weights": self.weights, "heads": self.heads, "cache": self.cache, "workspace": self.workspace}
        largest = max(self.phases, key=self.phases.__getitem__)
        notes = {"workspace": f"  largest while: {largest}"}
        return [f"{n:<10} {show(b):>11}{notes.get(n, '')}" for n, b in [*rows.items(), ("peak", self.peak)]]


def cache_bytes(spec: BackboneSpec, setting: Setting) -> int:
    """Bytes of the bounded cache's buffers: keys, values, position, score and statistics of every row, and the newest
    queries of every layer. Layers with a window keep neither statistics nor queries."""
    item, row = ITEM_BYTES[setting.dtype], 2 * spec.head_dim * ITEM_BYTES[setting.dtype] + 4 + 4
    full = setting.capacity * (row + 4 * setting.statistics) + (2 * 8 if setting.ragged else 0)
    queries = spec.n_heads * setting.recent * spec.head_dim * item
    return sum(
        spec.n_kv_heads * full + queries if window is None else spec.n_kv_heads * row * (window - 1 + setting.chunk)
        for window in spec.windows
    )


def full_cache_bytes(spec: BackboneSpec, context: int, dtype: str = "bfloat16") -> int:
    """Bytes of an unbounded cache of ``context`` tokens in full-attention layers and of windows in the others."""
    rows = sum(context if window is None else min(window, context) for window in spec.windows)
    return rows * spec.n_kv_heads * 2 * spec.head_dim * ITEM_BYTES[dtype]


def head_parameters(spec: BackboneSpec, d_hidden: int) -> int:
    """Weights of all retaining heads."""
    return spec.n_layers * d_hidden * (spec.qkv_dim + spec.n_kv_heads)


def plan_inference(backbone: Backbone, setting: Setting) -> Plan:
    """Memory of reading ``setting.context`` tokens chunk by chunk (compact positions), and decoding after it."""
    spec, item = backbone.spec, ITEM_BYTES[setting.dtype]
    T, S = min(setting.chunk, setting.context), min(setting.capacity, setting.context)
    q, k = T * spec.n_heads * spec.head_dim, T * spec.n_kv_heads * spec.head_dim
    rows, kinds = S * spec.n_kv_heads * spec.head_dim, len(set(spec.windows))
    # cos and sin: of the rows, of a chunk in windowed layers, and the ones and zeros that the backbone rotates by
    always = _stream(backbone, T) + 2 * spec.head_dim * (S + (2 * kinds - 1) * T) + backbone.vocab
    held = always + (q + 2 * k) + (q + k if backbone.fused else 0)  # a fused projection outlives the rotated q and k
    phases = {
        "score": held + 2 * (q + 2 * k) + 2 * T * setting.d_hidden if setting.d_hidden else 0,
        "rotate keys": held + ROTATION_COPIES * rows,
        "attend": held + rows + ROTATION_COPIES * q,
        "evict": held + rows + 3 * q,
        "mlp": always + _mlp(backbone, T),
        "logits": always + 3 * backbone.vocab,
    }
    return Plan(
        weights=backbone.parameters * item,
        heads=head_parameters(spec, setting.d_hidden) * item,
        cache=cache_bytes(spec, setting),
        phases={name: elements * item for name, elements in phases.items()},
    )


def _stream(backbone: Backbone, T: int) -> int:
    """Elements alive through a whole layer: embeddings, residual, normalised hidden states."""
    return 3 * T * backbone.hidden


def _mlp(backbone: Backbone, T: int) -> int:
    """Elements alive at the MLP's widest moment: the layer's input, and activation, up and their product (a fused
    projection keeps gate too)."""
    return T * (backbone.hidden + (4 if backbone.fused else 3) * backbone.intermediate)


@dataclass(frozen=True)
class TrainSetting:
    """One training step: a sample of ``tokens``, of which ``answer`` are its answer."""

    tokens: int
    answer: int = 64
    dtype: str = "bfloat16"
    """Of the backbone; heads, their gradients and AdamW's two moments are float32."""
    d_hidden: int = 1024
    block: int = 64
    """Answer queries that ``cis_target`` reads at a time."""

    def __post_init__(self) -> None:
        for name in ("tokens", "answer", "d_hidden"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.answer >= self.tokens:
            raise ValueError(f"answer={self.answer} must be below tokens={self.tokens}")
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"dtype={self.dtype!r} must be one of: {', '.join(ITEM_BYTES)}")

    def __str__(self) -> str:
        return f"{self.tokens} tokens, {self.answer} of them the answer"


def plan_training(backbone: Backbone, setting: TrainSetting) -> Plan:
    """Memory of one step: a forward of the frozen backbone in which one layer's head at a time holds a graph."""
    spec, item, T = backbone.spec, ITEM_BYTES[setting.dtype], setting.tokens
    prompt, heads = T - setting.answer, head_parameters(spec, setting.d_hidden)
    q, k = T * spec.n_heads * spec.head_dim, T * spec.n_kv_heads * spec.head_dim
    held = (q + 2 * k) + (q + k) + (q + k if backbone.fused else 0)  # before and after RoPE
    logits = spec.n_heads * min(setting.block, setting.answer) * T
    phases = {
        "rotate": (held + 3 * q) * item,
        "target": held * item + 4 * (3 * logits + k),
        "head": held * item + prompt * (spec.qkv_dim * (item + 4) + 2 * 4 * setting.d_hidden),
        "mlp": _mlp(backbone, T) * item,
    }
    return Plan(
        weights=backbone.parameters * item,
        heads=4 * 4 * heads,
        cache=0,
        phases={name: _stream(backbone, T) * item + size for name, size in phases.items()} | {"optimiser": 4 * heads},
    )


# ---- what fits ----------------------------------------------------------------------------------------------------


def largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest value in ``1..most`` for which a predicate that never turns true again holds; 0 if none does."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def largest_budget(backbone: Backbone, setting: Setting, cap: int) -> int:
    """The largest budget (a multiple of ``STEP``, at most the context) that fits ``cap`` bytes at the setting's chunk;
    0 if none does."""
    return _largest_setting(backbone, cap, setting.context, lambda n: replace(setting, budget=n))


def largest_chunk(backbone: Backbone, setting: Setting, cap: int) -> int:
    """The largest chunk (likewise) that fits ``cap`` bytes at the setting's budget; 0 if none does."""
    return _largest_setting(backbone, cap, setting.context, lambda n: replace(setting, chunk=n))


def _largest_setting(backbone: Backbone, cap: int, most: int, at: Callable[[int], Setting]) -> int:
    return STEP * largest(lambda n: plan_inference(backbone, at(STEP * n)).peak <= cap, most // STEP)


def largest_sample(backbone: Backbone, setting: TrainSetting, cap: int, most: int = 2**20) -> int:
    """The longest training sample (tokens, at most ``most``) that fits ``cap`` bytes; 0 if none does."""
    low = setting.answer + 1
    found = largest(lambda n: plan_training(backbone, replace(setting, tokens=low + n)).peak <= cap, most - low)
    return low + found if found else 0


def nearest_fitting(backbone: Backbone, setting: Setting, cap: int) -> list[Setting]:
    """Up to three settings below ``cap``, each the largest of its kind: a smaller chunk alone, a smaller budget alone,
    both in the same proportion, then smaller budgets at a half, a quarter, ... of the chunk."""
    found: list[Setting] = []
    if chunk := min(largest_chunk(backbone, setting, cap), setting.chunk):
        found.append(replace(setting, chunk=chunk))

    def scaled(n: int) -> Setting:
        budget, chunk = (max(1, x * n // setting.capacity) for x in (setting.budget, setting.chunk))
        return replace(setting, budget=budget, chunk=chunk)

    halves = [replace(setting, chunk=setting.chunk >> n) for n in range(setting.chunk.bit_length())]
    smaller = [(s, min(largest_budget(backbone, s, cap), s.budget)) for s in halves]
    found += [replace(s, budget=budget) for s, budget in smaller[:1] if budget]
    if rows := _largest_setting(backbone, cap, setting.capacity, scaled):
        found.append(scaled(rows))
    found += [replace(s, budget=budget) for s, budget in smaller[1:] if budget]
    return list(dict.fromkeys(found))[:3]


def require_fit(backbone: Backbone, setting: Setting, cap: int) -> Plan:
    """The plan, if it fits ``cap`` bytes.

    Raises:
        DoesNotFit: with the three nearest settings that would, or the bytes that no setting can go below.
    """
    plan = plan_inference(backbone, setting)
    if plan.peak <= cap:
        return plan
    said = f"{setting} at context {setting.context} needs {show(plan.peak)}, above the cap of {show(cap)}"
    if near := nearest_fitting(backbone, setting, cap):
        fitting = "; ".join(f"{s} ({show(plan_inference(backbone, s).peak)})" for s in near)
        raise DoesNotFit(f"{said}. These fit: {fitting}")
    least = plan_inference(backbone, replace(setting, budget=1, chunk=1))
    raise DoesNotFit(f"{said}. No setting fits: weights and heads alone take {show(least.weights + least.heads)}")


def parse_bytes(text: str) -> int:
    """``24GiB``, ``24GB`` (decimal) or plain bytes, as an integer.

    Raises:
        ValueError: not a positive number with a known unit.
    """
    number = text.strip().rstrip("KMGTiB")
    unit = text.strip()[len(number) :]
    try:
        size = float(number) * UNITS[unit]
    except (KeyError, ValueError):
        raise ValueError(
            f"{text!r} is not a size such as 24GiB or 24GB; units: {', '.join(filter(None, UNITS))}"
        ) from None
    if not 0 < size < float("inf"):
        raise ValueError(f"{text!r} must be above 0")
    return int(size)


def show(size: int) -> str:
    """Bytes as a person reads them."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**29 else f"{size / 2**20:.1f} MiB"
