"""Memory of a run, predicted from a transformers configuration alone: integers in, bytes out, no tensor allocated.

Weights, heads and cache are exact. The phases follow the tensors that the code keeps alive. ``tests/config/test_plan.py``
counts the same on PyTorch's meta device for the ``locret`` policy. A fused attention kernel is assumed: where PyTorch needs
an explicit mask (on a CPU), ``chunk * rows`` elements and its scratch come on top. Scratch of attention statistics and of
selecting stays below that of rotating the keys and is not a phase here. A score's own memory besides its queries
(``expected-attention``, ``compactor``) is not counted. Few-bit weights are read as bitsandbytes does it on a GPU for many
tokens (``weight_bits.scratch_bytes``). Library workspaces and the CUDA context are the caller's ``reserve``.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from ..backbones.gguf.gguf_model import AT_ONCE, UNPACKED
from ..backbones.spec import BackboneSpec
from ..backbones.weight_bits import suffix
from ..cache.context import layer_rows
from ..cache.due import PIECE, Schedule
from ..cache.stages import TILE
from ..cache.storage.codec import BITS, Scratch, check_storage
from ..naming import show
from ..policies import Policy
from ..policies.base import Recall
from ..policies.grammar import parse_policy
from ..settings import INT32_MAX, Resolved, RunSettings
from .backbone_sizes import ITEM_BYTES, BackboneSizes, head_parameters


def stored_blocks(recall: Recall, context: int) -> int:
    """Blocks of a head for a text of ``context`` tokens."""
    return -(-context // recall.size)


def recall_bytes(spec: BackboneSpec, recall: Recall, context: int, item: int) -> int:
    """Bytes of all layers on the device: representatives with their worth, which rows are stored, and the slots that come back
    with their positions."""
    blocks, D = stored_blocks(recall, context), spec.head_dim
    keys = recall.representatives * recall.count(spec.n_heads // spec.n_kv_heads)
    index = blocks * (keys * (D * item + 4) + recall.size)
    back = min(recall.take, blocks) * (recall.size * (2 * D * item + 8 + 1) + 8)
    return spec.windows.count(None) * spec.n_kv_heads * (index + back)


def recall_phases(
    spec: BackboneSpec, recall: Recall, context: int, rows: int, tokens: int, item: int
) -> dict[str, int]:
    """Bytes at the widest moments, for ``rows`` rows per head and ``tokens`` tokens per block; an upper bound."""
    H, Q, D, wide = spec.n_kv_heads, spec.n_heads, spec.head_dim, max(item, 4)
    seen = rows + recall.take * recall.size
    keys = rows + recall.representatives * recall.count(Q // H) * stored_blocks(recall, context)
    # Side by side, exact, and rotated with their tables.
    copies = H * seen * 2 * D * (item + wide) + H * seen * D * 4 * item
    tile = min(tokens, TILE) * Q
    return {
        "look up": H * keys * D * (item + wide) + tile * keys * 3 * wide,
        "attend to recalled": copies + tile * seen * 4 * wide + 2 * tokens * Q * D * wide,
    }


ROTATION_COPIES = 4
"""Copies alive while ``rotate`` turns a tensor: the halves swapped, both products, their sum."""
UNPACK_BYTES, QUANTISE_BYTES = 17, 20
"""Bytes of a key's or value's number while codes are read (codes, both float16 levels, three float32), and while keys are written
(the key, its levels, three float32)."""
LOCRET = parse_policy("locret")


@dataclass(frozen=True)
class Setting:
    """One way to run inference, batch 1."""

    context: int
    """Prompt tokens."""
    run: RunSettings
    """Settings of the cache; ``chunk`` is that of reading in chunks, also where ``one_shot`` leaves it aside."""
    dtype: str = "bfloat16"
    """Type of weights, heads, keys and values."""
    d_hidden: int = 1024
    """Width of the retaining heads, for a policy that needs them."""
    policy: Policy = LOCRET
    weight_bits: int | None = None
    """Bits of a weight in the backbone's layers; None is ``dtype``."""

    def __post_init__(self) -> None:
        if not 1 <= self.context <= INT32_MAX:
            raise ValueError(f"context={self.context} must be from 1 to {INT32_MAX} (32-bit positions)")
        _ = self.schedule  # names the field that is out of bounds
        check_storage(self.run.kv_bits, self.policy)

    def with_run(self, **changes: Any) -> Setting:
        """The setting with other settings of the cache."""
        return replace(self, run=replace(self.run, **changes))

    @cached_property
    def chunked(self) -> Resolved:
        """The settings of the cache where it reads in chunks."""
        return replace(self.run, one_shot=False).resolved({}, self.context)

    @cached_property
    def schedule(self) -> Schedule:
        """The integers of the prefill."""
        return Schedule.of(self.run.resolved({}, self.context), self.context)

    @property
    def budget(self) -> int:
        return self.chunked.budget

    @property
    def chunk(self) -> int:
        return self.chunked.chunk

    @property
    def recall(self) -> Recall | None:
        """The recall of evicted slots, in the sizes of this budget."""
        return self.policy.at(self.schedule.budget).recall

    @property
    def width(self) -> int:
        """Width of the retaining heads; 0 where the policy needs none."""
        return self.policy.heads_for(self.d_hidden) or 0

    @property
    def evicts(self) -> bool:
        """Whether the budget bounds the cache."""
        return not self.policy.keeps_everything

    def capacities(self, spec: BackboneSpec) -> list[int]:
        """Rows of a key/value head of each full-attention layer."""
        s, layers = self.schedule, spec.windows.count(None)
        if not self.evicts:
            return [self.context] * layers
        shares = self.policy.layer_budgets(s.budget, layers, s.chunk, s.stabilizers, s.tail, self.context)
        return [share + s.chunk for share in shares]

    def __str__(self) -> str:
        bits = f", {self.run.kv_bits}-bit keys and values" if self.run.kv_bits else ""
        return f"budget {self.budget}, chunk {self.schedule.chunk}, {self.dtype}{suffix(self.weight_bits)}{bits}"


@dataclass(frozen=True)
class Plan:
    """Predicted bytes. The phases of a layer never coincide, so only the largest counts towards the peak."""

    weights: int
    heads: int
    """The heads; on a card those that are folded too."""
    cache: int
    phases: dict[str, int]
    """Bytes that come and go, at the widest moment of each phase."""
    host: int = 0
    """Bytes of evicted slots that may come back, in the host's memory. They are not counted in the peak."""

    @property
    def workspace(self) -> int:
        """Bytes of the largest phase."""
        return max(self.phases.values())

    @property
    def peak(self) -> int:
        """Bytes at the widest moment of the run."""
        return self.weights + self.heads + self.cache + self.workspace

    def lines(self) -> list[str]:
        """A table for people."""
        rows = {"weights": self.weights, "heads": self.heads, "cache": self.cache, "workspace": self.workspace}
        largest = max(self.phases, key=self.phases.__getitem__)
        notes = {"workspace": f"  largest while: {largest}"}
        host = [("host", self.host)] if self.host else []
        return [f"{n:<10} {show(b):>11}{notes.get(n, '')}" for n, b in [*rows.items(), ("peak", self.peak), *host]]


def cache_bytes(spec: BackboneSpec, setting: Setting) -> int:
    """Bytes of the bounded cache's buffers, as the cache makes them: rows of every layer, the newest queries, and where keys and
    values are in few bits the one scratch of all layers, in full.

    Raises:
        ValueError: a head size that the bits do not fit.
    """
    policy, bits, chunk = setting.policy, setting.run.kv_bits, setting.schedule.chunk
    dtype = getattr(torch, setting.dtype)
    capacities = iter(setting.capacities(spec))
    # Layers of equal sizes and capacities hold equal buffers: each kind is laid out once, on no device.
    kinds = Counter((replace(layer, index=0), next(capacities) if layer.window is None else 0) for layer in spec.layers)
    stored = scratch = 0
    for (layer, capacity), count in kinds.items():
        rows = layer_rows(policy, layer, capacity, chunk, bits, Scratch())
        if bits in BITS and layer.window is None:
            scratch = max(scratch, layer.row_size * ITEM_BYTES[setting.dtype] * capacity)
        rows.measure(*layer.empty(dtype, "meta"))
        stored += count * rows.planned_bytes(layer.n_heads)
    stored += sum(size.nbytes(dtype) for size in spec.state_sizes)
    recalled = 0
    if setting.recall is not None:
        recalled = recall_bytes(spec, setting.recall, setting.context, ITEM_BYTES[setting.dtype])
    return stored + scratch + recalled


def store_bytes(spec: BackboneSpec, setting: Setting) -> int:
    """Bytes in the host's memory for evicted slots that may come back: room for every token of the text, in every layer
    without a window."""
    if setting.recall is None:
        return 0
    a_block = spec.n_kv_heads * setting.recall.size * 2 * spec.head_dim * ITEM_BYTES[setting.dtype]
    return spec.windows.count(None) * a_block * stored_blocks(setting.recall, setting.context)


def full_cache_bytes(spec: BackboneSpec, context: int, dtype: str = "bfloat16") -> int:
    """Bytes of an unbounded cache of ``context`` tokens in full-attention layers and of windows in the others."""
    numbers = sum(min(layer.window or context, context) * layer.row_size for layer in spec.layers)
    return numbers * ITEM_BYTES[dtype]


def plan_inference(backbone: BackboneSizes, setting: Setting) -> Plan:
    """Memory of reading ``setting.context`` tokens chunk by chunk (compact positions), and decoding after it."""
    spec, item, policy = backbone.spec, ITEM_BYTES[setting.dtype], setting.policy
    T = min(PIECE if setting.run.one_shot else setting.chunk, setting.context)
    S = min(max(setting.capacities(spec), default=0), setting.context)
    q, k = T * spec.n_heads * spec.head_dim, T * spec.n_kv_heads * spec.head_dim
    rows, kinds = S * spec.n_kv_heads * spec.head_dim, len(set(spec.windows))
    # Through a whole layer: embeddings, residual, normalised hidden states.
    # cos and sin: of the rows, of a chunk in windowed layers, and the ones and zeros that the backbone rotates by
    always = 3 * T * backbone.hidden + 2 * spec.head_dim * (S + (2 * kinds - 1) * T)
    layer = always + (q + 2 * k) + (q + k if backbone.fused else 0)  # a fused projection outlives the rotated q and k
    phases = {
        "score": layer + 2 * (q + 2 * k) + 2 * T * setting.width if setting.width else 0,
        "rotate keys": layer + ROTATION_COPIES * rows,
        "attend": layer + rows + ROTATION_COPIES * q,
        "evict": layer + rows + 3 * q,
        "logits": always + 3 * backbone.vocab,
    }
    if setting.run.kv_bits == 8:  # keys and values are read into the model's dtype, through float32
        phases = {name: n + 2 * rows * (name in ("rotate keys", "attend", "evict")) for name, n in phases.items()}
        phases |= {"unpack": layer + rows + 8 * rows // item, "quantise": layer + 12 * k // item}
    if policy.prefill_mask is not None and (pieces := policy.prefill_mask.visible(S, T)):
        # Keys and values that are seen, side by side.
        seen = sum(len(range(S)[piece]) for piece in pieces) * spec.n_kv_heads * spec.head_dim
        phases["pick"] = layer + (2 + ROTATION_COPIES) * seen
    cache = cache_bytes(spec, setting)
    transient = {name: elements * item for name, elements in phases.items()}
    transient["mlp"] = always * item + backbone.mlp(T, item, setting.weight_bits)
    if setting.weight_bits is not None:
        transient["project"] = backbone.projection(T, item, setting.weight_bits, always, layer + q)
    if backbone.packed_bytes is not None:
        transient["unpack weights"] = (layer + q) * item + UNPACKED * AT_ONCE
    if setting.run.kv_bits in BITS:
        kept = rows - spec.n_kv_heads * spec.head_dim * min(setting.schedule.chunk, max(0, S - 1))
        transient["unpack"] = layer * item + UNPACK_BYTES * kept
        transient["quantise"] = (layer + q) * item + QUANTISE_BYTES * kept
        tables = 2 * spec.head_dim * S
        transient["quantise while decoding"] = (tables + 4 * backbone.vocab) * item + QUANTISE_BYTES * rows
    if policy.sparse is not None:  # at most: keys in float32, what 64 queries weigh, and the rows of each block of 64
        choice = spec.n_heads * S * (12 * min(64, T) + 10 * -(-T // 64))
        transient["choose rows"] = layer * item + 4 * rows + choice
    if setting.recall is not None:
        recalled = recall_phases(spec, setting.recall, setting.context, S, T, item)
        transient |= {name: layer * item + nbytes for name, nbytes in recalled.items()}
    if policy.keeps_everything:  # decoding doubles the room, a layer at a time
        transient["grow"] = always * item + cache + cache // spec.n_layers
    folds = setting.policy.score.is_head and backbone.projects and setting.weight_bits is None and item == 2
    folded = spec.windows.count(None) * setting.width * backbone.hidden if folds else 0
    weights, heads = backbone.weights(item, setting.weight_bits), head_parameters(spec, setting.width) + folded
    return Plan(weights, heads * item, cache, transient, store_bytes(spec, setting))
