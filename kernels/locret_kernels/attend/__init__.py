"""Attention of new tokens over the rows of a cache and themselves, with what its weights add up to. The definition, in torch."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..column_stats import ColumnStats, Counts, causal, check_queries

__all__ = ["attend_and_count", "join_parts", "window_attention"]

MAX_WEIGHTS = 1 << 20
"""Attention weights computed at a time where they are counted, about: as many as fit a core's caches."""


class ChunkRotation(NamedTuple):
    """Tables that rotate keys ``[S, R]`` and a chunk's queries ``[T, R]``."""

    cos_SR: Tensor
    sin_SR: Tensor
    q_cos_TR: Tensor
    q_sin_TR: Tensor


def join_parts(a_BQTD: Tensor, lse_a_BQT: Tensor, b_BQTD: Tensor, lse_b_BQT: Tensor) -> tuple[Tensor, Tensor]:
    """Attention ``[B, Q, T, D]`` and log-sum-exp ``[B, Q, T]`` over all rows, joined from those over two parts of
    the rows."""
    share = torch.sigmoid(lse_b_BQT - lse_a_BQT)[..., None]
    out_BQTD = torch.lerp(a_BQTD.to(share.dtype), b_BQTD.to(share.dtype), share).to(a_BQTD.dtype)
    return out_BQTD, torch.logaddexp(lse_a_BQT, lse_b_BQT)


def attend_and_count(
    q_BQTD: Tensor,
    k_BHSD: Tensor,
    v_BHSD: Tensor,
    scaling: float,
    *,
    want: frozenset[str] = frozenset(),
    by_head: bool = False,
    window: int | None = None,
    cap: float | None = None,
    sinks_Q: Tensor | None = None,
) -> tuple[Tensor, list[ColumnStats]]:
    """Attention ``[B, Q, T, D]`` and the statistics of its weights, which are computed once for both; causal as ``column_stats``.
    Values may have other channels than keys.

    Args:
        want: some of ``column_stats.STATISTICS``; without any, no statistics are returned.
        by_head: also of each query head of the groups alone.
        window: rows up to each query's own that it sees.
        cap: scaled logits ``x`` become ``cap * tanh(x / cap)`` (Gemma 2).
        sinks_Q: one more logit for each query head, without a value (gpt-oss): the weights of the rows sum to less than 1.

    Returns:
        Attention; statistics of the mean over each group, then of each of its query heads.
    """
    check_queries(q_BQTD, k_BHSD)
    dtype = torch.promote_types(q_BQTD.dtype, torch.float32)
    G = q_BQTD.shape[1] // k_BHSD.shape[1]
    of_group, of_heads = Counts(k_BHSD, dtype, want), [Counts(k_BHSD, dtype, want) for _ in range(G * by_head)]
    B, Q, T, D = q_BQTD.shape
    H, S = k_BHSD.shape[1:3]
    out_BHGTD = q_BQTD.new_empty(B, H, G, T, v_BHSD.shape[-1])
    tile = max(16, min(T, MAX_WEIGHTS // (Q * S)))
    # Logits and weights of a tile stand where those of the last one stood; not where gradients need them.
    reused = not (torch.is_grad_enabled() and any(x.requires_grad for x in (q_BQTD, k_BHSD, v_BHSD)))
    room = torch.empty(2, Q * tile * S, dtype=dtype, device=q_BQTD.device) if reused else None
    for b in range(B):
        q_HGTD = q_BQTD[b].view(H, G, T, D).to(dtype) * scaling
        k_HDS, v_HSD = k_BHSD[b].to(dtype).transpose(1, 2), v_BHSD[b].to(dtype)
        for start in range(0, T, tile):
            stop = min(start + tile, T)
            n, t = S - T + stop, stop - start
            logits, weights = (None, None) if room is None else (x[: Q * t * n].view(H, G * t, n) for x in room)
            logits = torch.bmm(q_HGTD[:, :, start:stop].reshape(H, -1, D), k_HDS[:, :, :n], out=logits)
            if cap is not None:
                logits = (logits / cap).tanh() * cap
            causal(logits.view(Q, t, n), float("-inf"))
            if window is not None:
                old = torch.ones(t, n, dtype=torch.bool, device=logits.device).tril_(n - t - window)
                logits.view(Q, t, n).masked_fill_(old, float("-inf"))
            if sinks_Q is not None:
                sink_HX1 = sinks_Q.to(dtype).view(H, G, 1).expand(H, G, t).reshape(H, G * t, 1)
                weights = torch.softmax(torch.cat((logits, sink_HX1), -1), -1)[..., :-1]
            else:
                weights = torch.softmax(logits, -1, out=weights)
            out_BHGTD[b, :, :, start:stop] = torch.bmm(weights, v_HSD[:, :n]).view(H, G, t, -1)
            p_HGTN = weights.view(H, G, t, n)
            of_group.add(b, p_HGTN)
            for g, counts in enumerate(of_heads):
                counts.add(b, p_HGTN[:, g : g + 1])
    return out_BHGTD.flatten(1, 2), [counts.stats() for counts in (of_group, *of_heads) if want]


def window_attention(
    q_BQWD: Tensor, k_BHSD: Tensor, scaling: float, *, cap: float | None = None, sinks_Q: Tensor | None = None
) -> Tensor:
    """Attention ``[B, H, S]`` (float32) that the ``W`` newest queries give each slot: sum over queries, mean over the group.

    ``W`` is at most ``S``; the last query sees all slots and each one before it one slot less. ``cap`` and ``sinks_Q`` are as in
    ``attend_and_count``.
    """
    want, narrow = frozenset({"sum"}), k_BHSD[..., :1]  # no values are asked for
    return attend_and_count(q_BQWD, k_BHSD, narrow, scaling, want=want, cap=cap, sinks_Q=sinks_Q)[1][0].sum
