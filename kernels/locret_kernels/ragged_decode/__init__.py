"""Attention of one new token over heads that hold different numbers of rows, in full or in few bits: the definition, in torch."""

from functools import cache, reduce
from typing import NamedTuple

import torch
from torch import Tensor

from .. import check_some
from ..fused import rotate_rows
from ..quantise import decode, row_numbers, unpack

__all__ = ["ragged_decode"]


@cache
def hadamard(size: int, device: torch.device) -> Tensor:
    """Sylvester's Hadamard matrix of shape ``[size, size]`` (float32), orthonormal and its own inverse.

    If ``size`` is no power of two, blocks of the largest power that divides it stand on the diagonal.
    """
    side = size & -size
    with torch.inference_mode(False):  # the cached matrix may be used where gradients are needed
        one = torch.ones(1, 1, dtype=torch.float32, device="cpu")
        pair = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=one.dtype, device="cpu")
        block = reduce(torch.kron, [pair] * (side.bit_length() - 1), one)
        return torch.kron(torch.eye(size // side, dtype=block.dtype, device="cpu"), block / side**0.5).to(device)


class Spans(NamedTuple):
    """Places of the rows of each head among the ``N`` rows of all heads."""

    starts_BH: Tensor
    """Integer: first row of each head, ``B * H`` heads in all."""
    lengths_BH: Tensor
    """Integer: number of rows of each head; the output of a head without rows is 0."""
    longest: int
    """Bound of the lengths, as a host integer, so that nothing waits for the device."""


class Rotation(NamedTuple):
    """Rotary embedding of the first ``R`` columns of keys (halves convention: both halves of a table are alike); queries come
    rotated."""

    cos_SR: Tensor
    sin_SR: Tensor
    place_N: Tensor | None = None
    """Integer: a row is rotated to its rank within its head, or to this place where it is higher."""

    def check(self, longest: int, D: int) -> None:
        """Raise ValueError unless there are tables for every rank of the longest head, of columns that its rows have."""
        (places, R), alike = self.cos_SR.shape, self.cos_SR.shape == self.sin_SR.shape
        if not alike or R > D or R % 2 or places < longest:
            cos = tuple(self.cos_SR.shape)
            raise ValueError(f"cos {cos} must be [at least {longest}, even and at most {D}], and sin alike")


BLOCK = 32
"""Ranks whose angles are given one by one in ``Angles``."""


class Angles(NamedTuple):
    """Rotary embedding of the first ``2C`` columns (halves convention) of keys to their rank within their head, and of queries,
    which come before it, to that of its newest row. Angles add: cos and sin (float32) of the ranks below ``BLOCK``, then of each
    multiple of it, see ``angle_steps``."""

    keys_X2C: Tensor
    queries_X2C: Tensor

    def check(self, longest: int, D: int) -> None:
        """Raise ValueError unless there are angles for every rank of the longest head, of columns that its rows have."""
        shape, least = tuple(self.keys_X2C.shape), BLOCK - (-longest // BLOCK)
        if shape != self.queries_X2C.shape or shape[0] < least or not 2 <= 2 * shape[2] <= D:
            raise ValueError(f"angles {shape} must be [at least {least}, 2, at most {D // 2}], of queries too")

    def tables(self, q_BQD: Tensor, spans: Spans, dtype: torch.dtype) -> tuple[Tensor, Rotation]:
        """Queries after the rotation, and that of keys by tables, in a type that may be wider."""
        self.check(spans.longest, q_BQD.shape[2])
        rank_S, G = torch.arange(spans.longest, device=q_BQD.device), q_BQD.shape[1] // spans.lengths_BH.shape[1]
        newest_BQ = (spans.lengths_BH.long() - 1).clamp(min=0).repeat_interleave(G, 1)
        q = rotate_rows(q_BQD.to(dtype), *_sums(self.queries_X2C, newest_BQ, dtype))
        return q, Rotation(*_sums(self.keys_X2C, rank_S, dtype))


def angle_steps(inv_freq_C: Tensor, longest: int, scaling: float = 1.0) -> Tensor:
    """cos and sin ``[BLOCK + blocks, 2, C]`` (float32, computed in float64) of the ranks below ``BLOCK``, then of each multiple
    of it below ``longest``, scaled: a rank is turned by the product of two."""
    near, far = (torch.arange(*size, device=inv_freq_C.device) for size in ((BLOCK,), (0, longest, BLOCK)))
    angle = torch.cat((near, far))[:, None].double() * inv_freq_C.double()
    steps = torch.stack((angle.cos(), angle.sin()), 1).float()
    steps[BLOCK:] *= scaling
    return steps


def _sums(steps_X2C: Tensor, rank: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin ``[*rank, 2C]`` of ranks."""
    (c0, s0), (c1, s1) = (steps_X2C[at].to(dtype).unbind(-2) for at in (rank % BLOCK, BLOCK + rank // BLOCK))
    cos, sin = c0 * c1 - s0 * s1, s0 * c1 + c0 * s1
    return torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)


FullRows = tuple[Tensor, Tensor]
"""Keys and values ``[N, D]`` of all heads, one head's rows after another's; a uniform cache is a view of this form."""


class ByteRows(NamedTuple):
    """Keys and values of all heads in 8 bits: ``zero + code * step``, with a step and a zero point of each row for a group of
    channels."""

    key_codes_ND: Tensor
    """uint8, as the values'."""
    value_codes_ND: Tensor
    key_step_NC: Tensor
    """float16, as all steps and zero points."""
    key_zero_NC: Tensor
    value_step_NC: Tensor
    value_zero_NC: Tensor


class PackedRows(NamedTuple):
    """Keys and values of all heads in 4 or 2 bits: ``N`` rows, one head's after another's. The newest rows of a head, its
    tail, are held in full next to the codes.

    A number is ``zero + code * step``; of the codes in a byte the first has the lowest bits. Keys have a step and a zero point
    per channel for a group of rows, values per row for a group of channels (KIVI, arXiv 2402.02750). Values are stored rotated
    (``hadamard``). ``P`` counts the heads of all batches, ``B * H``.
    """

    key_codes_NX: Tensor
    """uint8 ``[N, D * bits / 8]``, as the values'."""
    value_codes_NX: Tensor
    group_N: Tensor
    """Integer: a row's key group, as an index into its head's. Anything for rows of a tail."""
    key_step_PMD: Tensor
    """float16, for the ``M`` groups of each head, as the zero point."""
    key_zero_PMD: Tensor
    value_step_NC: Tensor
    """float16 ``[N, groups of channels]``, as the zero point."""
    value_zero_NC: Tensor
    tail_keys_PRD: Tensor
    """Keys of the tail, in the queries' type like its values; the oldest row first."""
    tail_values_PRD: Tensor
    tail_BH: Tensor
    """Integer: rows of each head that are in its tail, at most its rows and ``R``."""

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return 8 * self.key_codes_NX.shape[1] // self.key_step_PMD.shape[2]


Rows = FullRows | ByteRows | PackedRows
Turn = Rotation | Angles | None


class Decoded(NamedTuple):
    """Attention of one token."""

    out_BQD: Tensor
    received_BHS: Tensor | None
    """Attention (float32 or wider) that each of a head's first ``longest`` rows received, mean over the group, 0 after the
    head's rows; None where it was not wanted."""


def ragged_decode(
    q_BQD: Tensor, rows: Rows, spans: Spans, scaling: float, turn: Turn = None, received: bool = False
) -> Decoded:
    """Attention of one query per head over the rows of its key/value head. Nothing is read back to the host.

    Args:
        turn: rotation of the keys before they are used; by ``Angles`` of the queries too.
        received: whether to return what each row received, too.

    Raises:
        ValueError: ``longest`` below 1.
    """
    starts_BH, lengths_BH, longest = spans
    check_some("longest", longest, "rows")
    dtype = torch.promote_types(q_BQD.dtype, torch.float32)
    (B, Q, _), H = q_BQD.shape, starts_BH.shape[1]
    G, rank_S = Q // H, torch.arange(longest, device=q_BQD.device)
    out = torch.empty_like(q_BQD)
    if isinstance(turn, Angles):
        q_BQD, turn = turn.tables(q_BQD, spans, dtype)
    got = q_BQD.new_empty(B, H, longest, dtype=dtype) if received else None
    for b in range(B):
        for h in range(H):
            there_S = rank_S < lengths_BH[b, h]
            # Some row stands in for those that a head lacks; a head without rows may start after the last one.
            row_S = (starts_BH[b, h] + rank_S.where(there_S, 0)).clamp(max=len(rows[0]) - 1)
            k, v = (x.to(dtype) for x in _read(rows, b * H + h, row_S, there_S))  # [S, D]
            if turn is not None:
                place_S = rank_S if turn.place_N is None else torch.maximum(rank_S, turn.place_N[row_S])
                k = rotate_rows(k, turn.cos_SR[place_S].to(dtype), turn.sin_SR[place_S].to(dtype))
            group = slice(h * G, (h + 1) * G)
            logits_GS = (q_BQD[b, group].to(dtype) @ k.T * scaling).masked_fill(~there_S, float("-inf"))
            weights_GS = logits_GS.softmax(-1).masked_fill(~there_S, 0.0)  # NaN without rows
            v = v.where(there_S[:, None], 0)  # what lies after a head's rows may be anything, and 0 times NaN is NaN
            out[b, group] = (weights_GS @ v).to(out.dtype)
            if got is not None:
                got[b, h] = weights_GS.mean(0)
    return Decoded(out, got)


def _read(rows: Rows, p: int, row_S: Tensor, there_S: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values ``[S, D]`` of some rows of head ``p``, of which it has those that are ``there``."""
    keys, values = rows[0][row_S], rows[1][row_S]
    if isinstance(rows, ByteRows):
        key_step, key_zero, value_step, value_zero = (x[row_S] for x in rows[2:])
        return row_numbers(keys, key_step, key_zero), row_numbers(values, value_step, value_zero)
    if not isinstance(rows, PackedRows):
        return keys, values
    D, rank_S = rows.key_step_PMD.shape[2], torch.arange(len(row_S), device=row_S.device)
    first_of_tail = there_S.sum() - rows.tail_BH.flatten()[p]
    packed_S1 = (there_S & (rank_S < first_of_tail))[:, None]
    group_S = rows.group_N[row_S].long().where(packed_S1[:, 0], 0)
    k = decode(unpack(keys, rows.bits), *(x[p, group_S] for x in (rows.key_step_PMD, rows.key_zero_PMD)))
    v = row_numbers(unpack(values, rows.bits), *(x[row_S] for x in (rows.value_step_NC, rows.value_zero_NC)))
    v = v @ hadamard(D, row_S.device)
    newest_S = (rank_S - first_of_tail).clamp(0, rows.tail_keys_PRD.shape[1] - 1)
    k = torch.where(packed_S1, k, rows.tail_keys_PRD[p, newest_S])
    return k, torch.where(packed_S1, v, rows.tail_values_PRD[p, newest_S])
