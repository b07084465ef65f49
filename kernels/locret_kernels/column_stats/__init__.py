"""Attention that each slot received, reduced over queries without the attention matrix, and the CIS target, the largest logit or
log-probability that any answer query gives it: the definition, in torch.

A first pass of attention returns the log-sum-exp of every query's row; here ``exp(logit - lse)`` is computed again, a tile of
queries at a time, and reduced over the queries. No more than ``[G, TILE, S]`` weights exist at once.

Source: NaCl, appendix A.7 (two passes); RoCo, appendix A (mean over the query heads of a group); Locret, section 3.3 (target,
``log_prob=False``; the log-probability is this project's).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .. import check_some

__all__ = ["column_max", "column_stats", "window_attention"]

TILE = 64
"""Queries at a time, so that ``[Q, TILE, S]`` logits exist and not all of them."""
STATISTICS = frozenset({"sum", "square", "above"})
MARGIN = 1e-5
"""An attention weight is above average from ``(1 + MARGIN) / n`` on. Equal weights must not count by rounding."""


class ColumnStats(NamedTuple):
    """Each ``[B, H, S]`` in float32; None where it was not wanted. ``a`` is the attention of one query, mean over the group."""

    sum: Tensor | None = None
    """Sum of ``a`` over the queries."""
    square: Tensor | None = None
    """Sum of ``a ** 2``."""
    above: Tensor | None = None
    """Number of queries that gave more than ``1 / n``, ``n`` slots being visible to the query."""


def column_stats(
    q_BQTD: Tensor, k_BHSD: Tensor, scaling: float, lse_BQT: Tensor, *, want: frozenset[str]
) -> ColumnStats:
    """Statistics over the ``T`` queries. The last query sees all ``S`` slots, each earlier one sees one slot less.

    Args:
        q_BQTD: queries and keys as attention saw them (rotated).
        lse_BQT: natural log-sum-exp of each query's scaled logits over the slots it sees.
        want: some of ``STATISTICS``.

    Raises:
        ValueError: a statistic that does not exist; no query, or more queries than slots.
    """
    if unknown := want - STATISTICS:
        raise ValueError(f"want={sorted(unknown)} must be of {sorted(STATISTICS)}")
    check_queries(q_BQTD, k_BHSD)
    dtype = torch.promote_types(q_BQTD.dtype, torch.float32)
    counts = Counts(k_BHSD, dtype, want)
    for b, h, start, logit_GTN in _tiles(q_BQTD, k_BHSD, scaling, dtype):
        G, t, _ = logit_GTN.shape
        lse_GT = lse_BQT[b, h * G : (h + 1) * G, start : start + t].to(dtype)
        counts.add(b, slice(h, h + 1), causal(logit_GTN.sub_(lse_GT[..., None]).exp_(), 0.0)[None])
    return counts.stats()


class Counts:
    """Statistics that grow by tiles of attention weights."""

    def __init__(self, k_BHSD: Tensor, dtype: torch.dtype, want: frozenset[str]) -> None:
        self._out = {name: torch.zeros(k_BHSD.shape[:3], dtype=dtype, device=k_BHSD.device) for name in sorted(want)}
        self._means = want - {"sum"}  # these need the mean over the group before they are reduced

    def add(self, b: int, heads: slice, p_HGTN: Tensor) -> None:
        """Add weights ``[H, G, t, n]`` of some heads over their first ``n`` slots. The last query of the tile sees
        all of them."""
        (_, G, t, n), out = p_HGTN.shape, self._out
        if not out:
            return
        if not self._means:
            out["sum"][b, heads, :n] += p_HGTN.sum((1, 2)) / G
            return
        a_HTN = p_HGTN[:, 0] if G == 1 else p_HGTN.mean(1)
        if "sum" in out:
            out["sum"][b, heads, :n] += a_HTN.sum(1)
        if "above" in out:
            seen_T1 = torch.arange(n - t + 1, n + 1, device=a_HTN.device)[:, None]
            out["above"][b, heads, :n] += (a_HTN > (1 + MARGIN) / seen_T1.float()).sum(1)
        if "square" in out:
            out["square"][b, heads, :n] += a_HTN.square().sum(1)

    def stats(self) -> ColumnStats:
        """Statistics counted so far."""
        return ColumnStats(**{name: value.float() for name, value in self._out.items()})


def window_attention(
    q_BQWD: Tensor, k_BHSD: Tensor, scaling: float, *, cap: float | None = None, sinks_Q: Tensor | None = None
) -> Tensor:
    """Attention ``[B, H, S]`` (float32) that the ``W`` newest queries give each slot: sum over queries, mean over the group.

    ``W`` is at most ``S``; the last query sees all slots and each one before it one slot less. ``cap`` and ``sinks_Q`` are as in
    ``attend.attend_and_count``.
    """
    check_queries(q_BQWD, k_BHSD)
    B, H, S = k_BHSD.shape[:3]
    dtype = torch.promote_types(q_BQWD.dtype, torch.float32)
    out = torch.zeros(B, H, S, dtype=dtype, device=q_BQWD.device)
    for b, h, _, logit_GTN in _tiles(q_BQWD, k_BHSD, scaling, dtype):
        if cap is not None:
            logit_GTN = (logit_GTN / cap).tanh() * cap
        logit_GTN = causal(logit_GTN, float("-inf"))
        if sinks_Q is not None:
            G, t, _ = logit_GTN.shape
            sink_GT1 = sinks_Q[h * G : (h + 1) * G, None, None].to(dtype).expand(G, t, 1)
            logit_GTN = torch.cat((logit_GTN, sink_GT1), -1)
        p_GTN = logit_GTN.softmax(-1)[..., : logit_GTN.shape[-1] - (sinks_Q is not None)]
        out[b, h, : p_GTN.shape[-1]] += p_GTN.sum((0, 1)) / p_GTN.shape[0]
    return out.float()


def column_max(
    q_BQTD: Tensor,
    k_BHSD: Tensor,
    q_pos_T: Tensor,
    scaling: float,
    *,
    log_prob: bool = False,
    cap: float | None = None,
    sinks_Q: Tensor | None = None,
) -> Tensor:
    """Maximum ``[B, H, S]`` (float32) over queries and group of the scaled logit, or with ``log_prob`` of the logit minus the
    log-sum-exp of the query's row. Query ``t`` sees the slots up to ``q_pos_T[t]``; ``-inf`` where none sees a slot.

    Args:
        q_BQTD: queries and keys after RoPE; slot ``s`` is at position ``s``.
        cap, sinks_Q: as of ``attend.attend_and_count``.

    Raises:
        ValueError: no query.
    """
    B, Q, T, D = q_BQTD.shape
    H, S = k_BHSD.shape[1:3]
    check_some("q", T, "answer queries")
    k_BHDS = k_BHSD.float().transpose(-1, -2)
    slots_S = torch.arange(S, device=q_BQTD.device)
    best_BHS = torch.full((B, H, S), float("-inf"), dtype=torch.float32, device=q_BQTD.device)
    for start in range(0, T, TILE):
        part = slice(start, start + TILE)
        q = q_BQTD[:, :, part].float().reshape(B, H, -1, D) * scaling  # [B, H, G * t, D]
        logits = (q @ k_BHDS).view(B, H, Q // H, -1, S)
        if cap is not None:
            logits = (logits / cap).tanh_() * cap
        logits.masked_fill_(slots_S > q_pos_T[part, None], float("-inf"))
        if log_prob:
            lse = logits.logsumexp(-1, keepdim=True)  # [B, H, G, t, 1]
            if sinks_Q is not None:
                lse = torch.logaddexp(lse, sinks_Q.float().view(H, -1, 1, 1))
            logits -= lse.masked_fill_(lse.isneginf(), 0.0)  # a query that sees no slot: -inf - -inf is NaN
        best_BHS = torch.maximum(best_BHS, logits.amax((2, 3)))
    return best_BHS


def _tiles(
    q_BQTD: Tensor, k_BHSD: Tensor, scaling: float, dtype: torch.dtype
) -> Iterator[tuple[int, int, int, Tensor]]:
    """Batch, head, first query and scaled logits ``[G, t, n]`` of a tile over the ``n`` slots that any of its queries sees."""
    B, Q, T, D = q_BQTD.shape
    H, S = k_BHSD.shape[1:3]
    for b in range(B):
        for h in range(H):
            q_GTD = q_BQTD[b, h * (Q // H) : (h + 1) * (Q // H)].to(dtype) * scaling
            k_DS = k_BHSD[b, h].to(dtype).T
            for start in range(0, T, TILE):
                stop = min(start + TILE, T)
                n = S - T + stop
                rows = q_GTD[:, start:stop].reshape(-1, D)
                yield b, h, start, (rows @ k_DS[:, :n]).view(-1, stop - start, n)


def causal(x_GTN: Tensor, hidden: float) -> Tensor:
    """Write ``hidden`` where a query's slot comes after it: the last query sees all ``n`` slots."""
    t, n = x_GTN.shape[1:]
    if t > 1:
        corner = x_GTN[..., n - t :]
        later = torch.ones(t, t, dtype=torch.bool, device=x_GTN.device).triu_(1)
        corner.masked_fill_(later, hidden)
    return x_GTN


def check_queries(q_BQTD: Tensor, k_BHSD: Tensor) -> None:
    """Raise ValueError unless there are queries and each has its own row among the last rows of the keys."""
    T, S = q_BQTD.shape[2], k_BHSD.shape[2]
    if not 1 <= T <= S:
        raise ValueError(
            f"q: {T} queries must be at least 1 and at most the {S} rows of k, of which the last are their own"
        )
