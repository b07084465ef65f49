"""The seam: what a policy's parts are given, and how they choose the slots that stay.

A policy answers four questions, each with one part: what is a slot worth (score), which slots may not go now (scopes),
how many slots does each layer and each head get (allocation), and which slots stay (selection). Three parts may be absent: one
folds what goes into what stays (merging), one says which slots a token of the prompt sees (reading), one which slots the
prompt's end and the answer see (answering). Parts know nothing of models, caches or files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Entry:
    """New tokens of one layer as they enter the cache."""

    layer: int
    position: int
    """Position in the text of the first new token."""
    q: Tensor
    """``[B, Q, T, D]`` as the backbone hands them over: before RoPE where the architecture has an adapter."""
    k: Tensor
    """``[B, H, T, D]``"""
    v: Tensor
    """``[B, H, T, D]``"""
    head: nn.Module | None
    """The layer's retaining head, for scores that need one."""
    seed: int
    rope: Any = None
    """The layer's ``Rope``; None where the architecture has no adapter."""
    state: MutableMapping[str, Tensor] = field(default_factory=dict)
    """What the score keeps of this layer between calls; shared with ``Slots``. Tensors begin with the batch axis."""


def _nothing() -> Tensor:
    raise ValueError("these slots hold no keys, values or queries")


@dataclass
class Slots:
    """The slots of one layer when it must be cut to ``keep`` slots a head. Heads that hold fewer than ``S`` slots (after an
    adaptive allocation) are padded on the left."""

    layer: int
    layers: int
    keep: int
    """Slots a head of this layer keeps on average, everything counted, after the allocation over layers."""
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
    entry_scores: Tensor
    """``[B, H, S]`` float32: what ``Score.score_new_tokens`` returned for the slot; zeros for scores without. What
    ``Score.score_slots`` writes into it stays with the slot."""
    stats: Mapping[str, Tensor]
    """``[B, H, S]`` float32, those that the policy asks for: ``sum`` and ``square`` of the attention received (mean over the
    group), ``above`` (how often it was above average), ``count`` (queries that have seen the slot)."""
    keys: Callable[[], Tensor] = _nothing
    """Keys ``[B, H, S, D]`` as attention sees them (rotated), zeros at padding."""
    values: Callable[[], Tensor] = _nothing
    """Values ``[B, H, S, D]``, zeros at padding."""
    raw_keys: Callable[[], Tensor] = _nothing
    """Keys before RoPE; raises ValueError where the architecture has no adapter."""
    queries: Callable[[], Tensor] = _nothing
    """Queries ``[B, Q, W, D]`` of the newest ``W`` tokens, rotated for the newest ``W`` rows; ``W`` is at most what
    ``Score.recent`` asked for."""
    scaling: float = 1.0
    seed: int = 0
    target: str = "logit"
    """Unit of the retaining heads' scores: 'logit' or 'log_prob'."""
    lengths: Sequence[int] | None = None
    """Slots of every head, one item of the batch after another, where some are padded; the host knows them."""
    rope: Any = None
    """The layer's ``Rope``; None where the architecture has no adapter."""
    next_position: Tensor | None = None
    """Position ``[B, H]`` (int64) by which the next token would be rotated."""
    state: MutableMapping[str, Tensor] = field(default_factory=dict)
    """What the score keeps of this layer between calls."""
    backend: str = "reference"
    """Of ``locret_kernels``."""

    def newest(self, n: int) -> Tensor:
        """Boolean ``[B, H, S]``: the newest ``n`` slots of every head."""
        S = self.positions.shape[-1]
        row_S = torch.arange(S, device=self.positions.device)
        return (row_S >= S - n) & self.valid


def resolve_count(size: int | float, whole: int) -> int:
    """A size that is a number of tokens (an integer) or a fraction of ``whole`` (a float), rounded down, at most ``whole``."""
    return min(int(size * whole) if isinstance(size, float) else size, whole)


def at_least(part: str, low: int, **parameters: float) -> None:
    """Raise ValueError for a parameter of ``part`` below ``low``."""
    for name, value in parameters.items():
        if value < low:
            raise ValueError(f"{part}({name}={value}): {name} must be at least {low}")


class Score(Protocol):
    """How much a slot is worth. Derive from ``ScorePart`` for the defaults."""

    needs_heads: ClassVar[bool]
    """Reads retaining heads."""
    needs_adapter: ClassVar[bool]
    """Reads queries or keys before RoPE."""
    needs_logits: ClassVar[bool]
    """Reads the backbone's probability of each token."""
    statistics: ClassVar[frozenset[str]]
    """The running statistics to keep: of ``sum``, ``square``, ``above``, ``count``."""

    def recent(self, chunk: int) -> int:
        """How many of the newest queries must be kept at hand."""
        ...

    def score_new_tokens(self, entry: Entry) -> Tensor | None:
        """Scores ``[B, H, T]`` (float32) fixed when tokens enter; None where there are none."""
        ...

    def score_slots(self, slots: Slots) -> Tensor:
        """Scores ``[B, H, S]`` (float32); larger is kept. Anything at padding."""
        ...

    def comparable(self, scores_BHS: Tensor, slots: Slots) -> Tensor:
        """The same scores in a unit that can be compared across heads, for allocations over heads."""
        ...

    def log_weight(self, scores_BHS: Tensor) -> Tensor:
        """The logarithm (finite) of what a token weighs where slots are merged."""
        ...


class ScorePart:
    """The defaults of a score: nothing is needed, a slot is worth what it was when it entered, and when slots are merged all
    tokens weigh the same (a position, a norm or a similarity is no weight)."""

    needs_heads: ClassVar[bool] = False
    needs_adapter: ClassVar[bool] = False
    needs_logits: ClassVar[bool] = False
    statistics: ClassVar[frozenset[str]] = frozenset()

    def recent(self, chunk: int) -> int:
        return 0

    def score_new_tokens(self, entry: Entry) -> Tensor | None:
        return None

    def score_slots(self, slots: Slots) -> Tensor:
        return slots.entry_scores

    def comparable(self, scores_BHS: Tensor, slots: Slots) -> Tensor:
        return scores_BHS

    def log_weight(self, scores_BHS: Tensor) -> Tensor:
        return torch.zeros_like(scores_BHS)


class Scope(Protocol):
    """Which slots may not be evicted now. Derive from ``ScopePart`` for the defaults."""

    statistics: ClassVar[frozenset[str]]

    def window(self, budget: int, chunk: int, stabilizers: int) -> int:
        """How many of the newest slots this scope always protects: what a pyramid leaves every layer."""
        ...

    def protects(self, slots: Slots) -> Tensor:
        """Boolean ``[B, H, S]``; True stays while there is room."""
        ...


class ScopePart:
    """The defaults of a scope: no statistics, no window."""

    statistics: ClassVar[frozenset[str]] = frozenset()

    def window(self, budget: int, chunk: int, stabilizers: int) -> int:
        return 0


class Allocation(Protocol):
    """How many slots each layer and each head gets. Derive from ``Uniform`` for the defaults."""

    ragged: ClassVar[bool]
    """Whether heads of one layer may get different numbers."""

    def layer_budgets(self, budget: int, layers: int, window: int, longest: int | None = None) -> list[int]:
        """Slots a head of each layer; the sum is ``layers * budget``. ``longest``: tokens of the prompt, where known."""
        ...

    def head_budgets(self, scores_BHS: Tensor, protected_BHS: Tensor, valid_BHS: Tensor, keep: int) -> Tensor:
        """Slots ``[B, H]`` (int64) of each head; the sum over heads is ``H * keep``, and no head gets more than it holds.
        The scores are comparable across heads."""
        ...


@dataclass(frozen=True)
class Uniform:
    """The budget for every layer and head: the default of an allocation, over layers and over heads."""

    ragged: ClassVar[bool] = False

    def layer_budgets(self, budget: int, layers: int, window: int, longest: int | None = None) -> list[int]:
        return [budget] * layers

    def head_budgets(self, scores_BHS: Tensor, protected_BHS: Tensor, valid_BHS: Tensor, keep: int) -> Tensor:
        return valid_BHS.sum(-1).clamp(max=keep)


class Selection(Protocol):
    """Which slots stay, given scores, scope and the number for each head."""

    def select(
        self, scores_BHS: Tensor, protected_BHS: Tensor, valid_BHS: Tensor, budgets_BH: Tensor, slots: Slots
    ) -> Tensor:
        """Boolean ``[B, H, S]`` with exactly ``budgets_BH`` True in each head, none of them padding."""
        ...


def rank_of(scores_BHS: Tensor, protected_BHS: Tensor, valid_BHS: Tensor) -> Tensor:
    """Place ``[B, H, S]`` (int64, 0 is the best) of every slot in its head: protected first, then by score, ties to the
    newer slot, padding last. So runs repeat exactly."""
    lowest = torch.finfo(scores_BHS.dtype).min
    keys_BHS = scores_BHS.clamp(min=lowest, max=-lowest).masked_fill(protected_BHS, float("inf"))
    keys_BHS = keys_BHS.masked_fill(~valid_BHS, float("-inf"))
    order_BHS = keys_BHS.flip(-1).argsort(dim=-1, descending=True, stable=True)
    place_S = torch.arange(keys_BHS.shape[-1], device=keys_BHS.device).expand_as(order_BHS)
    return torch.empty_like(order_BHS).scatter_(-1, order_BHS, place_S).flip(-1)


def rows_of(stay_BHS: Tensor, keep: int) -> Tensor:
    """Row indices ``[B, H, keep]`` (int64, ascending) of a boolean with ``keep`` True in each head."""
    place_BHS = (stay_BHS.cumsum(-1) - 1).masked_fill_(~stay_BHS, keep)  # the others share one place behind them
    row_S = torch.arange(place_BHS.shape[-1], device=place_BHS.device).expand_as(place_BHS)
    return place_BHS.new_empty(*place_BHS.shape[:-1], keep + 1).scatter_(-1, place_BHS, row_S)[..., :keep]


@dataclass(frozen=True)
class Policy:
    """Score, scopes, allocation, selection, merging, reading and answering under one name."""

    name: str
    score: Any
    scopes: tuple[Any, ...]
    selection: Any
    allocation: Any = Uniform()
    source: str = ""
    keeps_everything: bool = False
    merge: Any = None
    """None drops what is evicted."""
    prefill_mask: Any = None
    """None: a token of the prompt sees every slot."""
    reread: Any = None
    """None: the prompt's end is read once and sees every slot."""

    @property
    def needs_heads(self) -> bool:
        """Whether retaining heads are needed."""
        return self.score.needs_heads

    @property
    def needs_adapter(self) -> bool:
        """Whether queries and keys before RoPE are needed, as retaining heads and mergers need them too."""
        return self.score.needs_adapter or self.score.needs_heads or self.merge is not None

    @property
    def needs_logits(self) -> bool:
        """Whether the backbone's probability of each token is needed."""
        return self.score.needs_logits

    @property
    def statistics(self) -> frozenset[str]:
        """Running statistics that the parts read."""
        return self.score.statistics.union(*(scope.statistics for scope in self.scopes))

    @property
    def ragged(self) -> bool:
        """Whether heads of one layer may hold different numbers of slots."""
        return self.allocation.ragged

    def recent(self, chunk: int) -> int:
        """How many of the newest queries must be kept at hand."""
        return max(self.score.recent(chunk), self.reread.window if self.reread is not None else 0)

    def layer_budgets(
        self, budget: int, layers: int, chunk: int, stabilizers: int, tail: int = 0, longest: int | None = None
    ) -> list[int]:
        """Slots a head of each layer. ``tail``: tokens that are never evicted and must find room in every layer."""
        window = max((scope.window(budget, chunk, stabilizers) for scope in self.scopes), default=0)
        return self.allocation.layer_budgets(budget, layers, min(max(window, tail + 1), budget), longest)

    def protected(self, slots: Slots) -> Tensor:
        """Boolean ``[B, H, S]``: the slots that one of the scopes protects."""
        protected_BHS = torch.zeros_like(slots.valid)
        for scope in self.scopes:
            protected_BHS |= scope.protects(slots)
        return protected_BHS

    def choose(self, slots: Slots, scores_BHS: Tensor | None = None) -> Tensor:
        """Boolean ``[B, H, S]``: the slots that stay, by their scores (computed where they are not given)."""
        if scores_BHS is None:
            scores_BHS = self.score.score_slots(slots)
        protected_BHS = self.protected(slots)
        comparable_BHS = self.score.comparable(scores_BHS, slots) if self.ragged else scores_BHS
        budgets_BH = self.allocation.head_budgets(comparable_BHS, protected_BHS, slots.valid, slots.keep)
        return self.selection.select(scores_BHS, protected_BHS, slots.valid, budgets_BH, slots)
