"""Decoding attention over flat rows, in full or in few bits: the definitions, in torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..bounds import check_some
from ..spread import hadamard


class PackedRows(NamedTuple):
    """Keys and values of all heads in 4 or 2 bits, flat as ``ragged_decode`` takes them: ``N`` rows, one stretch after
    another. A head's newest rows, its tail, are held as they came beside the codes.

    A number is ``zero + code * step``; of the codes in a byte the first has the lowest bits. Keys have a step and a zero
    point a channel for a group of rows, values have theirs for a group of channels of each row (KIVI, arXiv 2402.02750) and are
    stored rotated (``spread.hadamard``).
    ``P`` is heads of all batches, ``B * H``.
    """

    key_codes_NX: Tensor
    """uint8 ``[N, D * bits / 8]``, and so are the values'."""
    value_codes_NX: Tensor
    group_N: Tensor
    """Integer: a row's key group, counted in its table. Of rows in a tail it may be anything."""
    key_step_TMD: Tensor
    """float16, of the ``M`` groups of each table, and so is the zero point; ``P / T`` heads that follow one another share a
    table."""
    key_zero_TMD: Tensor
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
        return 8 * self.key_codes_NX.shape[1] // self.key_step_TMD.shape[2]


class Decoded(NamedTuple):
    """What one token's attention gives."""

    out_BQD: Tensor
    received_BHS: Tensor | None
    """Attention (float32 or wider) that each of a head's first ``longest`` rows got, mean over the group, 0 behind the
    head's rows; None where it was not wanted."""


def ragged_decode(
    q_BQD: Tensor,
    keys_ND: Tensor,
    values_ND: Tensor,
    starts_BH: Tensor,
    lengths_BH: Tensor,
    scaling: float,
    *,
    longest: int,
    cos_SR: Tensor | None = None,
    sin_SR: Tensor | None = None,
    place_N: Tensor | None = None,
    received: bool = False,
) -> Decoded:
    """Attention of one query a head over the rows ``starts .. starts + lengths`` of its key/value head. Nothing is read back
    to the host.

    Args:
        keys_ND: rows of all heads, one stretch after another; a uniform cache is a view of this form.
        starts_BH: first row and number of rows (integers; at least one row) of each head.
        longest: at least the longest length; host integer, so that nothing waits for the device.
        cos_SR: with ``sin_SR``, the first ``R`` columns of keys are rotated by their rank in the stretch before they are used
            (halves convention); the query comes rotated.
        place_N: integers; a row is rotated by this where it is more than its rank.
        received: return what each row got, too.

    Raises:
        ValueError: ``longest`` below 1.
    """

    def read(p: int, row_S: Tensor, there_S: Tensor) -> tuple[Tensor, Tensor]:
        return keys_ND[row_S], values_ND[row_S]

    return _decode(q_BQD, starts_BH, lengths_BH, read, scaling, longest, cos_SR, sin_SR, place_N, received)


def packed_decode(
    q_BQD: Tensor,
    rows: PackedRows,
    starts_BH: Tensor,
    lengths_BH: Tensor,
    scaling: float,
    *,
    longest: int,
    cos_SR: Tensor | None = None,
    sin_SR: Tensor | None = None,
    place_N: Tensor | None = None,
    received: bool = False,
) -> Decoded:
    """``ragged_decode`` over rows in few bits."""
    channels = q_BQD.shape[2] // rows.value_step_NC.shape[1]
    first_of_tail_P = (lengths_BH - rows.tail_BH).flatten()
    sharing = lengths_BH.numel() // len(rows.key_step_TMD)
    rotation = hadamard(q_BQD.shape[2], q_BQD.device)

    def read(p: int, row_S: Tensor, there_S: Tensor) -> tuple[Tensor, Tensor]:
        rank_S = torch.arange(len(row_S), device=row_S.device)
        packed_S1 = (there_S & (rank_S < first_of_tail_P[p]))[:, None]
        group_S = rows.group_N[row_S].long().where(packed_S1[:, 0], 0)
        step, zero = (x[p // sharing, group_S].float() for x in (rows.key_step_TMD, rows.key_zero_TMD))
        k = zero + _codes(rows.key_codes_NX[row_S], rows.bits) * step
        step, zero = (
            x[row_S].float().repeat_interleave(channels, -1) for x in (rows.value_step_NC, rows.value_zero_NC)
        )
        v = (zero + _codes(rows.value_codes_NX[row_S], rows.bits) * step) @ rotation
        newest_S = (rank_S - first_of_tail_P[p]).clamp(0, rows.tail_keys_PRD.shape[1] - 1)
        return (
            torch.where(packed_S1, k, rows.tail_keys_PRD[p, newest_S]),
            torch.where(packed_S1, v, rows.tail_values_PRD[p, newest_S]),
        )

    return _decode(q_BQD, starts_BH, lengths_BH, read, scaling, longest, cos_SR, sin_SR, place_N, received)


def _codes(packed_NX: Tensor, bits: int) -> Tensor:
    """Codes ``[N, X * 8 / bits]`` of bytes."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed_NX.device)
    return ((packed_NX[..., None] >> shifts) & (2**bits - 1)).flatten(-2)


def _decode(
    q_BQD: Tensor,
    starts_BH: Tensor,
    lengths_BH: Tensor,
    read: Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]],
    scaling: float,
    longest: int,
    cos_SR: Tensor | None,
    sin_SR: Tensor | None,
    place_N: Tensor | None,
    received: bool,
) -> Decoded:
    """Attention over keys and values ``[S, D]`` that ``read(b * H + h, rows, which of them the head has)`` returns."""
    check_some("longest", longest, "rows")
    dtype = torch.promote_types(q_BQD.dtype, torch.float32)
    (B, Q, _), H = q_BQD.shape, starts_BH.shape[1]
    G, rank_S = Q // H, torch.arange(longest, device=q_BQD.device)
    out = torch.empty_like(q_BQD)
    got = q_BQD.new_empty(B, H, longest, dtype=dtype) if received else None
    for b in range(B):
        for h in range(H):
            there_S = rank_S < lengths_BH[b, h]
            row_S = starts_BH[b, h] + rank_S.where(there_S, 0)
            k, v = (x.to(dtype) for x in read(b * H + h, row_S, there_S))
            if cos_SR is not None and sin_SR is not None:
                place_S = rank_S if place_N is None else torch.maximum(rank_S, place_N[row_S])
                k = _turned(k, cos_SR[place_S].to(dtype), sin_SR[place_S].to(dtype))
            group = slice(h * G, (h + 1) * G)
            logits_GS = (q_BQD[b, group].to(dtype) @ k.T * scaling).masked_fill(~there_S, float("-inf"))
            weights_GS = logits_GS.softmax(-1)
            v = v.where(there_S[:, None], 0)  # what lies behind a head's rows may be anything, and 0 times NaN is NaN
            out[b, group] = (weights_GS @ v).to(out.dtype)
            if got is not None:
                got[b, h] = weights_GS.mean(0)
    return Decoded(out, got)


def _turned(x_SD: Tensor, cos_SR: Tensor, sin_SR: Tensor) -> Tensor:
    """Rows whose first ``R`` columns are rotated."""
    R = cos_SR.shape[1]
    part = x_SD[:, :R]
    half = torch.cat((-part[:, R // 2 :], part[:, : R // 2]), -1)
    return torch.cat((part * cos_SR + half * sin_SR, x_SD[:, R:]), -1)
