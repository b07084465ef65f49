"""Attention of new tokens over the rows of a cache and themselves, with what its weights add up to: the definitions, in torch.

Attention that each slot received is reduced over queries without the attention matrix. So is the CIS target, the largest logit or
log-probability that any answer query gives it. A first pass of attention returns the log-sum-exp of every query's row; here
``exp(logit - lse)`` is computed again, a tile of queries at a time, and reduced over the queries. No more than ``[G, TILE, S]``
weights exist at once.

Source: NaCl, appendix A.7 (two passes); RoCo, appendix A (mean over the query heads of a group); Locret, section 3.3 (target,
``log_prob=False``; the log-probability is this project's).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .. import check_some

__all__ = ["attend_and_count", "column_max", "column_stats", "join_parts", "sparse_attend", "window_attention"]

# ---- sums of attention over queries ---------------------------------------------------------------------------------

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


# ---- attention ------------------------------------------------------------------------------------------------------

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
        want: some of ``STATISTICS``; without any, no statistics are returned.
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


# ---- attention of blocks of new tokens, each over chosen rows alone: other rows are never computed ------------------


class Blocks(NamedTuple):
    """Rows that blocks of queries attend to: ``queries`` in each of the ``N`` blocks, ``unit`` rows in each of the ``U`` units;
    the last block and the last unit may have fewer."""

    seen_BQNU: Tensor
    """bool: whether a block of a query head attends to a unit of the rows. Rows after a query are hidden from it."""
    queries: int
    unit: int


def sparse_attend(q_BQTD: Tensor, k_BHSD: Tensor, v_BHSD: Tensor, scaling: float, blocks: Blocks) -> Tensor:
    """Output ``[B, Q, T, D]`` in the queries' type, where the last ``T`` of the ``S`` rows are the queries' own. A query that
    sees none of its block's rows gets 0.

    Raises:
        ValueError: no query, more queries than rows, or blocks and units of other numbers.
    """
    check_queries(q_BQTD, k_BHSD)
    check_units(q_BQTD, k_BHSD, *blocks)
    (B, Q, T, _), (H, S) = q_BQTD.shape, k_BHSD.shape[1:3]
    seen_BQNU, queries, unit = blocks
    dtype = torch.promote_types(q_BQTD.dtype, torch.float32)
    out = q_BQTD.new_empty(B, Q, T, v_BHSD.shape[-1])
    row_S = torch.arange(S, device=q_BQTD.device)
    for b in range(B):
        for head in range(Q):
            seen_NS = seen_BQNU[b, head].repeat_interleave(unit, -1)[:, :S]
            for block, start in enumerate(range(0, T, queries)):
                q_TD = q_BQTD[b, head, start : start + queries]
                own_T = row_S[S - T + start :][: len(q_TD)]  # the queries' own rows
                there_R = seen_NS[block, : S - T + start + len(q_TD)].nonzero().flatten()
                if not len(there_R):
                    out[b, head, start : start + queries] = 0
                    continue
                k_RD, v_RD = (x[b, head * H // Q].index_select(0, there_R).to(dtype) for x in (k_BHSD, v_BHSD))
                logits = (q_TD.to(dtype) * scaling) @ k_RD.T  # [T, R]
                # Rows are ascending: all queries see those before the block's first query.
                late = int((there_R < own_T[0]).sum())
                logits[:, late:].masked_fill_(there_R[late:] > own_T[:, None], float("-inf"))
                # In place; where a query sees nothing its largest logit is -inf, and all its weights are 0.
                top_T1 = logits.amax(-1, keepdim=True).clamp(min=torch.finfo(dtype).min)
                weights_TR = logits.sub_(top_T1).exp_()
                total_T1 = weights_TR.sum(-1, keepdim=True).clamp(min=torch.finfo(dtype).tiny)
                out[b, head, start : start + queries] = ((weights_TR @ v_RD) / total_T1).to(out.dtype)
    return out


def check_units(q_BQTD: Tensor, k_BHSD: Tensor, seen_BQNU: Tensor, queries: int, unit: int) -> None:
    """Raise ValueError unless the blocks are those of the queries, and the units those of the rows."""
    if queries < 1 or unit < 1:
        raise ValueError(f"blocks: queries={queries} and unit={unit} must be at least 1")
    (B, Q, T), S, seen = q_BQTD.shape[:3], k_BHSD.shape[2], list(seen_BQNU.shape)
    wanted = [B, Q, -(-T // queries), -(-S // unit)]
    if seen != wanted:
        raise ValueError(f"blocks: seen {seen} must be {wanted}: {T} queries by {queries}, {S} rows by {unit}")
