"""One step of a layer: new tokens become rows and attend to the rows that they see; the policy evicts where the
schedule asks for it.

Steps of any shape and those of fixed shapes (``runtime.drivers.graph``) are the same. In the
second the text's length is a number on the device (``StaticStep``). For a single token, so are its row and the lengths
of heads. Nothing is read back.
"""

import time
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from locret_kernels.attend import ChunkRotation
from locret_kernels.ragged_decode import Angles, Rotation
from locret_kernels.rows import Score

from ..backbones.handlers import Softmax
from ..backbones.rope import Rope
from .attend import VarlenRows, attend_heads, decode_rows
from .context import Context
from .due import Due
from .storage.codec import Plain
from .storage.layouts import Layout, RaggedRows
from .storage.quantised import RowBits
from .storage.rows import BoundedLayer, EqualLengthHeads
from .view import entry_scores, prefill_mask, select_tokens, slots_of

# ---- attention of new tokens, which are rows already, over the rows of their layer ----------------------------------

# A chunk in a call for each length of heads, one token in a call for all.


@dataclass(frozen=True)
class StaticStep:
    """Places of the tokens of a step with fixed shapes, as numbers on the device."""

    seen: Tensor
    """Tokens before them (integer without axes)."""
    position_T: Tensor
    """Position of each, in the type of stored positions (int32)."""
    row_1: Tensor | None = None
    """Row ``[1]`` that a single token becomes in every head; the host knows those of a chunk."""
    varlen: VarlenRows | None = None
    """Rows that a single token sees, its own included."""


def attend_varlen(ctx: Context, rows: BoundedLayer, varlen: VarlenRows, q: Tensor, seen: int | Tensor) -> Tensor:
    """Attention ``[B, Q, 1, D]`` of the newest token of texts, which have ``seen`` tokens, over all heads in one call.

    Args:
        rows: those of any of the texts.
    """
    rotation: Rotation | Angles | None = None
    if (rope := ctx.read_rope(rows)) is not None:
        q, rotation = _rotate_query(ctx, rope, varlen, q, seen)
    statistics = ctx.statistics if rows.window is None else ()
    return decode_rows(q, varlen, rows.scaling, ctx.backend.kernels, statistics, rotation, ctx.group)


def _rotate_query(
    ctx: Context, rope: Rope, varlen: VarlenRows, q: Tensor, seen: int | Tensor
) -> tuple[Tensor, Rotation | Angles]:
    """A token's query, and the rotation of the keys that it sees: by their rank, or among the newest ``span`` tokens by their
    distance where that places them higher (see ``rotation``)."""
    span, both = ctx.positions.span or 0, (rope, rope.of_queries)
    if not span and ctx.backend.launches:  # it rotates the query too
        return q, Angles(*(one.steps(varlen.spans.longest, q.device) for one in both))
    of_keys, of_queries = (ctx.tables.upto(one, max(span, varlen.spans.longest), q) for one in both)
    # The query stands where its own row does, which is the newest of its head.
    newest_BH, place_N = varlen.spans.lengths_BH - 1, None
    if span:
        now = seen if isinstance(seen, Tensor) else torch.tensor(seen, device=q.device)
        before = (now - span).clamp(min=0)
        newest_BH, place_N = torch.maximum(newest_BH, now - 1 - before), varlen.positions_N - before
    # P = B * H: a group turns alike
    tables = (table_SR[newest_BH.flatten()][:, None, None] for table_SR in of_queries)
    group_PG1D = q.reshape(newest_BH.numel(), -1, 1, q.shape[-1])
    return ctx.backend.rotate(group_PG1D, *tables).view(q.shape), Rotation(*of_keys, place_N)


def attend_again(ctx: Context, rows: BoundedLayer, q: Tensor) -> Tensor:
    """Attention ``[B, Q, T, D]`` of the newest tokens in a later layer, over rows that hold them already. Rows gain no statistics
    of it: some backbones ask it for a piece's last token alone."""
    if (rope := ctx.write_rope(rows)) is not None:
        T = q.shape[2]
        q = ctx.backend.rotate(q, *ctx.tables.between(rope.of_queries, rows.seen - T, T, q))
    return attend_newest(replace(ctx, statistics=()), rows, q)


def attend_newest(ctx: Context, rows: BoundedLayer, q: Tensor, fixed: StaticStep | None = None) -> Tensor:
    """Attention ``[B, Q, T, D]`` of the newest tokens, which are rows already. One token takes a call for all heads; a block
    takes one per part, heads of equal length, or one for heads of different lengths where PyTorch has it."""
    if fixed is not None and fixed.varlen is not None:
        return attend_varlen(ctx, rows, fixed.varlen, q, fixed.seen + 1 if ctx.positions.span else rows.seen)
    masked = prefill_mask(ctx, rows) is not None
    if q.shape[2] == 1 and rows.uses_varlen and not masked:
        return attend_varlen(ctx, rows, rows.varlen().newest(rows.window), q, rows.seen)
    narrows = any(stage.narrows(rows, q.shape[2]) for stage in ctx.stages)
    plain = not rows.statistics and not narrows and not masked and rows.softmax.is_plain
    plain = plain and rows.codec.value_size == rows.codec.key_size
    sizes = rows.layout.device, rows.dtype, rows.codec.key_size
    if plain and isinstance(rows.layout, RaggedRows) and ctx.backend.attends_ragged(*sizes):
        return _attend_ragged(ctx, rows, rows.layout, q)
    out, G, seen = [], q.shape[1] // rows.layout.H, rows.seen if fixed is None else fixed.seen + q.shape[2]
    for part in rows.parts():
        queries = slice(part.heads.start * G, part.heads.stop * G)  # [b, h * G, T, D]
        out.append(_attend_part(ctx, rows, part, q[:, queries], rows.softmax.of(queries), seen))
    return out[0] if len(out) == 1 else torch.cat(out, dim=1)


def _attend_ragged(ctx: Context, rows: BoundedLayer, layout: RaggedRows, q: Tensor) -> Tensor:
    """Attention ``[1, Q, T, D]`` of a block's queries ``[1, Q, T, D]`` over all heads of a layer at once."""
    keys, values = (rows.codec.read(name, (slice(0, len(rows.positions)),)) for name in ("keys", "values"))
    starts_H, lengths_H, rope = layout.starts, layout.lengths, ctx.read_rope(rows)
    if rope is not None:
        (_, Q, T, _), N, H = q.shape, len(keys), layout.H
        # Rank of each row in its head; that of its last row where it is free, so that tables reach there.
        row_N = torch.arange(N, device=q.device)
        head_N = torch.searchsorted(starts_H, row_N, right=True) - 1
        place_N = torch.minimum(row_N - starts_H[head_N], lengths_H[head_N] - 1)
        place_HT = lengths_H[:, None] - T + torch.arange(T, device=q.device)
        size = max(layout.longest, ctx.positions.span or 0)
        if not ctx.positions.by_rank:
            place_HT = ctx.positions.place(place_HT, rows.positions[starts_H[:, None] + place_HT], rows.seen)
            place_N = ctx.positions.place(place_N, rows.positions, rows.seen).clamp(0, size - 1)
        of_keys, of_queries = (ctx.tables.upto(one, size, q) for one in (rope, rope.of_queries))
        keys = ctx.backend.rotate(keys[None, None], *(table[place_N][None, None] for table in of_keys))[0, 0]
        q = ctx.backend.rotate(q, *(table[place_HT].repeat_interleave(Q // H, 0)[None] for table in of_queries))
    return attend_heads(q, keys, values, starts_H, lengths_H, layout.longest, rows.scaling)


def _attend_part(
    ctx: Context, rows: BoundedLayer, part: EqualLengthHeads, q: Tensor, softmax: Softmax, seen: int | Tensor
) -> Tensor:
    """Attention ``[1, Q, T, D]`` of heads of equal length after ``seen`` tokens, the newest included. Their slots
    gain its statistics.

    Rows are read in place, unless the policy's prefill mask hides some of them.
    """
    T, shown, rotation = q.shape[2], None, None
    if (mask := prefill_mask(ctx, rows)) is not None:
        shown = mask.visible(part.keys.shape[2], rows.since_eviction)
    keys, values = _gather(part.keys, shown), _gather(part.values, shown)
    if (rope := ctx.read_rope(rows)) is not None:
        n = keys.shape[2]
        if ctx.positions.by_rank:
            keys_at, queries_at = (ctx.tables.first(one, n, q, rows.layout.ragged) for one in (rope, rope.of_queries))
            newest = queries_at[0][-T:], queries_at[1][-T:]
        else:
            rank_S = torch.arange(n, device=q.device)
            at = ctx.positions.place(rank_S, _gather(part.positions, shown), seen)
            keys_at = ctx.tables.at(rope, at, ctx.positions.span, q)
            # The newest tokens are placed alike in heads of equal length.
            newest = ctx.tables.at(rope.of_queries, at[0, 0, -T:], max(ctx.positions.span or 0, n), q)
        rotation = ChunkRotation(*keys_at, *newest)
    for stage in ctx.stages:
        if stage.narrows(rows, T):
            (q, keys), rotation = ctx.backend.rotated(q, keys, rotation), None
            blocks = stage.blocks(ctx, rows, part.heads, q, keys)
            if blocks is not None:
                return ctx.backend.attend_blocks(q, keys, values, rows.scaling, blocks)
    want = frozenset(ctx.statistics if len(part.stats) else ())
    out, counted = ctx.backend.attend(
        q, keys, values, softmax, window=rows.window, want=want, by_head=ctx.group > 0, rotation=rotation
    )
    if want:  # each row's statistic [b, h, S] sums over the group and the block's queries
        for made, stats in zip(counted, part.stats.unflatten(0, (1 + ctx.group, -1)), strict=True):
            for stat, name in zip(stats, ctx.statistics, strict=True):
                _scatter_add(stat, getattr(made, name), shown)
    return out


def _gather(rows: Tensor, seen: Sequence[slice] | None) -> Tensor:
    """The rows ``[b, h, S, ...]`` that are seen, concatenated."""
    return rows if seen is None else torch.cat([rows[:, :, piece] for piece in seen], dim=2)


def _scatter_add(stat_bhS: Tensor, made: Tensor, seen: Sequence[slice] | None) -> None:
    """Add statistics ``[b, h, n]`` of the seen rows to those of all rows ``[b, h, S]``, in place."""
    start = 0
    for piece in seen or (slice(None),):
        target = stat_bhS[..., piece]
        target += made[..., start : start + target.shape[-1]]
        start += target.shape[-1]


# ---- one step of a layer ----


class Eviction(NamedTuple):
    """A layer that must be cut."""

    rows: BoundedLayer
    keep: int
    """Slots of a head, on average where heads differ."""
    final: bool = False
    """Whether this is the eviction before the tail, which protects no newest slots."""


def in_model_type(ctx: Context, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Tensors of any shape in the model's dtype, which rows have: autocast makes others."""
    if not tensors[0].is_meta and torch.is_autocast_enabled(tensors[0].device.type):
        return tuple(x.to(ctx.model.dtype) for x in tensors)
    return tensors


def read_tokens(
    ctx: Context,
    rows: BoundedLayer,
    q_BQTD: Tensor,
    k_BHTD: Tensor,
    v_BHTD: Tensor,
    score: Score = None,
    waiting: list[Eviction] | None = None,
) -> Tensor:
    """Attention output ``[B, Q, T, D]`` of a forward's new tokens, which become rows; evicts at every boundary. Their entry
    scores are made here where they are not known. An eviction behind the last of them joins those that are ``waiting`` where it
    may be one call with others (``evicts_together``)."""
    out, start, tokens = [], 0, q_BQTD.shape[2]
    while start < tokens:
        due = ctx.due(rows, tokens - start)
        new = slice(start, start + due.tokens)
        make_room(ctx, [rows], due.tokens)
        part = select_tokens(score, new)
        out.append(read_block(ctx, rows, q_BQTD[:, :, new], k_BHTD[:, :, new], v_BHTD[:, :, new], None, part))
        evict_or_wait(ctx, rows, due, waiting if new.stop == tokens else None)
        rows.codec.finish_block()
        start = new.stop
    return out[0] if len(out) == 1 else torch.cat(out, dim=2)


# ---- reading ---------------------------------------------------------------------------------------------------------


def read_block(
    ctx: Context,
    rows: BoundedLayer,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    fixed: StaticStep | None = None,
    score: Score = None,
) -> Tensor:
    """Attend over the rows and one block of new tokens, which become rows: ``[B, Q, T, D]``."""
    seen, T = rows.seen if fixed is None else fixed.seen, q.shape[2]
    if score is None:
        score = entry_scores(ctx, rows, seen, q, k, v)
    if rows.recent:
        rows.append_queries(q)  # as it came: scores rotate the newest queries for the rows that are left
    if (rope := ctx.write_rope(rows)) is not None:
        tables = ctx.tables.between(rope, seen, T, q)
        of_queries = tables if rope.queries is None else ctx.tables.between(rope.queries, seen, T, q)
        q, k = ctx.backend.rotate(q, *of_queries), ctx.backend.rotate(k, *tables)
    if fixed is not None:
        rows.append(k, v, score, fixed.row_1, fixed.position_T)
        return attend_newest(ctx, rows, q, fixed)
    rows.append(k, v, score)
    for stage in ctx.stages:
        if (out := stage.attend(ctx, rows, q)) is not None:
            return out
    return attend_newest(ctx, rows, q)


# ---- evicting --------------------------------------------------------------------------------------------------------


def make_room(ctx: Context, layers: Iterable[BoundedLayer], tokens: int) -> None:
    """Make room before a block is appended: windowed layers drop rows that no query can see, and full layers evict."""
    cuts = []
    for rows in layers:
        due = ctx.due(rows, tokens)
        if due.evict_before is None:
            if rows.rows + due.tokens > rows.capacity:
                rows.grow(rows.rows + due.tokens)
        elif rows.window is not None:
            rows.drop_oldest(due.evict_before)
        else:
            cuts.append(Eviction(rows, due.evict_before))
    evict(ctx, cuts)


def evict_if_due(ctx: Context, layers: Iterable[BoundedLayer]) -> None:
    """Evict at a boundary of the schedule."""
    dues = ((rows, ctx.due(rows, 0)) for rows in layers)
    cuts = [Eviction(rows, due.evict_after, due.final) for rows, due in dues if due.evict_after is not None]
    evict(ctx, cuts)


def evict_or_wait(ctx: Context, rows: BoundedLayer, due: Due, waiting: list[Eviction] | None = None) -> None:
    """Evict where it is due after a block, or let it be ``waiting`` where it may be one call with other layers."""
    if due.evict_after is not None and not ctx.evicts_after_forward:
        cut = Eviction(rows, due.evict_after, due.final)
        if waiting is not None and evicts_together(ctx, rows):
            waiting.append(cut)
        else:
            evict(ctx, [cut])


def evicts_together(ctx: Context, rows: BoundedLayer) -> bool:
    """Whether a layer's eviction may be one call with those of others: on a card, which has room for all their slots at once."""
    plain = type(rows.layout) is Layout and type(rows.codec) in (Plain, RowBits) and not ctx.stages
    return plain and ctx.backend.launches and ctx.policy.ranks


def evict(ctx: Context, cuts: Iterable[Eviction]) -> None:
    """Cut layers, with one choice of slots for all layers that may go together and have heads of one length."""
    alike: dict[Hashable, list[Eviction]] = {}
    for cut in cuts:
        rows = cut.rows
        if rows.rows > cut.keep:
            key = (rows.rows, rows.layout.H, rows.device) if evicts_together(ctx, rows) else rows.number
            alike.setdefault((key, cut.keep, cut.final), []).append(cut)
    for same in alike.values():
        _evict(ctx, same)


def _evict(ctx: Context, cuts: Sequence[Eviction]) -> None:
    """Cut layers that go together."""
    policy, counters, (first, keep, final) = ctx.policy, ctx.counters, cuts[0]
    stabilizers = 0 if final else min(ctx.schedule.stabilizers, keep)
    slots_L = [slots_of(ctx, rows, keep, stabilizers) for rows, *_ in cuts]
    t0 = time.perf_counter()
    scores_L = []
    for slots, (rows, *_) in zip(slots_L, cuts, strict=True):
        scores_L.append(policy.scores(slots))
        rows.layout.put_back(rows.scores, slots.entry_scores)  # a score may have aged them
    t1 = time.perf_counter()
    if policy.ranks and not ctx.stages:
        chosen = policy.index(slots_L, torch.cat(scores_L) if len(cuts) > 1 else scores_L[0])
    else:
        chosen = policy.choose(slots_L[0], scores_L[0])
    t2 = time.perf_counter()
    for slots, scores, (rows, *_) in zip(slots_L, scores_L, cuts, strict=True):
        # Before rows move: positions and slots still belong together.
        counters.count_eviction(rows, scores.shape[:2].numel() * (rows.rows - keep))
        for stage in ctx.stages:
            stage.evicted(ctx, rows, slots, scores, chosen)
    first.keep(chosen, keep, [cut.rows for cut in cuts[1:]])
    counters.score_s += t1 - t0
    counters.select_s += t2 - t1
    counters.compact_s += time.perf_counter() - t2
