"""One step of a layer: new tokens become rows, attend to what they see, and the policy evicts where the schedule says.

Dynamic decoding and decoding with fixed shapes (``runtime.static``) take the same step. In the second the text's length,
the row of the new token and the lengths of heads are numbers on the device (``Fixed``), and nothing is read back.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from locret_kernels.attend import ChunkRotation
from locret_kernels.backend import function

from ..backbones.rope import rotate
from ..policies.base import Entry, Merge, PrefillMask, Slots
from . import recall
from .attention import attend_heads
from .context import Context
from .decoding import RowRotation, VarlenRows, decode_rows
from .sparse import attend_chosen
from .storage.layouts import EqualRows, RaggedRows
from .storage.rows import BoundedLayer, EqualLengthHeads
from .view import slots_of, turned_back


@dataclass(frozen=True)
class Fixed:
    """Where one token stands whose step has fixed shapes: numbers on the device."""

    seen: Tensor
    """Tokens before it (integer without axes)."""
    position: Tensor
    """The same in the type of stored positions (int32)."""
    row_1: Tensor
    """Row ``[1]`` that it becomes in every head."""
    flat: VarlenRows
    """Rows that it sees, its own included."""


def read_tokens(
    ctx: Context,
    layer: int,
    rows: BoundedLayer,
    q_BQTD: Tensor,
    k_BHTD: Tensor,
    v_BHTD: Tensor,
    score_BHT: Tensor | None = None,
) -> Tensor:
    """Attention output ``[B, Q, T, D]`` of a forward's new tokens, which become rows; evicts at every boundary. Their entry
    scores are made here where they are not known."""
    out, start, tokens = [], 0, q_BQTD.shape[2]
    while start < tokens:
        step = min(tokens - start, block_length(ctx, rows))
        new = slice(start, start + step)
        make_room(ctx, layer, rows, step)
        score = None if score_BHT is None else score_BHT[:, :, new]
        out.append(read_block(ctx, layer, rows, q_BQTD[:, :, new], k_BHTD[:, :, new], v_BHTD[:, :, new], None, score))
        if not ctx.policy.needs_logits:  # those evict after the forward
            evict_if_due(ctx, layer, rows)
        rows.codec.finish_block()
        start += step
    return out[0] if len(out) == 1 else torch.cat(out, dim=2)


def block_length(ctx: Context, rows: BoundedLayer) -> int:
    """Tokens that may be read before the next eviction could fall due."""
    room = ctx.schedule.chunk if ctx.policy.keeps_everything else rows.capacity - rows.rows
    later = None if ctx.policy.needs_logits else ctx.schedule.after_prompt(rows.seen, room)
    return ctx.schedule.until_boundary(rows.seen) if later is None else later


# ---- reading ---------------------------------------------------------------------------------------------------------


def read_block(
    ctx: Context,
    layer: int,
    rows: BoundedLayer,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    fixed: Fixed | None = None,
    score_BHT: Tensor | None = None,
) -> Tensor:
    """Attend over the rows and one block of new tokens, which become rows: ``[B, Q, T, D]``."""
    seen = rows.seen if fixed is None else fixed.seen
    if score_BHT is None:
        score_BHT = _entry_scores(ctx, layer, rows, seen, q, k, v)
    rows.remember(q)  # as it came: scores rotate the newest queries for the rows that are left
    if (rope := ctx.write_rope(layer, rows)) is not None:
        cos, sin = ctx.tables.between(rope, seen, q.shape[2], q)
        q, k = ctx.backend.rotate(q, cos, sin), ctx.backend.rotate(k, cos, sin)
    if fixed is not None:
        assert isinstance(rows.layout, EqualRows)
        rows.put(rows.layout.at(fixed.row_1), k, v, score_BHT, fixed.position)
        rows.count(1)
        flat = fixed.flat
    else:
        rows.append(k, v, score_BHT)
        if recall.brings_back(ctx, rows, q.shape[2]):
            return recall.attend(ctx, layer, rows, q)
        if q.shape[2] > 1 or not rows.reads_flat or _mask(ctx, rows) is not None:
            return _attend_parts(ctx, layer, rows, q, q.shape[1] // k.shape[1])
        flat = rows.flat().newest(rows.window)
    # One token over all heads in one call: rows [N], heads at starts [B, H] with lengths [B, H].
    turn = None
    if (rope := ctx.read_rope(layer, rows)) is not None:
        span = ctx.positions.span or 0
        now = None if not span else torch.full((), rows.seen, device=q.device) if fixed is None else fixed.seen + 1
        turn = RowRotation(*ctx.tables.upto(rope, max(span, flat.longest), q), span, now)
    statistics = ctx.statistics if rows.window is None else ()
    return decode_rows(q, flat, rows.scaling, ctx.backend.name, statistics, turn, ctx.group)


def _entry_scores(
    ctx: Context, layer: int, rows: BoundedLayer, seen: int | Tensor, q: Tensor, k: Tensor, v: Tensor
) -> Tensor:
    """Scores ``[B, H, T]`` of new tokens after ``seen`` others."""
    began = time.perf_counter()
    # A windowed layer's scores are never read, and its score's memory would grow with the text.
    score_BHT = None
    if rows.window is None:  # [B, H, T]
        entry = Entry(
            layer=layer,
            position=seen,  # type: ignore[arg-type]  # of the device where shapes are fixed
            q=q,
            k=k,
            v=v,
            head=ctx.heads[layer] if ctx.heads is not None else None,
            seed=ctx.settings.seed,
            rope=ctx.ropes[layer] if ctx.ropes is not None else None,
            state=rows.state,
            linear=ctx.backend.linear,
        )
        score_BHT = ctx.policy.score.score_new_tokens(entry)
    if score_BHT is None:
        score_BHT = torch.zeros((), device=k.device).expand(k.shape[:3])
    ctx.counters.score_s += time.perf_counter() - began
    return score_BHT


def _attend_parts(ctx: Context, layer: int, rows: BoundedLayer, q: Tensor, G: int) -> Tensor:
    """Attention ``[B, Q, T, D]`` of a block that is stored already: a call per part, heads of equal length, or one for heads of
    different lengths where PyTorch has it."""
    plain = not rows.statistics and not ctx.policy.sparse and _mask(ctx, rows) is None
    if plain and isinstance(rows.layout, RaggedRows) and ctx.backend.attends_ragged(q):
        return _attend_ragged(ctx, layer, rows, rows.layout, q)
    out = []
    for part in rows.parts():
        queries = slice(part.heads.start * G, part.heads.stop * G)  # [b, h * G, T, D]
        out.append(_attend_part(ctx, layer, rows, part, q[:, queries]))
    return out[0] if len(out) == 1 else torch.cat(out, dim=1)


def _attend_ragged(ctx: Context, layer: int, rows: BoundedLayer, layout: RaggedRows, q: Tensor) -> Tensor:
    """``_attend_parts`` over all heads of a layer at once."""
    keys, values = (rows.codec.read(name, (slice(0, len(rows.positions)),)) for name in ("keys", "values"))
    starts_P, lengths_P, rope = layout.starts, layout.lengths, ctx.read_rope(layer, rows)
    if rope is not None:
        (B, Q, T, _), N, H = q.shape, len(keys), layout.H
        # Rank of each row in its head; that of its last row where it is free, so that tables reach there.
        row_N = torch.arange(N, device=q.device)
        head_N = torch.searchsorted(starts_P, row_N, right=True) - 1
        place_N = torch.minimum(row_N - starts_P[head_N], lengths_P[head_N] - 1)
        place_PT = lengths_P[:, None] - T + torch.arange(T, device=q.device)
        size = max(layout.longest, ctx.positions.span or 0)
        if not ctx.positions.by_rank:
            place_PT = ctx.positions.place(place_PT, rows.positions[starts_P[:, None] + place_PT], rows.seen)
            place_N = ctx.positions.place(place_N, rows.positions, rows.seen).clamp(0, size - 1)
        (cos, sin), turned = ctx.tables.upto(rope, size, q), function("rotate_rows", ctx.backend.name)
        keys = turned(keys[None, None], cos, sin, place_N.int()[None, None])[0, 0]
        q = turned(q, cos, sin, place_PT.int().view(B, H, T).repeat_interleave(Q // H, 1))
    return attend_heads(q, keys, values, starts_P, lengths_P, layout.longest, rows.scaling)


def _attend_part(ctx: Context, layer: int, rows: BoundedLayer, part: EqualLengthHeads, q: Tensor) -> Tensor:
    """Attention of heads of equal length; their slots gain its statistics. Rows are read in place, unless the policy's
    prefill mask hides some of them."""
    T, seen, rotation = q.shape[2], None, None
    if (mask := _mask(ctx, rows)) is not None:
        seen = mask.visible(part.keys.shape[2], rows.since_eviction)
    keys, values = _picked(part.keys, seen), _picked(part.values, seen)
    if (rope := ctx.read_rope(layer, rows)) is not None:
        n = keys.shape[2]
        if ctx.positions.by_rank:
            cos, sin = ctx.tables.first(rope, n, q, rows.layout.ragged)
            newest = cos[-T:], sin[-T:]
        else:
            rank_S = torch.arange(n, device=q.device)
            at = ctx.positions.place(rank_S, _picked(part.positions, seen), rows.seen)
            cos, sin = ctx.tables.at(rope, at, ctx.positions.span, q)
            newest = cos[0, 0, -T:], sin[0, 0, -T:]  # the newest tokens are placed alike in heads of equal length
        rotation = ChunkRotation(cos, sin, *newest)
    if ctx.policy.sparse is not None and T > 1 and rows.window is None:
        q, keys = ctx.backend.rotated(q, keys, rotation)
        return attend_chosen(ctx, layer, ctx.policy.sparse, part.heads, q, keys, values, rows.scaling)
    want = frozenset(ctx.statistics if len(part.stats) else ())
    out, counted = ctx.backend.attend(
        q, keys, values, rows.scaling, window=rows.window, want=want, by_head=ctx.group > 0, rotation=rotation
    )
    if want:  # each row's statistic [b, h, S] sums over the group and the block's queries
        for made, stats in zip(counted, part.stats.unflatten(0, (1 + ctx.group, -1)), strict=True):
            for stat, name in zip(stats, ctx.statistics, strict=True):
                _add_picked(stat, getattr(made, name), seen)
    return out


def _mask(ctx: Context, rows: BoundedLayer) -> PrefillMask | None:
    """The policy's prefill mask, where it holds for the tokens that this layer took last."""
    holds = rows.window is None and rows.evictions and rows.seen <= (ctx.schedule.body or 0)
    return ctx.policy.prefill_mask if holds else None


def _picked(rows: Tensor, seen: Sequence[slice] | None) -> Tensor:
    """The rows ``[b, h, S, ...]`` that are seen, concatenated."""
    return rows if seen is None else torch.cat([rows[:, :, piece] for piece in seen], dim=2)


def _add_picked(stat_bhS: Tensor, made: Tensor, seen: Sequence[slice] | None) -> None:
    """Add statistics of the rows that are seen to those of all rows, in place."""
    start = 0
    for piece in seen or (slice(None),):
        target = stat_bhS[..., piece]
        target += made[..., start : start + target.shape[-1]]
        start += target.shape[-1]


# ---- evicting --------------------------------------------------------------------------------------------------------


def make_room(ctx: Context, layer: int, rows: BoundedLayer, step: int, seen: int | Tensor | None = None) -> None:
    """Before a block is appended: windowed layers forget what no query can see; decoding evicts when full."""
    if rows.rows + step > rows.capacity:
        if rows.window is not None:
            rows.drop_oldest(rows.window - 1)
        elif ctx.policy.keeps_everything:
            rows.grow(rows.rows + step)
        else:
            evict(ctx, layer, rows, ctx.budgets[layer], decoding=True, seen=seen)


def evict_if_due(ctx: Context, layer: int, rows: BoundedLayer, seen: int | Tensor | None = None) -> None:
    """Evict at a boundary of the schedule."""
    if rows.window is None:
        keep = ctx.schedule.keep_at(rows.seen, rows.rows, ctx.budgets[layer])
        if keep is not None:
            evict(ctx, layer, rows, keep, decoding=ctx.schedule.decoding(rows.seen), seen=seen)


def evict(
    ctx: Context, layer: int, rows: BoundedLayer, keep: int, *, decoding: bool, seen: int | Tensor | None = None
) -> None:
    """Cut a layer to ``keep`` slots per head, on average where heads differ. ``seen`` is the text's length on the device,
    where the host's must not be read."""
    policy, counters = ctx.policy, ctx.counters
    if policy.keeps_everything or rows.rows <= keep:
        return
    stabilizers = 0 if ctx.schedule.is_last(rows.seen) and not decoding else ctx.schedule.stabilizers
    # The last eviction before the tail protects no newest slots: the tail follows them.
    slots = slots_of(ctx, layer, rows, keep, min(stabilizers, keep), seen)
    t0 = time.perf_counter()
    scores_BHS = policy.score.score_slots(slots)
    rows.set_entry_scores(slots.entry_scores)
    t1 = time.perf_counter()
    stay_BHS = policy.choose(slots, scores_BHS)
    t2 = time.perf_counter()
    # Counted and merged before rows move: positions and slots still belong together.
    counters.count_eviction(rows, slots.valid.shape[:2].numel() * (rows.rows - keep))
    if policy.merge is not None:
        _merge(ctx, policy.merge, layer, rows, slots, scores_BHS, stay_BHS)
    if policy.recall is not None:
        recall.store(ctx, rows, slots, scores_BHS, stay_BHS)
    rows.keep(stay_BHS, keep)
    counters.score_s += t1 - t0
    counters.select_s += t2 - t1
    counters.compact_s += time.perf_counter() - t2


def _merge(
    ctx: Context, merger: Merge, layer: int, rows: BoundedLayer, slots: Slots, scores_BHS: Tensor, stay_BHS: Tensor
) -> None:
    """Fold the slots that go into those that stay, in place and one head at a time: beside the buffers there are never more
    than a head's rows in float32. Pinned slots are as they were read: no merger sees them."""
    raw = ctx.read_rope(layer, rows) is not None  # keys are stored before RoPE
    rope = ctx.rope(layer)
    told_BHS = merger.told(ctx.policy.score, slots, scores_BHS, ctx.policy.protected(slots), stay_BHS)
    _, H, S = stay_BHS.shape
    for h in range(H):
        keys, values, positions = (rows.head(name, h) for name in ("keys", "values", "positions"))
        held = slice(S - len(keys), S)  # slots are padded on the left
        told_S, stay_S = told_BHS[0, h, held], stay_BHS[0, h, held]
        if merger.remembers:
            told_S = torch.logaddexp(told_S, rows.head("absorbed", h))
        exact = torch.promote_types(keys.dtype, torch.float32)
        keys_SD = keys.to(exact) if raw else turned_back(rope, keys.to(exact), positions)
        free_S = slice(None) if slots.pinned is None else ~slots.pinned[0, h, held]
        new = merger.fold(layer, keys_SD[free_S], values.to(exact)[free_S], told_S[free_S], stay_S[free_S])
        at, folded = torch.arange(len(keys), device=keys.device)[free_S][new.slots_R], new.keys_RD
        if not raw:
            folded = rotate(folded, *rope.tables(positions[at], exact))
        keys[at], values[at] = folded.to(keys.dtype), new.values_RD.to(values.dtype)
        if merger.remembers and new.gained_R is not None:
            absorbed = rows.head("absorbed", h)
            absorbed[at] = torch.logaddexp(absorbed[at], new.gained_R)
