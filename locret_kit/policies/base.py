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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from typing import Annotated, ClassVar, Protocol

import torch
from annotated_types import Interval, Predicate
from torch import Tensor
from transformers import PreTrainedModel

from locret_kernels.attend import Blocks
from locret_kernels.backend import function
from locret_kernels.rows import rank_of as rank_of

from ..backbones.spec import BackboneSpec
from ..validation import Description, validate_fields
from .slots import Entry as Entry
from .slots import Slots as Slots
from .slots import wide as wide

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
        """Whether it reads ``Slots.query_head_votes``. They need statistics of every query head."""
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
class Merged:
    """Kept slots of one head that evicted slots were folded into; other kept slots are unchanged."""

    slots_R: Tensor
    """Row numbers (int64, ascending)."""
    keys_RD: Tensor
    values_RD: Tensor
    log_weight_R: Tensor | None = None
    """Logarithm of the weight that each slot gains, if the merger tracks weights."""


class Merge(Part, Protocol):
    """Folds evicted slots into slots of the same head that stay. Keys are those before RoPE."""

    tracks_weight: ClassVar[bool]
    """Whether a slot stores the weight of the slots folded into it."""

    def bind(self, spec: BackboneSpec, devices: Sequence[torch.device]) -> None:
        """Prepare for a backbone whose layers lie on ``devices``; by default any will do. Raises ValueError where not."""
        return

    def slot_weights(
        self, score: Score, slots: Slots, scores_BHS: Tensor, protected_BHS: Tensor, stay_BHS: Tensor
    ) -> Tensor:
        """Facts ``[B, H, S]`` about a layer's slots, computed once per eviction and passed to ``merge``.
        ``protected_BHS``: slots that are pinned or in a scope. ``stay_BHS``: the slots to keep."""

    def merge(self, layer: int, keys_SD: Tensor, values_SD: Tensor, weights_S: Tensor, stay_S: Tensor) -> Merged:
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
    size: int
    """Tokens per block."""
    take: int
    """Number of blocks to bring back per head."""
    representatives: int
    """Number of keys that represent a block, per view."""
    apart: int
    """Largest number of tokens, read together, that look up blocks each alone."""
    reading: bool
    """Whether blocks come back during the whole prefill, or only from the prompt's tail on."""
    local: int | float
    """Newest slots, or a share of the budget, that tokens from the tail on see besides the first tokens and the
    recalled blocks. 0 for all."""
    far: int
    """RoPE distance of all slots that are further away than it; 0 uses the run's positions."""
    across: str
    """Scope of the choice of blocks: per 'head', per 'layer', or for the 'model' by the maximum over the layers
    so far."""

    def at(self, budget: int) -> "Recall":
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


class Weight(Score):
    """Base of scores that are weights themselves, at least 0: attention received, or information in nats."""

    by_query_head: ClassVar[bool] = True

    def log_weight(self, scores_BHS: Tensor) -> Tensor:
        return scores_BHS.clamp(min=torch.finfo(scores_BHS.dtype).tiny).log()
