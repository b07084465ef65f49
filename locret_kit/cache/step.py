"""One step of a layer: new tokens become rows, attend to what they see, and the policy evicts where the schedule says.

Dynamic decoding and decoding with fixed shapes (``runtime.graph_decoder``) take the same step. In the second the text's length,
the row of the new token and the lengths of heads are numbers on the device (``Fixed``), and nothing is read back.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor

from .context import Context
from .layer_attention import Fixed, attend_newest, attend_token
from .storage.layouts import EqualRows
from .storage.rows import BoundedLayer
from .view import entry_scores, slots_of


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
        if not ctx.evicts_after_forward:
            evict_if_due(ctx, layer, rows)
        rows.codec.finish_block()
        start += step
    return out[0] if len(out) == 1 else torch.cat(out, dim=2)


def block_length(ctx: Context, rows: BoundedLayer) -> int:
    """Tokens that may be read before the next eviction could fall due."""
    room = ctx.schedule.chunk if rows.grows else rows.capacity - rows.rows
    later = None if ctx.evicts_after_forward else ctx.schedule.after_prompt(rows.seen, room)
    step = ctx.schedule.until_boundary(rows.seen) if later is None else later
    return min(step, rows.until_chunk)


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
        score_BHT = entry_scores(ctx, layer, rows, seen, q, k, v)
    if rows.recent:
        rows.remember(q)  # as it came: scores rotate the newest queries for the rows that are left
    if (rope := ctx.write_rope(layer, rows)) is not None:
        tables, T = ctx.tables.between(rope, seen, q.shape[2], q), q.shape[2]
        of_queries = tables if rope.queries is None else ctx.tables.between(rope.queries, seen, T, q)
        q, k = ctx.backend.rotate(q, *of_queries), ctx.backend.rotate(k, *tables)
    if fixed is not None:
        assert isinstance(rows.layout, EqualRows)
        rows.put(rows.layout.at(fixed.row_1), k, v, score_BHT, fixed.position)
        rows.count(1)
        return attend_token(ctx, layer, rows, q, fixed)
    rows.append(k, v, score_BHT)
    for stage in ctx.stages:
        if stage.attends(ctx, rows, q.shape[2]):
            return stage.attend(ctx, layer, rows, q)
    return attend_newest(ctx, layer, rows, q)


# ---- evicting --------------------------------------------------------------------------------------------------------


def make_room(ctx: Context, layer: int, rows: BoundedLayer, step: int, seen: int | Tensor | None = None) -> None:
    """Before a block is appended: windowed layers forget what no query can see; decoding evicts when full."""
    if rows.chunked and rows.until_chunk == rows.window:
        rows.drop_oldest(0)
    if rows.rows + step > rows.capacity:
        if rows.window is not None:
            rows.drop_oldest(rows.window - 1)
        elif rows.grows:
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
    if rows.grows or rows.rows <= keep:
        return
    stabilizers = 0 if ctx.schedule.is_last(rows.seen) and not decoding else ctx.schedule.stabilizers
    # The last eviction before the tail protects no newest slots: the tail follows them.
    slots = slots_of(ctx, layer, rows, keep, min(stabilizers, keep), seen)
    t0 = time.perf_counter()
    scores_BHS = policy.scores(slots)
    rows.layout.put_back(rows.scores, slots.entry_scores)  # a score may have aged them
    t1 = time.perf_counter()
    stay_BHS = policy.choose(slots, scores_BHS)
    t2 = time.perf_counter()
    # Before rows move: positions and slots still belong together.
    counters.count_eviction(rows, slots.valid.shape[:2].numel() * (rows.rows - keep))
    for stage in ctx.stages:
        stage.evicted(ctx, layer, rows, slots, scores_BHS, stay_BHS)
    rows.keep(stay_BHS, keep)
    counters.score_s += t1 - t0
    counters.select_s += t2 - t1
    counters.compact_s += time.perf_counter() - t2
