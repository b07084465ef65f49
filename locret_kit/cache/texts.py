"""Several texts in one forward. Linear layers see the new tokens of all texts at once; attention and evictions are
those of each text alone.

Texts with one new token each, and rows in one pool, are written and attended to in one call. The same step as
``step.read_tokens`` of each, but for rounding.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from locret_kernels.backend import function
from locret_kernels.ragged_decode import Spans
from locret_kernels.rows import HeadProduct, Score

from ..backbones.handlers import LayerInput, Softmax
from ..backbones.rope import Rope, Tables
from .attend import VarlenRows
from .context import Context
from .pages import RowPool
from .state import TextState
from .step import attend_varlen, evict_or_wait, in_model_type, make_room, read_tokens
from .storage.rows import BoundedLayer
from .view import entry_scores, folded_scores, score_alike, scores_of, select_tokens

Span = tuple[int, int]
"""First and last but one of a text's new tokens, among those of a forward."""


@dataclass(frozen=True, eq=False)
class RowIndex:
    """The row of each text's next token, and the rows that it sees."""

    at_NH: Tensor
    """Number of its row in each head."""
    spans: Spans
    """Rows that it sees in each head, its own included."""
    seen_N1: Tensor
    """Tokens of each text before it (int32)."""


RowNumbers = tuple[int, tuple[tuple[int, int, int, int], ...]]
"""Heads of a layer, and four numbers per text: the first row of its page, the room per head in rows, the rows held,
and the tokens before the next one."""


def row_numbers(rows: Sequence[BoundedLayer]) -> RowNumbers:
    """Numbers of the next token of texts in one pool: layers of equal ones share an index."""
    pages = tuple((own.page.first, own.capacity, own.rows, own.seen) for own in rows if own.page is not None)
    return rows[0].layout.H, pages


class StepTables:
    """Numbers of one forward that layers share: one copy to the device for all that have the same counts.

    Args:
        given_X4N: the ``row_numbers`` of ``N`` texts on the device already, in the order of the layers' calls, for a
            forward with fixed shapes.
    """

    def __init__(self, given_X4N: Tensor | None = None) -> None:
        self.given_X4N = given_X4N
        self._indices: dict[RowNumbers, RowIndex] = {}
        self._rotations: dict[tuple[RowIndex, int], Tables] = {}

    def index(self, pool: RowPool, rows: Sequence[BoundedLayer]) -> RowIndex:
        """Index of the next token of texts in one pool."""
        key, given = row_numbers(rows), self.given_X4N
        if key not in self._indices:
            numbers = torch.tensor(key[1], device=pool.device).T if given is None else given[len(self._indices)]
            first_N, room_N, rows_N, seen_N = numbers
            # A page holds head after head, each with room for `capacity` rows of this layer.
            head_H = torch.arange(pool.shape.heads, device=pool.device)
            starts_NH = first_N[:, None] + head_H * room_N[:, None]
            lengths_NH = (rows_N + 1)[:, None].expand_as(starts_NH).contiguous()
            longest = 1 + max(rows for _, _, rows, _ in key[1]) if given is None else pool.shape.rows
            at_NH = starts_NH + rows_N[:, None]
            self._indices[key] = RowIndex(at_NH, Spans(starts_NH, lengths_NH, longest), seen_N[:, None].int())
        return self._indices[key]

    def rotation_tables(self, index: RowIndex, rope: Rope, like: Tensor) -> Tables:
        """cos and sin ``[N, 1, 1, R]`` of the next tokens' positions in their texts."""
        key = index, id(rope)
        if key not in self._rotations:
            cos, sin = rope.tables(index.seen_N1[:, 0], like.dtype)
            self._rotations[key] = cos[:, None, None], sin[:, None, None]
        return self._rotations[key]


def batch_key(ctx: Context) -> Hashable | None:
    """Texts of equal keys, which share their rotations, are decoded together. None for one whose rows are placed by more than
    their rank: it is read alone."""
    if ctx.positions.span not in (None, 0):
        return None
    # Rotations by identity: tables are shared by the object, see RotationTables.
    recent = 0 if ctx.policy.keeps_everything else ctx.policy.recent(ctx.schedule.chunk)
    return ctx.positions.span, ctx.statistics, ctx.group, ctx.backend.kernels, recent, id(ctx.ropes)


DecodingGroup = tuple[list[int], Tensor | slice]
"""Numbers of texts that have one new token each and are decoded in one call, and the places of the tokens in the forward."""


class TextBatch:
    """The new tokens of a forward, those of each text in one stretch.

    Args:
        texts: texts that have new tokens. spans: places of these tokens, ascending. seen: tokens of each text before them.
        given_X4N: row indexes for ``StepTables``, for one token of each of texts that are decoded together. The caller makes
            room for the tokens, counts them, and evicts.
    """

    def __init__(
        self, texts: Sequence[TextState], spans: Sequence[Span], seen: Sequence[int], given_X4N: Tensor | None = None
    ) -> None:
        self.texts, self.spans, self.seen = texts, spans, seen
        self.contexts = [text.context for text in texts]
        self.end = max((end for _, end in spans), default=0)
        self._scored_alike = (len(texts) > 1 or given_X4N is not None) and score_alike(self.contexts)
        self._step = StepTables(given_X4N)
        self._groups: list[DecodingGroup] | None = None
        self._sequential: list[int] = []
        self._position_N = None if given_X4N is None else given_X4N[0, 3]

    def positions(self, size: int, device: torch.device) -> Tensor:
        """Position in its text of each token of the forward, of shape ``[size]``; 0 where there is no token."""
        if self._position_N is None or len(self._position_N) != size:
            places = [0] * size
            for (start, end), seen in zip(self.spans, self.seen, strict=True):
                places[start:end] = range(seen, seen + end - start)
            self._position_N = torch.tensor(places, device=device)
        return self._position_N.to(device)

    def attend(
        self, layer: int, q_NQD: Tensor, k_NHD: Tensor, v_NHD: Tensor, softmax: tuple[float, float | None, Tensor | None],
        out_NQD: Tensor,        x_NC: LayerInput = None,
    ) -> None:  # fmt: skip
        """Attention of the new tokens in one layer, into ``out``. They become rows, and a due eviction runs.

        Args:
            softmax: fields of a ``Softmax``.
            x_NC: normed input of the layer, where it is at hand, or its head's product with it.
        """
        if not self.texts:
            return
        # What follows the last text is padding.
        q_NQD, k_NHD, v_NHD = in_model_type(self.contexts[0], *(x[: self.end] for x in (q_NQD, k_NHD, v_NHD)))
        q, k, v = (x.transpose(0, 1)[None] for x in (q_NQD, k_NHD, v_NHD))  # [1, heads, N, D]
        rows = [text.open(layer, Softmax(*softmax), k[:, :, :0], v[:, :, :0]) for text in self.texts]
        if layer == 0 and self._step.given_X4N is None:
            for text, (start, end) in zip(self.texts, self.spans, strict=True):
                text.make_room(end - start)
        score, ctx = None, self.contexts[0]
        if x_NC is not None and (self._scored_alike or len(self.texts) == 1):
            x_BTC = x_NC if isinstance(x_NC, HeadProduct) else x_NC[None, : self.end]
            score = folded_scores(ctx, layer, x_BTC, self.end)
        if score is None and self._scored_alike:
            score = entry_scores(ctx, rows[0], 0, q, k, v, self.positions(self.end, q.device)[None])
        for members, at in self._plan(rows, q.device):
            out_NQD[at] = self._decode(members, rows, q_NQD[at], k_NHD[at], v_NHD[at], select_tokens(score, at))
        for i in self._sequential:
            new = slice(*self.spans[i])
            part, waiting = select_tokens(score, new), self.texts[i].waiting
            new_q, new_k, new_v = (x[:, :, new] for x in (q, k, v))
            out = read_tokens(self.contexts[i], rows[i], new_q, new_k, new_v, part, waiting)
            out_NQD[new] = out[0].transpose(0, 1)
        for text in self.texts:
            text.close(layer)

    def finish(self) -> None:
        """Run the evictions that wait for the end of the forward, in every text."""
        for text in self.texts:
            text.evict_waiting()

    def _plan(self, rows: Sequence[BoundedLayer], device: torch.device) -> list[DecodingGroup]:
        """Texts that are decoded together, the same in all layers. The others are read alone."""
        if self._groups is None:
            alike: dict[Hashable, list[int]] = {}
            for i, (ctx, (start, end), own) in enumerate(zip(self.contexts, self.spans, rows, strict=True)):
                plain = all(call.plain for call in ctx.description.calls)
                key = batch_key(ctx) if own.page is not None and plain and end == start + 1 else None
                if key is None or own.page is None:
                    self._sequential.append(i)
                else:
                    alike.setdefault((key, id(own.page.pool)), []).append(i)
            self._groups = []
            for members in alike.values():
                starts = [self.spans[i][0] for i in members]
                first, end = starts[0], starts[0] + len(starts)
                # Tokens side by side, as they mostly are, need no index.
                side_by_side = starts == list(range(first, end))
                at = slice(first, end) if side_by_side else torch.tensor(starts, device=device)
                self._groups.append((members, at))
        return self._groups

    def _decode(
        self, members: list[int], all_rows: Sequence[BoundedLayer], q_NQD: Tensor, k_NHD: Tensor,
        v_NHD: Tensor, score: Score,
    ) -> Tensor:  # fmt: skip
        """Attention output ``[N, Q, D]`` of one new token of each text of a group, which become rows; evicts where it is due."""
        texts = [(self.contexts[i], all_rows[i]) for i in members]
        rows = [own for _, own in texts]
        ctx, first = texts[0]
        pool = first.page and first.page.pool
        assert isinstance(pool, RowPool)
        # Room first: an eviction moves rows, and places are numbers of rows.
        dues = [] if self._step.given_X4N is not None else [own_ctx.due(own, 1) for own_ctx, own in texts]
        for own_ctx, own in texts if dues else ():
            make_room(own_ctx, [own], 1)
        if not self._scored_alike and score is None:
            alone = zip(texts, *(x[:, None, :, None] for x in (q_NQD, k_NHD, v_NHD)), strict=True)  # [1, heads, 1, D]
            made = [entry_scores(own_ctx, own, own.seen, q, k, v) for (own_ctx, own), q, k, v in alone]
            score = torch.cat([scores_of(one, k_NHD[:1, :, None]) for one in made], 2)
        index, q_NQ1D = self._step.index(pool, rows), q_NQD[:, :, None]
        if first.recent:  # as they came: a score rotates the newest queries for the rows that an eviction leaves
            pool.append_queries(index.spans.starts_BH[:, 0], q_NQD, first.recent)
        if (rope := ctx.write_rope(first)) is not None:
            k_NHD = ctx.backend.rotate(k_NHD[:, :, None], *self._step.rotation_tables(index, rope, q_NQD))[:, :, 0]
            q_NQ1D = ctx.backend.rotate(q_NQ1D, *self._step.rotation_tables(index, rope.of_queries, q_NQD))
        # One write for all texts. Rows are counted after it: until then the pages say where the new ones go.
        enter = function("enter_rows", ctx.backend.kernels)
        enter(pool.rows, index.at_NH.T, k_NHD.transpose(0, 1), v_NHD.transpose(0, 1), index.seen_N1[:, 0], score)
        statistics = ctx.statistics if first.window is None else ()
        stats = pool.stats[: len(statistics) * (1 + ctx.group)]
        varlen = VarlenRows((pool.keys, pool.values), pool.positions, stats, index.spans).newest(first.window)
        out = attend_varlen(ctx, first, varlen, q_NQ1D, first.seen)
        # Each by its own schedule; what moves lies in its own page.
        for i, (own_ctx, own), due in zip(members, texts, dues, strict=False):
            own.count(1)
            evict_or_wait(own_ctx, own, due, self.texts[i].waiting)
        return out[:, :, 0]
