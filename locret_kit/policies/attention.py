"""Attention of the newest queries: ``a`` is that of one query to one slot, the mean over the query heads that share its key
(RoCo, appendix A)."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from ..backbones.handlers import Softmax
from .slots import Slots, wide


def recent_attention(slots: Slots, newest: int, but: int = 0) -> Tensor:
    """``sum of a`` ``[B, H, S]`` over the ``newest`` queries except the last ``but``, each over the slots up to its
    own; zero at padding."""
    return of_recent_queries(slots, newest, slots.attention, slots.keys(), but=but)


def of_recent_queries(
    slots: Slots, newest: int, measure: Callable[..., Tensor], *rows_BHSD: Tensor, but: int = 0
) -> Tensor:
    """``measure`` ``[B, H, S]`` of the ``newest`` queries except the last ``but``; zero at padding and at slots
    newer than those queries.

    Args:
        measure: function of queries ``[B, Q, W, D]``, the rows up to the last query's slot, and the slice of query
            heads.
        rows_BHSD: keys, and values if the measure needs them.
    """
    q_BQWD = slots.queries()
    end = q_BQWD.shape[2] - but

    def measured(q: Tensor, rows: Sequence[Tensor], heads: slice = slice(None)) -> Tensor:
        """``measure`` ``[B, H, S]`` of queries ``[B, Q, W, D]`` and rows ``[B, H, S, D]`` of equal length."""
        S = rows[0].shape[2]
        W = min(newest - but, end, S - but)
        if W < 1:
            return torch.zeros(rows[0].shape[:3], dtype=torch.float32, device=q.device)
        return F.pad(measure(q[:, :, end - W : end], *(x[:, :, : S - but] for x in rows), heads), (0, but))

    if slots.lengths is None:
        return measured(q_BQWD, rows_BHSD)
    _, H, S = slots.positions.shape
    out_BHS = torch.zeros(1, H, S, dtype=torch.float32, device=q_BQWD.device)
    G = q_BQWD.shape[1] // H
    for h, n in enumerate(slots.lengths):
        group = slice(h * G, (h + 1) * G)
        out_BHS[0, h, S - n :] = measured(q_BQWD[:, group], [x[:, h : h + 1, S - n :] for x in rows_BHSD], group)[0, 0]
    return out_BHS


def attention_of_each(q_BQWD: Tensor, k_BHSD: Tensor, softmax: Softmax) -> Tensor:
    """Attention ``[B, H, G, W, S]`` (float32 or wider) of each of the ``W`` newest queries. The last query sees all
    slots, each earlier one a slot less."""
    q_BQWD, k_BHSD = wide(q_BQWD), wide(k_BHSD)
    (B, H, S, _), W = k_BHSD.shape, q_BQWD.shape[2]
    logit_BHGWS = q_BQWD.view(B, H, -1, W, q_BQWD.shape[-1]) @ k_BHSD[:, :, None].mT * softmax.scaling
    if softmax.cap is not None:
        logit_BHGWS = (logit_BHGWS / softmax.cap).tanh() * softmax.cap
    later_WS = torch.ones(W, S, dtype=torch.bool, device=k_BHSD.device).triu_(S - W + 1)
    logit_BHGWS = logit_BHGWS.masked_fill(later_WS, float("-inf"))
    if softmax.sinks_Q is not None:
        sink_HG11 = softmax.sinks_Q.to(logit_BHGWS).view(H, -1, 1, 1)
        logit_BHGWS = torch.cat((logit_BHGWS, sink_HG11.expand(B, -1, -1, W, 1)), -1)
    return logit_BHGWS.softmax(-1)[..., :S]
