"""A policy's view of a layer: new tokens as they enter; slots, with keys, values and queries read where they are asked for."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from ..backbones.rope import Rope, rotate
from ..policies.base import Entry, Slots
from ..policies.methods.sirllm import token_entropy
from .context import Context
from .pins import pinned_slots
from .storage.rows import BoundedLayer


def slots_of(
    ctx: Context, layer: int, rows: BoundedLayer, keep: int, stabilizers: int, length: int | Tensor | None = None
) -> Slots:
    """Slots of a layer that must be cut to ``keep`` per head, in a text of ``length`` tokens so far: by default as many as
    the host knows, or an integer tensor without axes that the host never reads."""
    seen = rows.seen if length is None else length
    # Of every kept statistic [B, H, S]; the count of queries that have seen a slot follows from its position.
    # The group's come first, then those of each of its query heads by itself.
    kept, names = rows.slots("stats"), ctx.statistics
    stats, *alone = (
        dict(zip(names, kept[i * len(names) : (i + 1) * len(names)], strict=True)) for i in range(1 + ctx.group)
    )
    positions, valid = rows.slots("positions"), rows.layout.valid()
    if "count" in ctx.policy.statistics:
        for one in (stats, *alone):
            one["count"] = (seen - positions).float()
    # Functions and not tensors: most policies read neither keys nor values, and to rotate all of them costs a pass.
    slots = Slots(
        layer=layer,
        layers=len(ctx.budgets),
        keep=keep,
        stabilizers=stabilizers,
        chunk=ctx.schedule.chunk,
        since_eviction=rows.since_eviction,
        seen=seen,  # type: ignore[arg-type]  # of the device where shapes are fixed
        positions=positions,
        valid=valid,
        pinned=pinned_slots(ctx.pins, positions, valid),
        entry_scores=rows.slots("scores"),
        stats=stats,
        keys=lambda: _keys(ctx, layer, rows, seen),
        values=lambda: rows.slots("values"),
        raw_keys=lambda: _raw_keys(ctx, layer, rows),
        queries=lambda: _queries(ctx, layer, rows, seen),
        softmax=rows.softmax,
        seed=ctx.settings.seed,
        target=ctx.heads.config.target if ctx.heads is not None else "logit",
        lengths=rows.layout.head_lengths,
        rope=ctx.ropes[layer] if ctx.ropes is not None else None,
        next_position=ctx.positions.next_place(valid.sum(-1), seen) if ctx.policy.score.needs_unrotated else None,
        state=rows.state,
        backend=rows.backend,
    )
    if alone:
        slots.group = [_of_query_head(slots, g, len(alone), own, cache(slots.keys)) for g, own in enumerate(alone)]
    return slots


def _of_query_head(slots: Slots, g: int, G: int, stats: Mapping[str, Tensor], keys: Callable[[], Tensor]) -> Slots:
    """The slots as the ``g``-th of the ``G`` query heads of every group sees them."""
    softmax = slots.softmax.of(slice(g, None, G))
    return replace(slots, stats=stats, keys=keys, queries=lambda: slots.queries()[:, g::G], softmax=softmax)


def _keys(ctx: Context, layer: int, rows: BoundedLayer, seen: int | Tensor) -> Tensor:
    """Keys ``[B, H, S, D]`` as attention sees them."""
    keys, rope = rows.slots("keys"), ctx.read_rope(layer, rows)
    if rope is None:
        return keys
    if ctx.positions.by_rank:
        cos, sin = rows.layout.per_head_tables(
            lambda n: ctx.tables.first(rope, n, keys, rows.layout.ragged), keys.shape[2]
        )
    else:
        cos, sin = _tables(ctx, rope, rows, seen, keys)
    return rotate(keys, cos, sin)


def _tables(ctx: Context, rope: Rope, rows: BoundedLayer, seen: int | Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin ``[B, H, S, R]`` of every slot's position; those of position 0 at padding."""
    # Ranks count from a head's first slot; padding is on the left and has rank -1.
    valid = rows.layout.valid()
    rank_BHS = valid.cumsum(-1) - 1
    place_BHS = ctx.positions.place(rank_BHS, rows.slots("positions"), seen).where(valid, 0)
    return ctx.tables.at(rope, place_BHS, ctx.positions.span, like)


def _raw_keys(ctx: Context, layer: int, rows: BoundedLayer) -> Tensor:
    """Keys ``[B, H, S, D]`` before RoPE."""
    keys = rows.slots("keys")
    if ctx.read_rope(layer, rows) is not None:
        return keys
    return turned_back(ctx.rope(layer), keys, rows.slots("positions"))


def turned_back(rope: Rope, keys: Tensor, positions: Tensor) -> Tensor:
    """Keys ``[..., D]`` before RoPE of keys rotated for ``positions [...]``."""
    cos, sin = (table.view(*positions.shape, -1) for table in rope.tables(positions.flatten(), keys.dtype))
    turned = rotate(keys, cos, -sin)
    # LongRoPE scales cos and sin: turning there and back does so twice.
    turned[..., : cos.shape[-1]] /= rope.scaling**2
    return turned


def _queries(ctx: Context, layer: int, rows: BoundedLayer, seen: int | Tensor) -> Tensor:
    """The newest queries ``[B, Q, W, D]``, rotated for the newest ``W`` rows."""
    # The newest W of the buffer [B, Q, recent, D]; the newest is last.
    W = min(rows.recent, rows.layout.valid().shape[-1])
    if not W:
        raise ValueError(f"policy={ctx.policy.name!r}: its score keeps no queries (Score.recent)")
    q = rows.queries[:, :, rows.recent - W :]
    if ctx.ropes is None:
        return q
    rope = ctx.read_rope(layer, rows)
    if rope is None:
        return rotate(q, *ctx.tables.between(ctx.ropes[layer].of_queries, seen - W, W, q))
    rope = rope.of_queries
    if ctx.positions.by_rank:
        cos, sin = rows.layout.per_head_tables(lambda n: ctx.tables.between(rope, n - W, W, q), W)
    else:
        cos, sin = (table[:, :, -W:] for table in _tables(ctx, rope, rows, seen, q))
        if not rows.layout.ragged:  # placed alike in heads of equal length: [B, 1, W, R] for all Q
            cos, sin = cos[:, :1], sin[:, :1]
    if rows.layout.ragged:
        G = q.shape[1] // cos.shape[1]  # [B, H, W, R] -> [B, Q, W, R]
        cos, sin = cos.repeat_interleave(G, 1), sin.repeat_interleave(G, 1)
    return rotate(q, cos, sin)


def score_alike(contexts: Sequence[Context]) -> bool:
    """Whether the new tokens of these texts may be scored in one call, ``shared_scores``."""
    ctx = contexts[0]
    score = ctx.policy.score
    if not (score.per_token or not score.scores_new_tokens):
        return False
    # Equal parts, and the same heads and draws: then one call serves every text.
    mine = score, ctx.settings.seed
    return all(own.heads is ctx.heads and (own.policy.score, own.settings.seed) == mine for own in contexts)


def shared_scores(
    ctx: Context, layer: int, q_BQTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, position_BT: Tensor
) -> Tensor:
    """Entry scores ``[B, H, T]`` of new tokens of several texts, each at its ``position`` in its own. Their contexts
    ``score_alike``, and ``ctx`` is one of them."""
    score, score_BHT = ctx.policy.score, None
    if ctx.spec.windows[layer] is None and score.scores_new_tokens:
        head = ctx.heads[layer] if ctx.heads is not None else None
        linear, places = ctx.backend.linear, position_BT[:, None]
        entry = Entry(layer, 0, q_BQTD, k_BHTD, v_BHTD, head, ctx.settings.seed, linear=linear, places=places)
        score_BHT = score.score_new_tokens(entry)
    return _unscored(k_BHTD) if score_BHT is None else score_BHT


def _unscored(k_BHTD: Tensor) -> Tensor:
    """Scores ``[B, H, T]`` that nobody reads."""
    return torch.zeros((), dtype=torch.float32, device=k_BHTD.device).expand(k_BHTD.shape[:3])


def score_by_logits(
    ctx: Context, layers: Sequence[BoundedLayer], hidden_BTE: Tensor, ids_BT: Tensor | None, before: Tensor | None
) -> Tensor:
    """Set the entry scores of the newest tokens by their probabilities, the same in every layer and head. Returns the final
    hidden state by which the next token is judged; ``before`` is the one for the first of these.

    Raises:
        ValueError: the tokens are not known.
    """
    if ids_BT is None:
        raise ValueError(
            f"policy={ctx.policy.name!r} scores tokens by their probability: give input_ids, not inputs_embeds"
        )
    score_BT, last_hidden = token_entropy(ctx.model, hidden_BTE, ids_BT, before)
    for rows in layers:
        if rows.window is None:
            rows.scores[rows.layout.last(score_BT.shape[1])] = score_BT[:, None]
    return last_hidden


def entry_scores(
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
    ctx.counters.score_s += time.perf_counter() - began
    return _unscored(k) if score_BHT is None else score_BHT
