"""Decoding attention over flat rows, in full or in few bits: the definitions, in torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class PackedRows(NamedTuple):
    """Keys and values of all heads in 4 or 2 bits, flat as ``ragged_decode`` takes them: ``N`` rows, one stretch after
    another. A head's newest rows, its tail, are held as they came beside the codes.

    A number is ``zero + code * step``; of the codes in a byte the first has the lowest bits. Keys have a step and a zero
    point a channel for a group of rows, values have theirs for a group of channels of each row (KIVI, arXiv 2402.02750).
    ``P`` is heads of all batches, ``B * H``.
    """

    key_codes_NX: Tensor
    """uint8 ``[N, D * bits / 8]``, and so are the values'."""
    value_codes_NX: Tensor
    group_N: Tensor
    """Integer: a row's key group, counted in its head. Of rows in a tail it may be anything."""
    key_step_PMD: Tensor
    """float16, of the ``M`` groups of each head, and so is the zero point."""
    key_zero_PMD: Tensor
    value_step_NC: Tensor
    """float16 ``[N, groups of channels]``, and so is the zero point."""
    value_zero_NC: Tensor
    tail_keys_PRD: Tensor
    """In the queries' type, and so are the values; the oldest row of the tail first."""
    tail_values_PRD: Tensor
    tail_BH: Tensor
    """Integer: rows of each head that are in its tail, at most its rows and ``R``."""

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return 8 * self.key_codes_NX.shape[1] // self.key_step_PMD.shape[2]


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

    def read(b: int, h: int) -> tuple[Tensor, Tensor]:
        rows = slice(int(starts_BH[b, h]), int(starts_BH[b, h]) + int(lengths_BH[b, h]))
        return keys_ND[rows].float(), values_ND[rows].float()

    return _decode(q_BQD, starts_BH.shape[1], read, scaling, cos_SD, sin_SD)


def packed_decode(
    q_BQD: Tensor,
    rows: PackedRows,
    starts_BH: Tensor,
    lengths_BH: Tensor,
    scaling: float,
    *,
    longest: int,
    cos_SD: Tensor | None = None,
    sin_SD: Tensor | None = None,
) -> Tensor:
    """``ragged_decode`` over rows in few bits."""
    H, D = starts_BH.shape[1], q_BQD.shape[2]

    def read(b: int, h: int) -> tuple[Tensor, Tensor]:
        p, start, tail = b * H + h, int(starts_BH[b, h]), int(rows.tail_BH[b, h])
        packed = slice(start, start + int(lengths_BH[b, h]) - tail)
        group = rows.group_N[packed].long()
        step, zero = (x[p, group].float() for x in (rows.key_step_PMD, rows.key_zero_PMD))
        k = zero + _codes(rows.key_codes_NX[packed], rows.bits) * step
        channels = D // rows.value_step_NC.shape[1]
        step, zero = (
            x[packed].float().repeat_interleave(channels, -1) for x in (rows.value_step_NC, rows.value_zero_NC)
        )
        v = zero + _codes(rows.value_codes_NX[packed], rows.bits) * step
        return torch.cat((k, rows.tail_keys_PRD[p, :tail])), torch.cat((v, rows.tail_values_PRD[p, :tail]))

    return _decode(q_BQD, H, read, scaling, cos_SD, sin_SD)


def _codes(packed_NX: Tensor, bits: int) -> Tensor:
    """Codes ``[N, X * 8 / bits]`` of bytes."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed_NX.device)
    return ((packed_NX[..., None] >> shifts) & (2**bits - 1)).flatten(-2)


def _decode(
    q_BQD: Tensor,
    H: int,
    read: Callable[[int, int], tuple[Tensor, Tensor]],
    scaling: float,
    cos_SD: Tensor | None,
    sin_SD: Tensor | None,
) -> Tensor:
    """Attention over keys and values ``[S, D]`` that ``read(b, h)`` returns in float32."""
    B, Q, D = q_BQD.shape
    out = torch.empty_like(q_BQD)
    for b in range(B):
        for h in range(H):
            k, v = read(b, h)
            if cos_SD is not None and sin_SD is not None:
                half = torch.cat((-k[:, D // 2 :], k[:, : D // 2]), -1)
                k = k * cos_SD[: len(k)].float() + half * sin_SD[: len(k)].float()
            group = slice(h * (Q // H), (h + 1) * (Q // H))
            weights = (q_BQD[b, group].float() @ k.T * scaling).softmax(-1)
            out[b, group] = (weights @ v).to(out.dtype)
    return out
