"""One token of each of several texts whose rows lie in one pool: written at once, and attended to in one call. Evictions stay
those of each text. The same step as ``step.read_tokens`` of each, but for rounding."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .context import Context
from .decoding import RowRotation, VarlenRows, decode_rows
from .step import evict_if_due, make_room
from .storage.row_pool import RowPool
from .storage.rows import BoundedLayer
from .view import entry_scores


@dataclass(frozen=True)
class Places:
    """Where the next token of each text goes, and what it sees."""

    at_NH: Tensor
    """Number of its row in each head."""
    starts_NH: Tensor
    lengths_NH: Tensor
    """Rows that it sees, its own included."""
    seen_N: Tensor
    """Tokens of each text before it (int32)."""
    longest: int


class Step:
    """Numbers of one forward that layers share: one copy to the device for all that have the same counts."""

    def __init__(self) -> None:
        self._made: dict[Hashable, Places] = {}

    def places(self, pool: RowPool, pages: Sequence[int], rows: Sequence[BoundedLayer]) -> Places:
        """Places of the next token of texts in such pages."""
        # Layers of equal counts share their places: that is all layers but those with a window.
        numbers = tuple(
            (pool.first(page), one.capacity, one.rows, one.seen) for page, one in zip(pages, rows, strict=True)
        )
        if numbers not in self._made:
            first_N, room_N, rows_N, seen_N = torch.tensor(numbers, device=pool.device).T
            # A page holds head after head, each with room for `capacity` rows of this layer.
            head_H = torch.arange(pool.shape.heads, device=pool.device)
            starts_NH = first_N[:, None] + head_H * room_N[:, None]
            lengths_NH = (rows_N + 1)[:, None].expand_as(starts_NH).contiguous()
            longest = 1 + max(rows for _, _, rows, _ in numbers)
            at_NH = starts_NH + rows_N[:, None]
            self._made[numbers] = Places(at_NH, starts_NH, lengths_NH, seen_N.int(), longest)
        return self._made[numbers]


def kind(ctx: Context) -> Hashable | None:
    """Texts of the same kind, which share their rotations, are decoded together. None for one that is read alone: it has stages
    or a prefill mask of its own, its heads differ, or its rows are placed by more than their rank."""
    if ctx.stages or ctx.policy.prefill_mask is not None or ctx.policy.ragged or ctx.positions.span not in (None, 0):
        return None
    # Rotations by identity: tables are shared by the object, see RotationTables.
    return ctx.positions.span, ctx.statistics, ctx.group, ctx.backend.name, id(ctx.ropes)


def decode_together(
    contexts: Sequence[Context],
    layer: int,
    rows: Sequence[BoundedLayer],
    pool: RowPool,
    pages: Sequence[int],
    step: Step,
    q_NQ1D: Tensor,
    k_NH1D: Tensor,
    v_NH1D: Tensor,
    score_NH1: Tensor | None = None,
) -> Tensor:
    """Attention output ``[N, Q, 1, D]`` of one new token of each text, which become rows; texts evict where it is due.

    Args:
        contexts: of one ``kind``. rows, pages: of each text in this layer. score_NH1: entry scores, where they are known.
    """
    ctx, one = contexts[0], rows[0]
    texts = list(zip(contexts, rows, strict=True))
    # Room first: an eviction moves rows, and places are numbers of rows.
    for own, mine in texts:
        make_room(own, layer, mine, 1)
    alone = [slice(n, n + 1) for n in range(len(texts))]
    if score_NH1 is None:
        each = zip(texts, alone, strict=True)
        found = [entry_scores(own, layer, mine, mine.seen, q_NQ1D[n], k_NH1D[n], v_NH1D[n]) for (own, mine), n in each]
        score_NH1 = torch.cat(found)
    # As they came: a score rotates the newest queries for the rows that an eviction leaves.
    for mine, n in zip(rows, alone, strict=True):
        if mine.recent:
            mine.remember(q_NQ1D[n])
    places = step.places(pool, pages, rows)
    if (rope := ctx.write_rope(layer, one)) is not None:
        seen = tuple(mine.seen for mine in rows)
        k_NH1D = ctx.backend.rotate(k_NH1D, *(x[:, None, None] for x in ctx.tables.each(rope, seen, q_NQ1D)))
        q_NQ1D = ctx.backend.rotate(q_NQ1D, *(x[:, None, None] for x in ctx.tables.each(rope.of_queries, seen, q_NQ1D)))
    # One write for all texts. Rows are counted after it: until then the pages say where the new ones go.
    pool.put(places.at_NH, k_NH1D[:, :, 0], v_NH1D[:, :, 0], score_NH1[..., 0], places.seen_N[:, None])
    for mine in rows:
        mine.count(1)
    statistics = ctx.statistics if one.window is None else ()
    stats = pool.stats[: len(statistics) * (1 + ctx.group)]
    flat = VarlenRows(
        (pool.keys, pool.values), pool.positions, stats, places.starts_NH, places.lengths_NH, places.longest
    ).newest(one.window)
    turn = None
    # By rank alone, see `kind`: the lengths of the heads are all that must be known.
    if (rope := ctx.read_rope(layer, one)) is not None:
        tables = (ctx.tables.upto(one, flat.longest, q_NQ1D) for one in (rope, rope.of_queries))
        turn = RowRotation(*next(tables), *next(tables))
    out = decode_rows(q_NQ1D, flat, one.scaling, ctx.backend.name, statistics, turn, ctx.group)
    # Each by its own schedule; what moves lies in its own page.
    for own, mine in texts:
        evict_if_due(own, layer, mine)
    return out
