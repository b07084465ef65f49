"""Decoding attention over flat rows: the definition, in torch."""

from __future__ import annotations

import torch
from torch import Tensor


def ragged_decode(
    q_BQD: Tensor,
    keys_ND: Tensor,
    values_ND: Tensor,
    starts_BH: Tensor,
    lengths_BH: Tensor,
    scaling: float,
    *,
    longest: int,
    cos_SD: Tensor | None = None,
    sin_SD: Tensor | None = None,
) -> Tensor:
    """Attention output ``[B, Q, D]`` of one query a head over the rows ``starts .. starts + lengths`` of its key/value head.

    Args:
        keys_ND: rows of all heads, one stretch after another; a uniform cache is a view of this form.
        starts_BH: first row and number of rows (integers; at least one row) of each head.
        longest: at least the longest length; host integer, so that nothing waits for the device.
        cos_SD: with ``sin_SD``, keys are rotated by their rank in the stretch before they are used (halves convention,
            whole head); the query comes rotated.
    """
    B, Q, D = q_BQD.shape
    H = starts_BH.shape[1]
    out = torch.empty_like(q_BQD)
    for b in range(B):
        for h in range(H):
            start, rows = int(starts_BH[b, h]), int(lengths_BH[b, h])
            k, v = (x[start : start + rows].float() for x in (keys_ND, values_ND))
            if cos_SD is not None and sin_SD is not None:
                half = torch.cat((-k[:, D // 2 :], k[:, : D // 2]), -1)
                k = k * cos_SD[:rows].float() + half * sin_SD[:rows].float()
            group = slice(h * (Q // H), (h + 1) * (Q // H))
            weights = (q_BQD[b, group].float() @ k.T * scaling).softmax(-1)
            out[b, group] = (weights @ v).to(out.dtype)
    return out
