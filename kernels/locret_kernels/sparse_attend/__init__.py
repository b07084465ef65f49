"""Attention of blocks of new tokens, each over chosen rows of a cache alone: the definition, in torch. Other rows
are never computed."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..column_stats import check_queries

__all__ = ["sparse_attend"]


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
