"""Inputs of the parts of a policy: new tokens as they enter the cache, and the slots of a layer that must be cut.

Shapes: ``B`` texts, ``H`` key/value heads, ``Q`` query heads, ``G`` query heads of a group, ``S`` slots of a head, ``T`` new
tokens, ``D`` channels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from locret_kernels.attend import window_attention
from locret_kernels.backend import function

from ..backbones.handlers import Linear, Softmax
from ..backbones.rope import Rope

PLAIN = Softmax(1.0)


@dataclass(frozen=True)
class Entry:
    """New tokens of one layer as they enter the cache."""

    layer: int
    position: int
    """Position in the text of the first new token; of tokens of several texts see ``positions``."""
    q: Tensor
    """``[B, Q, T, D]`` before RoPE where the rotation is known."""
    k: Tensor
    """``[B, H, T, D]``"""
    v: Tensor
    """``[B, H, T, D]``"""
    head: nn.Module | None
    """The layer's retaining head, for scores that need one."""
    seed: int
    rope: Rope | None = None
    """The layer's ``Rope``; None where the rotation is not known."""
    state: MutableMapping[str, Tensor] = field(default_factory=dict)
    """The score's state of this layer between calls; shared with ``Slots``. Tensors begin with the batch axis."""
    linear: Linear = F.linear
    """Function that computes the products of a retaining head."""
    places: Tensor | None = None
    """``positions``, where tokens of several texts stand side by side."""

    @property
    def positions(self) -> Tensor:
        """Position of each new token in its text: integers that broadcast to ``[B, H, T]``."""
        if self.places is not None:
            return self.places
        return self.position + torch.arange(self.k.shape[2], device=self.k.device)


def _nothing() -> Tensor:
    raise ValueError("these slots hold no keys, values or queries")


@dataclass
class Slots:
    """The slots of one layer when it must be cut to ``keep`` slots per head. Heads that hold fewer than ``S`` slots (after an
    adaptive allocation) are padded on the left."""

    layer: int
    layers: int
    keep: int
    """Slots that a head of this layer keeps on average, everything counted, after the allocation over layers."""
    stabilizers: int
    """Newest slots protected now; 0 at the last eviction before the tail."""
    chunk: int
    """Tokens between evictions while a prompt is read."""
    since_eviction: int
    """Tokens that entered since the last eviction."""
    seen: int
    """Tokens of the text so far."""
    positions: Tensor
    """``[B, H, S]`` int32, ascending in every head."""
    valid: Tensor
    """``[B, H, S]`` bool; False is padding."""
    pinned: Tensor | None = field(default=None, kw_only=True)
    """``[B, H, S]`` bool: slots that stay, whatever the parts say; None without any."""
    entry_scores: Tensor
    """``[B, H, S]`` float32: what ``Score.score_new_tokens`` returned for the slot; zeros for scores without. What
    ``Score.score_slots`` writes into it stays with the slot."""
    stats: Mapping[str, Tensor]
    """``[B, H, S]`` float32, those that the policy asks for: ``sum`` and ``square`` of the attention received (mean over the
    group), ``above`` (how often it was above average), ``count`` (queries since the slot entered)."""
    keys: Callable[[], Tensor] = _nothing
    """Keys ``[B, H, S, D]`` as attention sees them (rotated), zeros at padding."""
    values: Callable[[], Tensor] = _nothing
    """Values ``[B, H, S, D]``, zeros at padding."""
    raw_keys: Callable[[], Tensor] = _nothing
    """Keys before RoPE; raises ValueError where the rotation is not known."""
    queries: Callable[[], Tensor] = _nothing
    """Queries ``[B, Q, W, D]`` of the newest ``W`` tokens, rotated for the newest ``W`` rows; ``W`` is at most what
    ``Score.recent`` asked for."""
    softmax: Softmax = PLAIN
    """Softmax of the layer's attention."""
    seed: int = 0
    target: str = "logit"
    """Unit of the retaining heads' scores: 'logit' or 'log_prob'."""
    lengths: Sequence[int] | None = None
    """Slots of every head, where some are padded; the host knows them."""
    rope: Rope | None = None
    """The layer's ``Rope``; None where the rotation is not known."""
    next_position: Tensor | None = None
    """RoPE position ``[B, H]`` (int64) of the next token; None unless the score ``needs_unrotated``."""
    state: MutableMapping[str, Tensor] = field(default_factory=dict)
    """The score's state of this layer between calls."""
    group: Sequence[Slots] = ()
    """Views of these slots, one per query head of a group, with its own statistics and queries. Filled if the
    selection asks for them (``Selection.by_query_head``)."""
    query_head_votes: Callable[[Tensor, Tensor], Tensor] | None = None
    """Function of ``valid`` ``[B, H, S]`` and ``budgets`` ``[B, H]``: bits ``[B, H, G, S]``, whether score and scopes alone would
    keep the slot in each query head. ``Policy.choose`` sets it."""
    backend: str = "reference"
    """Backend of ``locret_kernels``."""

    def attention(self, q_BQWD: Tensor, k_BHSD: Tensor, heads: slice = slice(None)) -> Tensor:
        """Attention ``[B, H, S]`` (float32) that queries give keys, as ``locret_kernels.attend.window_attention``;
        ``heads`` are the query heads whose queries they are."""
        if self.softmax.is_plain:
            return function("window_attention", self.backend)(q_BQWD, k_BHSD, self.softmax.scaling)
        return window_attention(q_BQWD, k_BHSD, **self.softmax.of(heads)._asdict())

    def newest(self, n: int) -> Tensor:
        """Boolean ``[B, H, S]``: the newest ``n`` slots of every head."""
        S = self.positions.shape[-1]
        row_S = torch.arange(S, device=self.positions.device)
        return (row_S >= S - n) & self.valid


def joined(slots: Sequence[Slots]) -> Slots:
    """Slots ``[L, H, S]`` of several layers of equal lengths, as though they were texts, for ``Policy.index``."""
    first, pinned = slots[0], [one.pinned for one in slots if one.pinned is not None]
    return replace(
        first,
        positions=torch.cat([one.positions for one in slots]),
        valid=torch.cat([one.valid for one in slots]),
        stats={name: torch.cat([one.stats[name] for one in slots]) for name in first.stats},
        pinned=torch.cat(pinned) if pinned else None,
    )


def wide(x: Tensor) -> Tensor:
    """``x`` (any shape) in float32, or in float64 if it already is."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
