"""Attention forward with the log-sum-exp of every query: the definition, in torch.

``column_stats`` starts from that log-sum-exp, so it needs no pass over the rows of its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..checks import check_queries


def attend(q_BQTD: Tensor, k_BHSD: Tensor, v_BHSD: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """Output ``[B, Q, T, D]`` in the queries' type, and natural log-sum-exp ``[B, Q, T]`` (float32 or wider) of each query's
    scaled logits over the rows it sees. The last query sees all ``S`` rows, each one before it one row less.

    Raises:
        ValueError: no query, or more queries than rows, so that the first would see none.
    """
    check_queries(q_BQTD, k_BHSD)
    B, Q, T = q_BQTD.shape[:3]
    H, S = k_BHSD.shape[1:3]
    dtype = torch.promote_types(q_BQTD.dtype, torch.float32)
    out = torch.empty_like(q_BQTD)
    lse = torch.empty(B, Q, T, dtype=dtype, device=q_BQTD.device)
    hidden = torch.ones(T, S, dtype=torch.bool, device=q_BQTD.device).triu_(S - T + 1)
    for b in range(B):
        for head in range(Q):  # one query head at a time, so that one matrix [T, S] exists
            k, v = (x[b, head * H // Q].to(dtype) for x in (k_BHSD, v_BHSD))  # [S, D]
            logits = (q_BQTD[b, head].to(dtype) @ k.T * scaling).masked_fill_(hidden, float("-inf"))  # [T, S]
            lse[b, head] = logits.logsumexp(-1)
            out[b, head] = (logits.sub_(lse[b, head, :, None]).exp_() @ v).to(out.dtype)
    return out, lse
