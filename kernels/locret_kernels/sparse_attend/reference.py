"""Block-sparse attention forward: the definition, in torch. What is not chosen is never computed."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..checks import check_queries, check_units


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
                k_RD, v_RD = (x[b, head * H // Q].index_select(0, there_R) for x in (k_BHSD, v_BHSD))
                see_TR = there_R <= own_T[:, None]
                made_TD = F.scaled_dot_product_attention(
                    *(x.to(dtype)[None, None] for x in (q_TD, k_RD, v_RD)), attn_mask=see_TR, scale=scaling
                )[0, 0]
                # Rows are ascending: a query that does not see the first sees none.
                none_T1 = ~see_TR[:, :1] if len(there_R) else see_TR.new_ones(len(q_TD), 1)
                out[b, head, start : start + queries] = made_TD.masked_fill(none_T1, 0).to(out.dtype)
    return out
