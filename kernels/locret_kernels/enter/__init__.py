"""Entry of new tokens into the rows of a cache: key, value, position, score and zero statistics. The definition, in torch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import check_some

__all__ = ["enter_rows"]


LARGEST = torch.finfo(torch.float8_e4m3fn).max


class Scales(NamedTuple):
    """Scales ``[H]`` (float32) of keys and of values in 8 bits, and a count of numbers beyond the largest code."""

    keys_H: Tensor
    values_H: Tensor
    clipped_2: Tensor
    """Int64: keys, then values."""


def float8_codes(x_HTD: Tensor, scale_H: Tensor) -> tuple[Tensor, Tensor]:
    """Codes ``[H, T, D]`` (E4M3, as uint8) of numbers over their head's scale, and how many were beyond the largest (int64)."""
    y = x_HTD.float() / scale_H[:, None, None]
    clipped = (y.abs() > LARGEST).sum()
    return y.clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn).view(torch.uint8), clipped


class RowBuffers(NamedTuple):
    """Rows of all heads, end to end; each buffer is contiguous, of the statistics each kind."""

    keys_ND: Tensor
    values_ND: Tensor
    positions_N: Tensor
    scores_N: Tensor
    """Float32, and so are the statistics."""
    stats_XN: Tensor
    scales: Scales | None = None
    """Scales of keys and values that are codes."""


class HeadProduct(NamedTuple):
    """Scores of new tokens by the second product of a retaining head, ``fc2 silu(hidden)``."""

    hidden_BTR: Tensor
    """The first product, before the activation."""
    fc2_HR: Tensor

    def scores(self) -> Tensor:
        """Scores ``[B, H, T]`` (float32), rounded to the type of the products as PyTorch rounds them."""
        return F.linear(F.silu(self.hidden_BTR), self.fc2_HR).transpose(1, 2).float()


Score = Tensor | HeadProduct | None
"""Scores ``[1, H, T]``, the products that make them, or zeros."""


def enter_rows(
    rows: RowBuffers, at: int | Tensor, k_HTD: Tensor, v_HTD: Tensor, seen: int | Tensor, score: Score, *, apart: int = 0
) -> None:  # fmt: skip
    """Write the rows of new tokens, in place.

    Args:
        at: row of the first token in the first head, in the next ones ``apart`` rows on; or each one's ``[H, T]``. Tensors lie
            on the device.
        seen: position of the first token; or each one's ``[T]``.

    Raises:
        ValueError: no tokens.
    """
    H, T, _ = k_HTD.shape
    check_some("k", T, "tokens")
    new_T = torch.arange(T, device=k_HTD.device)
    if isinstance(at, int) or at.dim() < 2:
        at = at + new_T + apart * torch.arange(H, device=k_HTD.device)[:, None]
    new = k_HTD, v_HTD
    if rows.scales is not None:
        new, clipped = zip(*map(float8_codes, new, rows.scales), strict=True)
        rows.scales.clipped_2.add_(torch.stack(clipped))
    rows.keys_ND[at], rows.values_ND[at] = (x.to(rows.keys_ND.dtype) for x in new)
    each = isinstance(seen, Tensor) and seen.dim() > 0
    rows.positions_N[at] = (seen if each else seen + new_T).to(rows.positions_N.dtype)  # type: ignore[union-attr]
    zero = rows.stats_XN.new_zeros(())  # a number of the host would be copied
    given = score.scores() if isinstance(score, HeadProduct) else score
    rows.scores_N[at] = zero if given is None else given[0].to(zero.dtype)
    rows.stats_XN[:, at] = zero
