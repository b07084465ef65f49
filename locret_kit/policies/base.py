"""The parts of an eviction policy.

A policy answers four questions, each with one part. ``Score``: how much is a slot worth? ``Scope``: which slots may
not be evicted now? ``Allocation``: how many slots does each layer and head get? ``Selection``: which slots stay?
Five more parts are optional. ``Merge`` folds evicted slots into kept ones. ``Recall`` stores evicted slots and
brings them back for a question. ``PrefillMask`` limits the slots that a prompt token sees. ``Sparse`` skips rows
that would get little attention. ``Reread`` reads passages of the text again before the answer. Parts know nothing of
models or caches.

A part is a frozen dataclass. Its fields are its parameters: their names, types, bounds and defaults are defined only
there. Shapes: ``B`` texts, ``H`` key/value heads, ``Q`` query heads, ``S`` slots of a head, ``T`` new tokens, ``D``
channels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from typing import Annotated, ClassVar, Protocol

import torch
from annotated_types import Interval, Predicate
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from locret_kernels.attend import window_attention
from locret_kernels.backend import function
from locret_kernels.select import rank_of as rank_of
from locret_kernels.sparse_attend import Blocks

from ..backbones.decoder_attention import Linear, Rope, Softmax
from ..backbones.spec import BackboneSpec
from ..validation import Description, validate_fields

# ---- inputs of the parts of a policy --------------------------------------------------------------------------------

# New tokens as they enter the cache, and the slots of a layer that must be cut.
#
# Shapes: ``B`` texts, ``H`` key/value heads, ``Q`` query heads, ``G`` query heads of a group, ``S`` slots of a head, ``T`` new
# tokens, ``D`` channels.


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
    group), ``above`` (how often it was above average), ``count`` (queries that have seen the slot)."""
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
    verdicts: Callable[[Tensor, Tensor], Tensor] | None = None
    """Function of ``valid`` ``[B, H, S]`` and ``budgets`` ``[B, H]``: bits ``[B, H, G, S]``, whether score and scopes alone would
    keep the slot in each query head. ``Policy.choose`` sets it."""
    backend: str = "reference"
    """Backend of ``locret_kernels``."""

    def attention(self, q_BQWD: Tensor, k_BHSD: Tensor, heads: slice = slice(None)) -> Tensor:
        """Attention ``[B, H, S]`` (float32) that queries give keys, as ``locret_kernels.attend.window_attention``;
        ``heads`` are the query heads whose queries they are."""
        if self.softmax.is_plain:
            given: Tensor = function("window_attention", self.backend)(q_BQWD, k_BHSD, self.softmax.scaling)
            return given
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


# ---- base of the parts of a policy, and the types of their parameters -----------------------------------------------


Count = Annotated[int, Interval(ge=0, lt=2**31)]
"""Tokens or slots; positions are int32."""
Positive = Annotated[int, Interval(ge=1, lt=2**31)]
Odd = Annotated[int, Interval(ge=1, lt=2**31), Predicate(lambda n: n % 2 == 1), Description("odd and at least 1")]
"""Slots of a pooled neighbourhood, which has a middle."""
Ratio = Annotated[float, Interval(ge=0, le=1)]
Size = Annotated[
    Count | Ratio, Description("a number of tokens (an integer, at least 0), or a fraction (with a point, from 0 to 1)")
]
PositiveSize = Annotated[
    Positive | Annotated[float, Interval(gt=0, le=1)],
    Description("a number of tokens (an integer, at least 1), or a fraction (with a point, above 0, at most 1)"),
]


class Part(Protocol):
    """Base of all parts: the values of the fields are checked against their annotated types and bounds.

    Raises:
        ValueError: a wrong type, NaN or infinity, or a value out of bounds; names the field, its value and the bound.
    """

    def __post_init__(self) -> None:
        assert is_dataclass(self)
        validate_fields(self)


# ---- the parts of an eviction policy ----


class PolicyWarning(UserWarning):
    """Warns that a policy's parameters cannot be met at this budget."""


def wanted_count(size: int | float, total: int) -> int:
    """Number of tokens for a size: an integer, or a fraction of ``total`` (a float), rounded down."""
    return int(size * total) if isinstance(size, float) else size


def resolve_count(size: int | float, total: int) -> int:
    """Number of tokens for a size (see ``wanted_count``), at most ``total``."""
    return min(wanted_count(size, total), total)


class Score(Part, Protocol):
    """Worth of a slot. Derive from it and write one method: ``score_new_tokens`` for a score fixed when a token
    enters, ``score_slots`` for one computed at every eviction."""

    needs_heads: ClassVar[bool] = False
    """Reads retaining heads."""
    needs_unrotated: ClassVar[bool] = False
    """Reads queries or keys before RoPE."""
    needs_logits: ClassVar[bool] = False
    """Reads the backbone's probability of each token."""
    per_token: ClassVar[bool] = False
    """Whether a new token's score depends only on its q, k, v, its position (``Entry.positions``) and the retaining
    head. Tokens of several texts are then scored in one call."""
    by_query_head: ClassVar[bool] = False
    """May be asked again with the statistics and queries of a single query head per group."""
    statistics: ClassVar[frozenset[str]] = frozenset()
    """Running statistics to keep for ``Slots.stats``: of ``sum``, ``square``, ``above``, ``count``."""

    def recent(self, chunk: int) -> int:
        """Number of the newest queries to keep for ``Slots.queries``. ``chunk``: tokens between evictions."""
        return 0

    def memory(self, seen: int) -> Mapping[str, str]:
        """Axes of the numeric tensors in ``Entry.state`` after ``seen`` tokens, one letter each: batch B, query
        heads Q, key/value heads H, channels D. Other letters are sizes that tensors share. ``?`` at the end marks a
        tensor that may be missing. A saved cache holds exactly these."""
        return {}

    def score_new_tokens(self, entry: Entry) -> Tensor | None:
        """Scores ``[B, H, T]`` (float32), fixed when tokens enter and stored in ``Slots.entry_scores``; None if
        there are none."""
        return None

    @property
    def scores_new_tokens(self) -> bool:
        """Whether the class overrides ``score_new_tokens``."""
        return type(self).score_new_tokens is not Score.score_new_tokens

    @property
    def is_head(self) -> bool:
        """Whether a token's score is exactly its retaining head's output."""
        return False

    def score_by_logits(
        self, model: PreTrainedModel, hidden_BTE: Tensor, ids_BT: Tensor, before_B1E: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Scores ``[B, T]`` of new tokens from the backbone's final hidden states, and the last of these for the
        next call. ``before_B1E`` is that of the previous call. Only for scores that need logits."""
        raise TypeError(f"{type(self).__name__} needs logits, so it must define score_by_logits")

    def score_slots(self, slots: Slots) -> Tensor:
        """Scores ``[B, H, S]`` (float32) at an eviction; the highest are kept. Values at padding are ignored."""
        return slots.entry_scores

    def comparable(self, scores_BHS: Tensor, slots: Slots) -> Tensor:
        """Scores ``[B, H, S]`` converted to a unit that is comparable across heads, for allocations over heads."""
        return scores_BHS

    def log_weight(self, scores_BHS: Tensor) -> Tensor:
        """Logarithm ``[B, H, S]`` (finite) of a token's weight in the mean of merged slots. By default all tokens
        weigh the same, because a position, a norm or a similarity is no weight."""
        return torch.zeros_like(scores_BHS)


class Scope(Part, Protocol):
    """Slots that may not be evicted now. Derive from it, and write ``protects`` or ``protects_newest``."""

    statistics: ClassVar[frozenset[str]] = frozenset()
    """Running statistics to keep, see ``Score``."""

    def window(self, budget: int, chunk: int, stabilizers: int) -> int:
        """Number of newest slots that the scope always protects, even above the budget. A pyramid reserves them in
        every layer.

        Args:
            budget: slots per head. chunk: tokens between evictions. stabilizers: newest slots that the run protects.
        """
        return 0

    def reserved(self, budget: int, chunk: int, stabilizers: int) -> int:
        """Number of slots that the scope needs, even above the budget.

        Args:
            budget: slots per head. chunk: tokens between evictions. stabilizers: newest slots that the run protects.
        """
        return self.window(budget, chunk, stabilizers)

    @property
    def idle(self) -> bool:
        """Whether it protects nothing, so that it need not be asked."""
        return False

    def protects_newest(self, slots: Slots) -> int | None:
        """Number of the newest slots, where it protects those and no others; None of a scope that writes ``protects``."""
        return None

    def protects(self, slots: Slots) -> Tensor:
        """Boolean ``[B, H, S]``; True stays while there is room."""
        return slots.newest(self.protects_newest(slots) or 0)


class Allocation(Part, Protocol):
    """Number of slots per layer and head; by default the budget for all. Derive from it."""

    layout: ClassVar[str] = "equal"
    """Name of the row layout in ``cache.storage.layouts.LAYOUTS``. All but ``equal`` allow different numbers of
    slots in the heads of a layer."""

    def layer_budgets(self, budget: int, layers: int, window: int, longest: int | None = None) -> list[int]:
        """Slots per head of each layer; the sum is ``layers * budget``.

        Args:
            window: newest slots that every layer needs. longest: tokens of the prompt, where known.
        """
        return [budget] * layers

    def head_budgets(self, scores_BHS: Tensor, protected_BHS: Tensor, valid_BHS: Tensor, keep: int) -> Tensor:
        """Slots ``[B, H]`` (int64) per head, if they may differ. They sum to ``H * keep``, and no head gets more
        than it holds. The scores come from ``measured``."""
        raise TypeError(f"{type(self).__name__} is ragged, so it must define head_budgets")

    def measured(self, score: Score, scores_BHS: Tensor, slots: Slots) -> Tensor:
        """Scores ``[B, H, S]`` for ``head_budgets`` to compare; by default comparable across heads."""
        return score.comparable(scores_BHS, slots)


@dataclass(frozen=True)
class Uniform(Allocation):
    """The budget for every layer and head."""


class Selection(Part, Protocol):
    """The slots to keep, given scores, scope and the number per head. Derive from it."""

    @property
    def by_query_head(self) -> bool:
        """Whether it reads ``Slots.verdicts``. They need statistics of every query head."""
        return False

    def reserved_slots(self, budget: int) -> int:
        """Number of the ``budget`` slots that another rule than the best score fills. Score and scopes share the
        rest, and a scope's fraction refers to it."""
        return 0

    def shortfall(self, budget: int) -> str:
        """Reason why the parameters cannot be met in ``budget`` slots; empty if they can."""
        return ""

    def select(
        self, scores_BHS: Tensor, protected_BHS: Tensor, valid_BHS: Tensor, budgets_BH: Tensor, slots: Slots
    ) -> Tensor:
        """Boolean ``[B, H, S]`` with exactly ``budgets_BH`` True per head, none at padding. By default protected
        slots come first, then the best scores. Ties go to the newer slot, so runs repeat exactly."""
        return function("select_rows", slots.backend)(scores_BHS, protected_BHS, valid_BHS, budgets_BH)


@dataclass(frozen=True)
class TopK(Selection):
    """Protected slots first, then the best scores."""


@dataclass(frozen=True)
class Folded:
    """Kept slots of one head that evicted slots were folded into; other kept slots are unchanged."""

    slots_R: Tensor
    """Row numbers (int64, ascending)."""
    keys_RD: Tensor
    values_RD: Tensor
    log_weight_R: Tensor | None = None
    """Logarithm of the weight that each slot gains, if the merger remembers weights."""


class Merge(Part, Protocol):
    """Folds evicted slots into slots of the same head that stay. Keys are those before RoPE."""

    remembers: ClassVar[bool]
    """Whether a slot stores the weight of the slots folded into it."""

    def bind(self, spec: BackboneSpec, devices: Sequence[torch.device]) -> None:
        """Prepare for a backbone whose layers lie on ``devices``; by default any will do. Raises ValueError where not."""
        return

    def facts(self, score: Score, slots: Slots, scores_BHS: Tensor, protected_BHS: Tensor, stay_BHS: Tensor) -> Tensor:
        """Facts ``[B, H, S]`` about a layer's slots, computed once per eviction and passed to ``fold``.
        ``protected_BHS``: slots that are pinned or in a scope. ``stay_BHS``: the slots to keep."""

    def fold(self, layer: int, keys_SD: Tensor, values_SD: Tensor, facts_S: Tensor, stay_S: Tensor) -> Folded:
        """The result of folding a head's evicted slots into kept ones. ``stay_S``: bool, False for evicted slots."""


class PrefillMask(Part, Protocol):
    """Slots that a prompt token attends to during prefill."""

    def visible(self, rows: int, fresh: int) -> tuple[slice, slice] | None:
        """The row ranges that a token sees, out of a head's ``rows``; ``fresh`` of them entered since the last
        eviction. None for all."""


class Sparse(Part, Protocol):
    """Rows that blocks of prompt tokens attend to; other rows would get little attention. Derive from it and write
    ``choose``. Decoded tokens attend to all rows."""

    def bind(self, spec: BackboneSpec) -> None:
        """Prepare for a backbone. Raises ValueError if it does not fit."""
        return

    def choose(self, layer: int, heads: slice, q_BQTD: Tensor, k_BHSD: Tensor, scaling: float) -> Blocks:
        """Blocks that the query ``heads`` of a layer attend to for the newest ``T`` of ``S`` rows, including their
        own. Queries and keys are rotated."""


class Reread(Part, Protocol):
    """Passages of the text to read again before the answer."""

    @property
    def window(self) -> int:
        """Number of the newest queries to keep for ``collect``."""

    def size(self, budget: int, tail: int) -> int:
        """Number of tokens to read again before the ``tail``, at least one. ``budget``: slots of the smallest layer."""

    def collect(self, score_P: Tensor, slots: Slots, tail: int, size: int) -> None:
        """Raise the scores of a text's tokens ``[P]``, in place, to those given by the heads of a layer. ``size``:
        number of tokens to read again."""

    def choose(self, score_P: Tensor, size: int) -> Tensor:
        """Positions of the ``size`` tokens to read again (int64, ascending)."""


@dataclass(frozen=True)
class BlockIndex:
    """Index, on the device, of a layer's stored blocks, ``N`` a head."""

    index_BHNRD: Tensor
    """Keys of the representatives, view after view, in the form of the queries."""
    there_BHNR: Tensor
    """Bool: False if a block has fewer representatives."""
    kept_BHSD: Tensor
    """Keys of the older kept slots, in the form of the queries."""
    block_BHS: Tensor
    """Block (int64) that each kept slot belongs to; -1 if it counts for none."""
    scaling: float


class Recall(Part, Protocol):
    """Stores evicted slots in host memory, in blocks of the text, and brings the best blocks back for the next
    tokens."""

    statistics: ClassVar[frozenset[str]] = frozenset()
    """Running statistics that ``views`` reads; see ``Score.statistics``."""
    by_query_head: ClassVar[bool] = False
    """Whether ``views`` reads statistics per query head (``Slots.group``)."""

    @property
    def size(self) -> int:
        """Tokens per block."""

    @property
    def take(self) -> int:
        """Number of blocks to bring back per head."""

    @property
    def representatives(self) -> int:
        """Number of keys that represent a block, per view."""

    @property
    def apart(self) -> int:
        """Largest number of tokens, read together, that look up blocks each alone."""

    @property
    def reading(self) -> bool:
        """Whether blocks come back during the whole prefill, or only from the prompt's tail on."""

    @property
    def local(self) -> int | float:
        """Newest slots, or a share of the budget, that tokens from the tail on see besides the first tokens and the
        recalled blocks. 0 for all."""

    @property
    def far(self) -> int:
        """RoPE distance of all slots that are further away than it; 0 uses the run's positions."""

    @property
    def across(self) -> str:
        """Scope of the choice of blocks: per 'head', per 'layer', or for the 'model' by the maximum over the layers
        so far."""

    def at(self, budget: int) -> Recall:
        """The part with sizes for a budget of n slots per head."""
        return self

    def shortfall(self, budget: int) -> str:
        """Reason why the parameters cannot be met in ``budget`` slots; empty if they can."""
        return ""

    def count(self, group: int) -> int:
        """Number of ``views`` for ``group`` query heads per key/value head."""
        return group if self.by_query_head else 1

    def views(self, slots: Slots, scores_BHS: Tensor) -> Sequence[Tensor]:
        """Worth ``[B, H, S]`` of slots as representatives of their blocks, one tensor per view. ``scores_BHS``: the
        policy's scores."""
        return (scores_BHS,)

    def relevance(self, q_BQTD: Tensor, index: BlockIndex) -> Tensor:
        """Worth ``[B, H, N]`` of the stored blocks to all queries together. ``H`` is the number of key/value heads,
        or 1 for all of them. At least 0 if several layers are compared."""


def best_of(
    scores_BHS: Tensor, protected_BHS: Tensor, valid_BHS: Tensor, most_BH: Tensor, backend: str = "reference"
) -> Tensor:
    """Boolean ``[B, H, S]``: the ``most`` slots of each head that ``rank_of`` places first."""
    return function("select_rows", backend)(scores_BHS, protected_BHS, valid_BHS, most_BH)


def share_of(budgets_BH: Tensor, ratio: float) -> Tensor:
    """``ratio`` of each budget (int64), rounded down."""
    return (budgets_BH.double() * ratio).long()


# ---- attention of the newest queries, and the base of scores that are weights ---------------------------------------

# ``a`` is the attention of one query to one slot, the mean over the query heads that share the slot's key (RoCo, appendix A).


def recent_attention(slots: Slots, newest: int, but: int = 0) -> Tensor:
    """``sum of a`` ``[B, H, S]`` over the ``newest`` queries except the last ``but``, each over the slots up to its
    own; zero at padding."""
    return of_recent_queries(slots, newest, slots.attention, slots.keys(), but=but)


def of_recent_queries(
    slots: Slots, newest: int, measure: Callable[..., Tensor], *rows_BHSD: Tensor, but: int = 0
) -> Tensor:
    """``measure`` ``[B, H, S]`` of the ``newest`` queries except the last ``but``; zero at padding and at slots
    newer than those queries.

    Args:
        measure: function of queries ``[B, Q, W, D]``, the rows up to the last query's slot, and the slice of query
            heads.
        rows_BHSD: keys, and values if the measure needs them.
    """
    q_BQWD = slots.queries()
    end = q_BQWD.shape[2] - but

    def measured(q: Tensor, rows: Sequence[Tensor], heads: slice = slice(None)) -> Tensor:
        """``measure`` ``[B, H, S]`` of queries ``[B, Q, W, D]`` and rows ``[B, H, S, D]`` of equal length."""
        S = rows[0].shape[2]
        W = min(newest - but, end, S - but)
        if W < 1:
            return torch.zeros(rows[0].shape[:3], dtype=torch.float32, device=q.device)
        return F.pad(measure(q[:, :, end - W : end], *(x[:, :, : S - but] for x in rows), heads), (0, but))

    if slots.lengths is None:
        return measured(q_BQWD, rows_BHSD)
    _, H, S = slots.positions.shape
    out_BHS = torch.zeros(1, H, S, dtype=torch.float32, device=q_BQWD.device)
    G = q_BQWD.shape[1] // H
    for h, n in enumerate(slots.lengths):
        group = slice(h * G, (h + 1) * G)
        out_BHS[0, h, S - n :] = measured(q_BQWD[:, group], [x[:, h : h + 1, S - n :] for x in rows_BHSD], group)[0, 0]
    return out_BHS


def attention_of_each(q_BQWD: Tensor, k_BHSD: Tensor, softmax: Softmax) -> Tensor:
    """Attention ``[B, H, G, W, S]`` (float32 or wider) of each of the ``W`` newest queries. The last query sees all
    slots, each earlier one a slot less."""
    q_BQWD, k_BHSD = wide(q_BQWD), wide(k_BHSD)
    (B, H, S, _), W = k_BHSD.shape, q_BQWD.shape[2]
    logit_BHGWS = q_BQWD.view(B, H, -1, W, q_BQWD.shape[-1]) @ k_BHSD[:, :, None].mT * softmax.scaling
    if softmax.cap is not None:
        logit_BHGWS = (logit_BHGWS / softmax.cap).tanh() * softmax.cap
    later_WS = torch.ones(W, S, dtype=torch.bool, device=k_BHSD.device).triu_(S - W + 1)
    logit_BHGWS = logit_BHGWS.masked_fill(later_WS, float("-inf"))
    if softmax.sinks_Q is not None:
        sink_HG11 = softmax.sinks_Q.to(logit_BHGWS).view(H, -1, 1, 1)
        logit_BHGWS = torch.cat((logit_BHGWS, sink_HG11.expand(B, -1, -1, W, 1)), -1)
    return logit_BHGWS.softmax(-1)[..., :S]


class Weight(Score):
    """Base of scores that are weights themselves, at least 0: attention received, or information in nats."""

    by_query_head: ClassVar[bool] = True

    def log_weight(self, scores_BHS: Tensor) -> Tensor:
        return scores_BHS.clamp(min=torch.finfo(scores_BHS.dtype).tiny).log()
