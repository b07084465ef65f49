"""Attention that each slot received, reduced over queries without the attention matrix, and the CIS target, the largest logit or
log-probability that any answer query gives it: the definition, in torch.

A first pass of attention returns the log-sum-exp of every query's row; here ``exp(logit - lse)`` is computed again, a tile of
queries at a time, and reduced over the queries. No more than ``[G, TILE, S]`` weights exist at once.

Source: NaCl, appendix A.7 (two passes); RoCo, appendix A (mean over the query heads of a group); Locret, section 3.3 (target,
``log_prob=False``; the log-probability is this project's).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .. import check_some

__all__ = ["column_max", "column_stats"]

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
    check_statistics(q_BQTD, k_BHSD, want)
    dtype = torch.promote_types(q_BQTD.dtype, torch.float32)
    counts, (T, S), H = Counts(k_BHSD, dtype, want), (q_BQTD.shape[2], k_BHSD.shape[2]), k_BHSD.shape[1]
    for b, (q_QTD, k_HSD) in enumerate(zip(q_BQTD.to(dtype) * scaling, k_BHSD.to(dtype), strict=True)):
        for start in range(0, T, TILE):
            part, n = slice(start, start + TILE), min(S, S - T + start + TILE)
            logit_HGTN = q_QTD[:, part].unflatten(0, (H, -1)) @ k_HSD[:, None, :n].mT
            lse_HGT = lse_BQT[b, :, part].to(dtype).unflatten(0, (H, -1))
            counts.add(b, causal(logit_HGTN.sub_(lse_HGT[..., None]).exp_(), 0.0))
    return counts.stats()


class Counts:
    """Statistics that grow by tiles of attention weights."""

    def __init__(self, k_BHSD: Tensor, dtype: torch.dtype, want: frozenset[str]) -> None:
        self._out = {name: torch.zeros(k_BHSD.shape[:3], dtype=dtype, device=k_BHSD.device) for name in sorted(want)}
        self._means = want - {"sum"}  # these need the mean over the group before they are reduced

    def add(self, b: int, p_HGTN: Tensor) -> None:
        """Add weights ``[H, G, t, n]`` of a text over the first ``n`` slots. The last query of the tile sees all of
        them."""
        (_, G, t, n), out = p_HGTN.shape, self._out
        if not out:
            return
        if not self._means:
            out["sum"][b, :, :n] += p_HGTN.sum((1, 2)) / G
            return
        a_HTN = p_HGTN[:, 0] if G == 1 else p_HGTN.mean(1)
        if "sum" in out:
            out["sum"][b, :, :n] += a_HTN.sum(1)
        if "above" in out:
            seen_T1 = torch.arange(n - t + 1, n + 1, device=a_HTN.device)[:, None]
            out["above"][b, :, :n] += (a_HTN > (1 + MARGIN) / seen_T1.float()).sum(1)
        if "square" in out:
            out["square"][b, :, :n] += a_HTN.square().sum(1)

    def stats(self) -> ColumnStats:
        """Statistics counted so far."""
        return ColumnStats(**{name: value.float() for name, value in self._out.items()})


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
        cap, sinks_Q: see ``attend.attend_and_count``.

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


def causal(x: Tensor, hidden: float) -> Tensor:
    """Write ``hidden`` into ``x [..., t, n]`` where a query's slot comes after it: the last query sees all ``n`` slots."""
    t, n = x.shape[-2:]
    if t > 1:
        x[..., n - t :].masked_fill_(torch.ones(t, t, dtype=torch.bool, device=x.device).triu_(1), hidden)
    return x


def check_statistics(q_BQTD: Tensor, k_BHSD: Tensor, want: frozenset[str]) -> None:
    """Raise ValueError for statistics that do not exist, or what ``check_queries`` refuses."""
    if unknown := want - STATISTICS:
        raise ValueError(f"want={sorted(unknown)} must be of {sorted(STATISTICS)}")
    check_queries(q_BQTD, k_BHSD)


def check_queries(q_BQTD: Tensor, k_BHSD: Tensor) -> None:
    """Raise ValueError unless there are queries and each has its own row among the last rows of the keys."""
    T, S = q_BQTD.shape[2], k_BHSD.shape[2]
    if not 1 <= T <= S:
        most = f"at most the {S} rows of k, of which the last are their own"
        raise ValueError(f"q: {T} queries must be at least 1 and {most}")
