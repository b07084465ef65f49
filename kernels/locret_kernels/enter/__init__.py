"""Entry of new tokens into the rows of a cache: key, value, position, score and zero statistics. The definition, in torch."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import check_some
from ..quantise import row_codes

__all__ = ["enter_rows"]


class Levels(NamedTuple):
    """Steps and zero points (float16) of rows in 8 bits, for ``C`` groups of channels (``quantise.row_codes``)."""

    key_step_NC: Tensor
    key_zero_NC: Tensor
    value_step_NC: Tensor
    value_zero_NC: Tensor


class RowBuffers(NamedTuple):
    """Rows of all heads, end to end; each buffer is contiguous, of the statistics each kind."""

    keys_ND: Tensor
    values_ND: Tensor
    positions_N: Tensor
    scores_N: Tensor
    """Float32, and so are the statistics."""
    stats_XN: Tensor
    levels: Levels | None = None
    """Steps and zero points, where keys and values are codes."""


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
    for n, (buffer, x) in enumerate(((rows.keys_ND, k_HTD), (rows.values_ND, v_HTD))):
        if rows.levels is not None:
            step, zero = rows.levels[2 * n : 2 * n + 2]
            x, step[at], zero[at] = row_codes(x, x.shape[-1] // step.shape[1])
        buffer[at] = x.to(buffer.dtype)
    each = isinstance(seen, Tensor) and seen.dim() > 0
    rows.positions_N[at] = (seen if each else seen + new_T).to(rows.positions_N.dtype)  # type: ignore[union-attr]
    zero = rows.stats_XN.new_zeros(())  # a number of the host would be copied
    given = score.scores() if isinstance(score, HeadProduct) else score
    rows.scores_N[at] = zero if given is None else given[0].to(zero.dtype)
    rows.stats_XN[:, at] = zero
