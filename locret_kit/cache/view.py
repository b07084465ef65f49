"""A policy's view of a layer: new tokens as they enter; slots, with keys, values and queries read where they are asked for."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from locret_kernels.rows import HeadProduct, Score

from ..backbones.rope import Rope, rotate
from ..heads import RetainingHead
from ..policies.base import Entry, PrefillMask, Slots
from .context import Context
from .pins import pinned_slots
from .storage.rows import BoundedLayer


def slots_of(ctx: Context, rows: BoundedLayer, keep: int, stabilizers: int) -> Slots:
    """Slots of a layer that must be cut to ``keep`` per head."""
    # Of every kept statistic [B, H, S]; the count of queries that have seen a slot follows from its position.
    # The group's come first, then those of each of its query heads by itself.
    kept, names = rows.slots("stats"), ctx.statistics
    stats, *alone = (
        dict(zip(names, kept[i * len(names) : (i + 1) * len(names)], strict=True)) for i in range(1 + ctx.group)
    )
    positions, valid = rows.slots("positions"), rows.layout.valid()
    if "count" in ctx.policy.statistics:
        for one in (stats, *alone):
            one["count"] = (rows.seen - positions).float()
    # Functions and not tensors: most policies read neither keys nor values, and to rotate all of them costs a pass.
    slots = Slots(
        layer=rows.number,
        layers=len(ctx.budgets),
        keep=keep,
        stabilizers=stabilizers,
        chunk=ctx.schedule.chunk,
        since_eviction=rows.since_eviction,
        seen=rows.seen - ctx.first,
        positions=(positions - ctx.first).clamp(min=0) if ctx.first else positions,
        valid=valid,
        pinned=pinned_slots(ctx.pins, positions, valid),
        entry_scores=rows.slots("scores"),
        stats=stats,
        keys=lambda: _keys(ctx, rows),
        values=lambda: rows.slots("values"),
        raw_keys=lambda: _raw_keys(ctx, rows),
        queries=lambda: _queries(ctx, rows),
        softmax=rows.softmax,
        seed=ctx.settings.seed,
        target=ctx.heads.config.target if ctx.heads is not None else "logit",
        lengths=rows.layout.head_lengths,
        rope=ctx.ropes[rows.number] if ctx.ropes is not None else None,
        next_position=ctx.positions.next_place(valid.sum(-1), rows.seen) if ctx.policy.score.needs_unrotated else None,
        state=rows.state,
        backend=rows.backend,
    )
    if alone:
        slots.group = [_of_query_head(slots, g, len(alone), own, cache(slots.keys)) for g, own in enumerate(alone)]
    return slots


def _of_query_head(slots: Slots, g: int, G: int, stats: Mapping[str, Tensor], keys: Callable[[], Tensor]) -> Slots:
    """The slots as the ``g``-th of the ``G`` query heads of every group sees them; ``stats`` of shape ``[B, H, S]``."""
    softmax = slots.softmax.of(slice(g, None, G))
    return replace(slots, stats=stats, keys=keys, queries=lambda: slots.queries()[:, g::G], softmax=softmax)


def _keys(ctx: Context, rows: BoundedLayer) -> Tensor:
    """Keys ``[B, H, S, D]`` as attention sees them."""
    keys, rope = rows.slots("keys"), ctx.read_rope(rows)
    if rope is None:
        return keys
    if ctx.positions.by_rank:
        cos, sin = rows.layout.per_head_tables(
            lambda n: ctx.tables.first(rope, n, keys, rows.layout.ragged), keys.shape[2]
        )
    else:  # those of position 0 at padding, which is on the left and has rank -1: ranks count from a head's first slot
        valid = rows.layout.valid()
        rank_BHS = valid.cumsum(-1) - 1
        place_BHS = ctx.positions.place(rank_BHS, rows.slots("positions"), rows.seen).where(valid, 0)
        cos, sin = ctx.tables.at(rope, place_BHS, ctx.positions.span, keys)
    return rotate(keys, cos, sin)


def _raw_keys(ctx: Context, rows: BoundedLayer) -> Tensor:
    """Keys ``[B, H, S, D]`` before RoPE."""
    keys = rows.slots("keys")
    if ctx.read_rope(rows) is not None:
        return keys
    return unrotate(ctx.rope(rows.number), keys, rows.slots("positions"))


def unrotate(rope: Rope, keys: Tensor, positions: Tensor) -> Tensor:
    """Keys before RoPE, of shape ``[..., D]``, from keys rotated for ``positions [...]``."""
    cos, sin = (table.view(*positions.shape, -1) for table in rope.tables(positions.flatten(), keys.dtype))
    turned = rotate(keys, cos, -sin)
    # LongRoPE scales cos and sin: turning there and back does so twice.
    turned[..., : cos.shape[-1]] /= rope.scaling**2
    return turned


def _queries(ctx: Context, rows: BoundedLayer) -> Tensor:
    """The newest queries ``[B, Q, W, D]``, rotated for the newest ``W`` rows."""
    # The newest W of the buffer [Q, recent, D]; the newest is last.
    W = min(rows.recent, rows.layout.valid().shape[-1])
    if not W:
        raise ValueError(f"policy={ctx.policy.name!r}: its score keeps no queries (Score.recent)")
    q = rows.queries[None, :, rows.recent - W :]
    if ctx.ropes is None:
        return q
    rope = ctx.read_rope(rows)
    if rope is None:
        return rotate(q, *ctx.tables.between(ctx.ropes[rows.number].of_queries, rows.seen - W, W, q))
    rope = rope.of_queries

    def placed(n: int) -> tuple[Tensor, Tensor]:
        """Tables of a head of ``n`` rows: a query's own place in the text, or the rank of the row where that is higher."""
        if ctx.positions.by_rank:
            return ctx.tables.between(rope, n - W, W, q)  # those of all layers
        new_W = torch.arange(-W, 0, device=q.device)
        return rope.tables(ctx.positions.place(n + new_W, rows.seen + new_W, rows.seen), q.dtype)

    cos, sin = rows.layout.per_head_tables(placed, W)
    if rows.layout.ragged:
        G = q.shape[1] // cos.shape[1]  # [B, H, W, R] -> [B, Q, W, R]
        cos, sin = cos.repeat_interleave(G, 1), sin.repeat_interleave(G, 1)
    return rotate(q, cos, sin)


def prefill_mask(ctx: Context, rows: BoundedLayer) -> PrefillMask | None:
    """The policy's prefill mask, where it holds for the tokens that this layer took last."""
    holds = rows.window is None and rows.evictions and rows.seen <= (ctx.schedule.body or 0)
    return ctx.policy.prefill_mask if holds else None


def score_alike(contexts: Sequence[Context]) -> bool:
    """Whether the new tokens of these texts may be scored in one call."""
    ctx = contexts[0]
    score = ctx.policy.score
    if not (score.per_token or not score.scores_new_tokens):
        return False
    # Equal parts, and the same heads and draws: then one call serves every text.
    mine = score, ctx.settings.seed, ctx.first
    return all(own.heads is ctx.heads and (own.policy.score, own.settings.seed, own.first) == mine for own in contexts)


def _head_product(ctx: Context, layer: int, q: Tensor, k: Tensor, v: Tensor) -> HeadProduct | None:
    """The hidden product ``[B, T, R]`` of a layer's retaining head, and its last weight, where they are the whole
    score. The launch that writes rows makes the second product."""
    if ctx.heads is None or not ctx.backend.launches or not ctx.policy.score.is_head:
        return None
    head = ctx.heads[layer]
    if not isinstance(head, RetainingHead) or ctx.heads.config.activation != "silu":
        return None
    return HeadProduct(head.hidden(q, k, v), head.fc2.weight)


def folded_scores(ctx: Context, layer: int, x_BTC: Tensor | HeadProduct | None, tokens: int) -> Score:
    """Entry scores of tokens by their layer's normed input ``x``, or its head's product with it; None where that is not known,
    or its head not folded."""
    if isinstance(x_BTC, HeadProduct):
        return x_BTC
    head = None if ctx.folded is None else ctx.folded[layer]
    return None if head is None or x_BTC is None or x_BTC.shape[1] != tokens else head.product(x_BTC)


def select_tokens(score: Score, at: slice | Tensor) -> Score:
    """Entry scores ``[B, H, T]`` of some of the tokens."""
    if isinstance(score, HeadProduct):
        return score._replace(hidden_BTR=score.hidden_BTR[:, at])
    return None if score is None else score[:, :, at]


def scores_of(score: Score, k_BHTD: Tensor) -> Tensor:
    """Entry scores ``[B, H, T]`` of new tokens with such keys; zeros where they are not read."""
    if score is None:
        return torch.zeros((), dtype=torch.float32, device=k_BHTD.device).expand(k_BHTD.shape[:3])
    return score.scores() if isinstance(score, HeadProduct) else score


def score_by_logits(
    ctx: Context, layers: Sequence[BoundedLayer], hidden_BTE: Tensor, ids_BT: Tensor | None, before: Tensor | None
) -> Tensor:
    """Set the entry scores of the newest tokens by their probabilities, alike in every layer and head.

    Returns the final hidden state that judges the next token. ``before`` is the state for the first of these tokens.

    Raises:
        ValueError: the tokens are not known.
    """
    if ids_BT is None:
        raise ValueError(f"policy={ctx.policy.name!r} scores tokens by probability: give input_ids, not inputs_embeds")
    where = hidden_BTE.device  # which need not be the first layer's
    before = None if before is None else before.to(where)
    score_BT, last_hidden = ctx.policy.score.score_by_logits(ctx.model, hidden_BTE, ids_BT.to(where), before)
    for rows in layers:
        if rows.window is None:
            rows.scores[rows.layout.last(score_BT.shape[1])] = score_BT
    return last_hidden


def entry_scores(
    ctx: Context,
    rows: BoundedLayer,
    seen: int | Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    places_BT: Tensor | None = None,
) -> Score:
    """Scores of new tokens after ``seen`` others; None where they are not read. For a batch, ``places_BT[b, t]`` is the token's
    position in its own text. ``rows`` may then be any text's, because their contexts ``score_alike``."""
    began, layer = time.perf_counter(), rows.number
    if ctx.first:  # counted as slots are, from the first token of a second reading
        seen, places_BT = seen - ctx.first, None if places_BT is None else places_BT - ctx.first
    # A windowed layer's scores are never read, and its score's memory would grow with the text.
    score: Score = None
    if ctx.spec.windows[layer] is None and (score := _head_product(ctx, layer, q, k, v)) is None:
        entry = Entry(
            layer=layer,
            position=seen,  # type: ignore[arg-type]  # of the device where shapes are fixed
            q=q,
            k=k,
            v=v,
            head=ctx.heads[layer] if ctx.heads is not None else None,
            seed=ctx.settings.seed,
            rope=ctx.ropes[layer] if ctx.ropes is not None else None,
            state=rows.state if places_BT is None else {},
            linear=ctx.backend.linear,
            places=None if places_BT is None else places_BT[:, None],
        )
        score = ctx.policy.score.score_new_tokens(entry)
    ctx.counters.score_s += time.perf_counter() - began
    return score
