"""Largest logit of each slot over answer queries and group: the definition, in torch.

Source: Locret, section 3.3 (``log_prob=False``); the log-probability is this project's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..checks import check_some

TILE = 64
"""Queries at a time, so that ``[Q, TILE, S]`` logits exist and not all of them."""


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
        cap, sinks_Q: as of ``attend.reference.attend_and_count``.

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
