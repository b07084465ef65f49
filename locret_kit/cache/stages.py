"""Stages of a policy: what its merging, its recall and its sparse prefill do in a layer's step and eviction."""

import time
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from locret_kernels.attend import Blocks

from ..backbones.rope import Rope, rotate
from ..policies import Policy
from ..policies.base import BlockIndex, Merge, Recall, Slots, Sparse, resolve_count, wide
from ..settings import FIRST
from .attend import gain
from .context import Context, Stage
from .storage.blocks import BlockStore, Recalled
from .storage.rows import BoundedLayer, EqualLengthHeads
from .view import unrotate

# ---- merging --------------------------------------------------------------------------------------------------------

# Evicted slots are folded into slots of the same head that stay.


@dataclass(frozen=True)
class MergeStage(Stage):
    """Folds the slots that go into those that stay, in place and one head at a time: besides the buffers there are never more
    than a head's rows in float32. Pinned slots are as they were read: no merger sees them."""

    merger: Merge

    def evicted(self, ctx: Context, rows: BoundedLayer, slots: Slots, scores_BHS: Tensor, stay_BHS: Tensor) -> None:
        merger = self.merger
        raw = ctx.read_rope(rows) is not None  # keys are stored before RoPE
        rope = ctx.rope(rows.number)
        weights_BHS = merger.slot_weights(ctx.policy.score, slots, scores_BHS, ctx.policy.protected(slots), stay_BHS)
        _, H, S = stay_BHS.shape
        for h in range(H):
            keys, values, positions = (rows.head(name, h) for name in ("keys", "values", "positions"))
            own = slice(S - len(keys), S)  # slots are padded on the left
            weights_S, stay_S = weights_BHS[0, h, own], stay_BHS[0, h, own]
            if merger.tracks_weight:
                weights_S = torch.logaddexp(weights_S, rows.head("absorbed", h))
            exact = torch.promote_types(keys.dtype, torch.float32)
            keys_SD = keys.to(exact) if raw else unrotate(rope, keys.to(exact), positions)
            free_S = slice(None) if slots.pinned is None else ~slots.pinned[0, h, own]
            new = merger.merge(
                rows.number, keys_SD[free_S], values.to(exact)[free_S], weights_S[free_S], stay_S[free_S]
            )
            at, folded = torch.arange(len(keys), device=keys.device)[free_S][new.slots_R], new.keys_RD
            if not raw:
                folded = rotate(folded, *rope.tables(positions[at], exact))
            keys[at], values[at] = folded.to(keys.dtype), new.values_RD.to(values.dtype)
            if merger.tracks_weight and new.log_weight_R is not None:
                absorbed = rows.head("absorbed", h)
                absorbed[at] = torch.logaddexp(absorbed[at], new.log_weight_R)


# ---- sparse prefill -------------------------------------------------------------------------------------------------

# Attention of a chunk over the rows that the policy chooses, and how much of it that is.


@dataclass(frozen=True)
class SparseStage(Stage):
    """Narrows the attention of a chunk to the blocks of rows that the policy chooses, and counts how much of it is computed."""

    sparse: Sparse

    def narrows(self, rows: BoundedLayer, tokens: int) -> bool:
        return tokens > 1 and rows.window is None

    def blocks(self, ctx: Context, rows: BoundedLayer, heads: slice, q_BQTD: Tensor, k_BHSD: Tensor) -> Blocks | None:
        began, G = time.perf_counter(), q_BQTD.shape[1] // k_BHSD.shape[1]
        blocks = self.sparse.choose(rows.number, slice(heads.start * G, heads.stop * G), q_BQTD, k_BHSD, rows.scaling)
        computed, dense = pairs_of(blocks, q_BQTD.shape[2], k_BHSD.shape[2])
        ctx.counters.computed_pairs += computed
        ctx.counters.dense_pairs += dense
        ctx.counters.select_s += time.perf_counter() - began
        return None if computed == dense else blocks  # a short context, of which a pattern leaves nothing out


def pairs_of(blocks: Blocks, tokens: int, rows: int) -> tuple[int, int]:
    """Pairs of a query and a row that the blocks compute, and those of dense attention in blocks of as many queries: for each
    query the rows up to the last of its block. The host waits for the device."""
    B, Q, N, U = blocks.seen_BQNU.shape
    device = blocks.seen_BQNU.device
    start_N = blocks.queries * torch.arange(N, device=device)
    queries_N = (tokens - start_N).clamp(max=blocks.queries)
    until_N1 = (rows - tokens + start_N + queries_N)[:, None]
    there_NU = (until_N1 - blocks.unit * torch.arange(U, device=device)).clamp(0, blocks.unit)
    pairs_NU = queries_N[:, None] * there_NU
    return int((blocks.seen_BQNU.sum((0, 1)) * pairs_NU).sum()), B * Q * int(pairs_NU.sum())


# ---- recall ---------------------------------------------------------------------------------------------------------

# Evicted slots go to the layer's store, and attention sees the best of its blocks beside the rows.
#
# Where a query stands to a block is not known before the block has come back, so queries and keys that are stored before RoPE
# are compared at one distance, ``LOOKUP`` tokens; those that are stored rotated are compared as they are.
#
# A query sees the blocks of its own text alone, and a token that is among the rows is not in its block, so nothing is seen twice.


LOOKUP = 512
"""Distance (tokens) at which queries meet keys that are stored before RoPE, where the part says none."""
TILE = 64
"""Queries whose attention weights exist at once."""


@dataclass(frozen=True)
class RecallStage(Stage):
    """Stores evicted slots, and brings blocks back for the tokens that are read next."""

    recall: Recall

    def attend(self, ctx: Context, rows: BoundedLayer, q_BQTD: Tensor) -> Tensor | None:
        out, T = [], q_BQTD.shape[2]
        brings_back = rows.store is not None and rows.store.blocks and (self.recall.reading or in_tail(ctx, rows, T))
        places = rows.store is not None and self.recall.far  # the rows too
        if not (brings_back or places):
            return None
        # Tokens that are few, such as a question's, look up one by one; those of a chunk together.
        pieces = [slice(t, t + 1) for t in range(T)] if self.recall.apart >= T else [slice(0, T)]
        for piece in pieces:
            out.append(_attend_piece(ctx, self.recall, rows, q_BQTD[:, :, piece], T - piece.stop, bool(brings_back)))
        return out[0] if len(out) == 1 else torch.cat(out, dim=2)

    def evicted(self, ctx: Context, rows: BoundedLayer, slots: Slots, scores_BHS: Tensor, stay_BHS: Tensor) -> None:
        assert rows.store is not None
        began = time.perf_counter()
        gone_BHS = slots.valid & ~stay_BHS
        views = self.recall.views(slots, scores_BHS)
        rows.store.put([rows.slots(name) for name in ("keys", "values", "positions")], gone_BHS, views)
        ctx.recalls.stored_slots += int(gone_BHS.sum())
        ctx.recalls.recall_s += time.perf_counter() - began


def in_tail(ctx: Context, rows: BoundedLayer, tokens: int) -> bool:
    """Whether the newest ``tokens`` tokens, which are rows already, are the prompt's tail or what follows it."""
    return ctx.schedule.body is None or rows.seen - tokens >= ctx.schedule.body


def _attend_piece(
    ctx: Context, recall: Recall, rows: BoundedLayer, q_BQTD: Tensor, later: int, brings_back: bool
) -> Tensor:
    """Attention of tokens that look up together; the newest ``later`` rows come after them."""
    assert rows.store is not None
    began, counters = time.perf_counter(), ctx.recalls
    T, first = q_BQTD.shape[2], rows.seen - later - q_BQTD.shape[2]
    if brings_back:
        chosen_BHK = _choose(ctx, recall, rows, rows.store, q_BQTD, later)
    else:
        chosen_BHK = torch.empty(q_BQTD.shape[0], rows.layout.H, 0, dtype=torch.int64, device=q_BQTD.device)
    recalled, loads = rows.store.load(chosen_BHK, rows.slots("keys"), rows.slots("values"))
    counters.lookups += brings_back
    counters.blocks += chosen_BHK.numel()
    counters.hits += chosen_BHK.numel() - loads
    counters.loaded_bytes += loads * rows.store.size * sum(row.shape[-1] * row.itemsize for row in recalled[:2])
    counters.recall_s += time.perf_counter() - began
    # While the text is read every row is seen; what follows may see the newest and what has come back alone.
    narrow = brings_back and in_tail(ctx, rows, T + later)
    local = resolve_count(recall.local, ctx.budgets[rows.number]) if narrow else 0
    out, G = [], q_BQTD.shape[1] // rows.layout.H
    for part in rows.parts():
        q, back = q_BQTD[:, part.heads.start * G : part.heads.stop * G], recalled.of(part.heads)
        kept_bhS = part.positions[:, :, : part.keys.shape[2] - later].long()
        seen_bhS = torch.ones_like(kept_bhS, dtype=torch.bool)
        if local:  # of the others the first tokens, and what lies in a block that has come back
            block_bhS, shown_bhK = kept_bhS.div(recall.size, rounding_mode="floor"), chosen_BHK[:, part.heads]
            seen_bhS[..., : max(0, kept_bhS.shape[-1] - T - local)] = False
            seen_bhS |= (block_bhS[..., None] == shown_bhK[:, :, None]).any(-1) | (kept_bhS < FIRST)
        out.append(_attend_part(ctx, recall, rows, part, q, first, back, kept_bhS, seen_bhS))
    return out[0] if len(out) == 1 else torch.cat(out, dim=1)


def _choose(ctx: Context, recall: Recall, rows: BoundedLayer, stored: BlockStore, q_BQTD: Tensor, later: int) -> Tensor:
    """Numbers ``[B, H, K]`` of the blocks that come back, ascending."""
    T, N, rope = q_BQTD.shape[2], stored.blocks, ctx.read_rope(rows)
    if rope is not None:
        at_1 = torch.full((1,), recall.far or LOOKUP, dtype=torch.int64, device=q_BQTD.device)
        q_BQTD = rotate(q_BQTD, *rope.of_queries.tables(at_1, q_BQTD.dtype))
    kept, positions, valid = rows.slots("keys"), rows.slots("positions").long(), rows.layout.valid()
    # Neither the rows of these tokens nor those after them stand for a block.
    older = slice(0, kept.shape[2] - T - later)
    block_BHS = positions.div(recall.size, rounding_mode="floor")
    block_BHS = block_BHS.masked_fill(~valid | (positions < FIRST) | (block_BHS >= N), -1)
    found = BlockIndex(
        stored.index[None, :, :N],
        stored.worth[None, :, :N].isfinite(),
        kept[:, :, older],
        block_BHS[:, :, older],
        rows.scaling,
    )
    worth_BHN = recall.relevance(q_BQTD, found)
    if recall.across == "model":
        # Later layers see what earlier ones gave, in one forward alone: it is cleared at its beginning.
        piece = rows.seen - later - T, T
        worth_BHN = ctx.block_scores[piece] = _most(worth_BHN, ctx.block_scores.get(piece))
        worth_BHN = worth_BHN[..., :N]
    holds_BHN = stored.held[None, :, :N].any(-1)
    holds_BHN = holds_BHN if worth_BHN.shape[1] > 1 else holds_BHN.any(1, keepdim=True)
    # Stable: of equals the older block, so that runs repeat exactly.
    best_BHN = worth_BHN.masked_fill(~holds_BHN, float("-inf")).argsort(dim=-1, descending=True, stable=True)
    return best_BHN[..., : recall.take].sort(dim=-1).values.expand(-1, rows.layout.H, -1)


def _most(worth_B1N: Tensor, before_B1N: Tensor | None) -> Tensor:
    """The larger worth of each block; some are stored in one of the layers alone."""
    if before_B1N is None:
        return worth_B1N
    few, many = sorted((before_B1N, worth_B1N), key=lambda x: x.shape[-1])
    return torch.cat((torch.maximum(few, many[..., : few.shape[-1]]), many[..., few.shape[-1] :]), -1)


def _attend_part(
    ctx: Context, recall: Recall, rows: BoundedLayer, part: EqualLengthHeads, q_bQtD: Tensor, first: int, back: Recalled,
    kept_bhS: Tensor, seen_bhS: Tensor,
) -> Tensor:  # fmt: skip
    """Attention ``[b, Q, t, D]`` of tokens from the position ``first`` on, in heads of equal length, over the blocks that have
    come ``back`` and the rows at ``kept`` positions that are ``seen``. The rows gain its statistics."""
    n = kept_bhS.shape[-1]
    keys = torch.cat((back.keys, part.keys[:, :, :n]), 2)
    values = torch.cat((back.values, part.values[:, :, :n]), 2)
    positions_bhM = torch.cat((back.positions, kept_bhS), 2)
    shown_bhM = torch.cat((back.valid, seen_bhS), 2)
    h, M, t = keys.shape[1], keys.shape[2], q_bQtD.shape[2]
    q_bhGtD, at_t = q_bQtD.unflatten(1, (h, -1)), first + torch.arange(t, device=q_bQtD.device)
    rope = ctx.read_rope(rows)
    if rope is not None and not recall.far:
        last = torch.iinfo(torch.int64).max
        # Hidden slots rank last, so they take no position from those that are seen.
        rank_bhM = positions_bhM.masked_fill(~shown_bhM, last).argsort(dim=-1).argsort(dim=-1)
        place_bhM = ctx.positions.place(rank_bhM, positions_bhM, first + t)
        cos, sin = ctx.tables.at(rope, place_bhM, ctx.positions.span, keys)
        keys = rotate(keys, cos, sin)
        newest = ctx.tables.at(rope.of_queries, place_bhM, ctx.positions.span, keys)
        q_bhGtD = rotate(q_bhGtD, *(table[:, :, None, -t:] for table in newest))
    out = []
    for q, at in zip(q_bhGtD.split(TILE, 3), at_t.split(TILE), strict=True):
        hidden = (positions_bhM[:, :, None] > at[:, None]) | ~shown_bhM[:, :, None]  # [b, h, t, M]
        if not recall.far and not len(part.stats):  # nothing is read off the weights
            out.append(_fused(q, keys, values, ~hidden, rows.scaling))
            continue
        if rope is not None and recall.far:
            logits = _far_logits(rope, recall.far, q, keys, positions_bhM, at)
        else:
            logits = wide(q) @ wide(keys)[:, :, None].mT
        weights = (logits * rows.scaling).masked_fill(hidden[:, :, None], float("-inf")).softmax(-1)
        out.append((weights @ wide(values)[:, :, None]).to(values.dtype))
        if recall.statistics and recall.far:  # what representatives are chosen by: attention from within the window
            weights = weights.masked_fill((at[:, None] - positions_bhM[:, :, None] >= recall.far)[:, :, None], 0)
        if len(part.stats):
            _count(ctx, part.stats[..., :n], weights[..., M - n :], (~hidden).sum(-1))
    return torch.cat(out, 3).flatten(1, 2)


def _fused(q_bhGtD: Tensor, keys_bhMD: Tensor, values_bhMD: Tensor, seen_bhtM: Tensor, scaling: float) -> Tensor:
    """Attention ``[b, h, G, t, D]``; a key/value head of a text is a batch of its own, whose query heads share a mask."""
    keys, values = (x.flatten(0, 1)[:, None].expand(-1, q_bhGtD.shape[2], -1, -1) for x in (keys_bhMD, values_bhMD))
    q, mask = q_bhGtD.flatten(0, 1), seen_bhtM.flatten(0, 1)[:, None]
    return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=scaling).view_as(q_bhGtD)


def _far_logits(
    rope: Rope, far: int, q_bhGtD: Tensor, keys_bhMD: Tensor, positions_bhM: Tensor, at_t: Tensor
) -> Tensor:
    """Products ``[b, h, G, t, M]`` of queries and keys that stand ``far`` tokens apart, or nearer where they truly do."""
    before = int(at_t[0]) - far
    near_bhM = (positions_bhM - before).clamp(min=0, max=far + len(at_t))  # what is later still is hidden
    places = torch.arange(far + len(at_t) + 1, device=at_t.device)
    keys, (cos, sin) = rope.both_tables(places, keys_bhMD.dtype)
    near_keys = rotate(keys_bhMD, *(table[near_bhM] for table in keys))
    near = wide(rotate(q_bhGtD, cos[at_t - before], sin[at_t - before])) @ wide(near_keys)[:, :, None].mT
    away = wide(rotate(q_bhGtD, cos[far], sin[far])) @ wide(keys_bhMD)[:, :, None].mT
    return away.where((at_t[:, None] - positions_bhM[:, :, None] >= far)[:, :, None], near)


def _count(ctx: Context, stats: Tensor, weights_bhGtS: Tensor, seen_bht: Tensor) -> None:
    """Add the attention of new tokens to the statistics ``[statistics, b, h, S]`` of slots, which see ``seen`` slots each: of the
    mean over the group first, then of each of its query heads by itself."""
    heads = [weights_bhGtS.mean(2), *weights_bhGtS.unbind(2)[: ctx.group]]
    for own, a_bhtS in zip(stats.unflatten(0, (len(heads), -1)), heads, strict=True):
        for stat, name in zip(own, ctx.statistics, strict=True):
            stat += gain(name, a_bhtS, seen_bht).sum(2)


# ---- stages ----


def stages_of(policy: Policy) -> tuple[Stage, ...]:
    """The stages of a policy, in the order of their part in an eviction."""
    made = {"merge": MergeStage, "recall": RecallStage, "sparse": SparseStage}
    return tuple(stage(getattr(policy, name)) for name, stage in made.items() if getattr(policy, name) is not None)
