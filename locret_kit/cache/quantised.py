"""Rows of one layer in 4 or 2 bits: keys by channel, values by token, the newest rows as they came.

Source: KIVI, arXiv 2402.02750. A value row has its own steps and zero points, one for every ``VALUE_GROUP`` channels, and is
quantised once. Keys are quantised by channel over a group of up to ``group`` rows. KIVI's groups are consecutive tokens; an
eviction leaves gaps in them, so here a row carries the number of its group, and the steps and zero points of all groups
(one of each a channel) stand in a table of fixed size. A group that has lost all of its rows is free. Where too few are
free for the rows that are to be quantised, the sparsest groups are quantised again together with them: as few groups as
make room, so full ones never are, and what one eviction requantises is in proportion to what entered since the last.

A row's key is read back within half a step of its group, and every merge of its group with others adds at most half a step
of the new group. A step is at most ``(range + |min| / 500) / (2^bits - 1)`` of the numbers in the group, but for 0.2%.

A chunk that is read in one piece is attended to and evicted from before its survivors are quantised. Where it is read in
several pieces, or the policy reads logits and so evicts after the forward, rows are quantised as they leave the tail, so
pieces change the result by rounding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from locret_kernels.ragged_decode import PackedRows

from ..policies.base import Policy
from .layers import BoundedLayer
from .packing import BITS, decode, encode, levels, pack, unpack

GROUP = 32
"""Rows of a key group."""
RESIDUAL = 32
"""Newest rows that are always held as they came; up to ``group - 1`` more wait for their group to fill."""
VALUE_GROUP = 32
"""Channels of a value row that share a step and a zero point, at most."""
SPARE = 0.5
"""Groups in the table beyond what full groups need, as a fraction: a full table's groups are then two thirds full on average."""


def check_bits(kv_bits: int | None) -> None:
    """Raise ValueError unless ``kv_bits`` is 4, 2 or None."""
    if kv_bits is not None and kv_bits not in BITS:
        raise ValueError(f"kv_bits={kv_bits} must be 4 or 2; without it, keys and values are kept in the model's dtype")


def check_storage(kv_bits: int | None, policy: Policy) -> None:
    """Raise ValueError unless slots that ``policy`` keeps can be stored in ``kv_bits`` bits: heads must hold as many, and a
    slot that was quantised is not written again."""
    check_bits(kv_bits)
    if kv_bits is not None and policy.ragged:
        raise ValueError(f"kv_bits={kv_bits} needs heads of equal budgets; policy={policy.name!r} tells them apart")
    if kv_bits is not None and policy.merge is not None:
        raise ValueError(
            f"kv_bits={kv_bits} stores a slot once; policy={policy.name!r} merges evicted slots into it: leave one out"
        )


class Scratch:
    """Keys and values ``[B, H, rows, D]`` in the model's dtype of the one layer that is read now; all layers share it."""

    def __init__(self) -> None:
        self.owner: QuantisedLayer | None = None
        self.keys = self.values = torch.empty(0)

    def lend(self, layer: QuantisedLayer) -> None:
        """Give the buffers to a layer, made anew where they do not fit it."""
        B, H = layer.positions.shape[:2]
        for name, size in (("keys", layer.key_size), ("values", layer.value_size)):
            old, shape = getattr(self, name), (B, H, layer.capacity, size)
            fits = old.dim() == 4 and old.shape[2] >= layer.capacity and (*old.shape[:2], old.shape[3]) == (B, H, size)
            if not (fits and old.dtype == layer.dtype and old.device == layer.device):
                with torch.inference_mode(False):
                    setattr(self, name, torch.empty(shape, dtype=layer.dtype, device=layer.device))
        self.owner = layer

    @property
    def nbytes(self) -> int:
        """Bytes of both buffers."""
        return int(self.keys.nbytes + self.values.nbytes)


class QuantisedLayer(BoundedLayer):
    """Rows of one layer in ``bits`` bits, as many for every head.

    Between blocks every row but the newest ``tail`` is quantised. In a block all rows are read into the scratch, new ones are
    written behind them, and ``settle`` quantises those that have left the tail. A row of the tail may be quantised already
    (after an eviction among the newest); it keeps its codes. One token goes to the tail alone and its attention reads the
    codes as they are, until the tail is full: once every ``group`` tokens.
    """

    per_row = ("key_codes", "value_codes", "value_step", "value_zero", "group", "positions", "scores")
    key_codes: Tensor
    """``[B, H, capacity, D * bits / 8]`` uint8, and so are the values'."""
    value_codes: Tensor
    value_step: Tensor
    """``[B, H, capacity, groups of channels]`` float16, and so is the zero point."""
    value_zero: Tensor
    group: Tensor
    """``[B, H, capacity]``: a row's key group; -1 where it is not quantised."""
    key_step: Tensor
    """``[B, H, groups, D]`` float16, and so is the zero point."""
    key_zero: Tensor
    tail_keys: Tensor
    """``[B, H, residual + group - 1, D]``: the newest ``tail`` rows, and so are the values."""
    tail_values: Tensor

    def __init__(
        self,
        capacity: int,
        statistics: int = 0,
        recent: int = 0,
        *,
        bits: int,
        scratch: Scratch,
        group: int = GROUP,
        residual: int = RESIDUAL,
        spare: float = SPARE,
    ) -> None:
        super().__init__(capacity, None, statistics, recent)
        self.bits, self.scratch = bits, scratch
        self.group_rows, self.residual, self.spare = group, residual, spare
        self.tail = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        B, H, _, self.key_size = key_states.shape
        self.value_size = value_states.shape[-1]
        self.dtype, self.device = key_states.dtype, key_states.device
        per_byte = 8 // self.bits
        for size in (self.key_size, self.value_size):
            if size % per_byte:
                raise ValueError(f"kv_bits={self.bits} needs a head size that is a multiple of {per_byte}, not {size}")
        self.value_group = max(n for n in range(1, VALUE_GROUP + 1) if self.value_size % n == 0)
        tail = self.residual + self.group_rows - 1

        def rows(dtype: torch.dtype, *size: int) -> Tensor:
            return torch.empty(B, H, *size, dtype=dtype, device=self.device)

        C = self.capacity
        with torch.inference_mode(False):
            self.key_codes = rows(torch.uint8, C, self.key_size // per_byte)
            self.value_codes = rows(torch.uint8, C, self.value_size // per_byte)
            self.value_step = rows(torch.float16, C, self.value_size // self.value_group)
            self.value_zero = torch.empty_like(self.value_step)
            self.group = rows(torch.int16 if self._groups() < 2**15 else torch.int32, C)
            self.positions, self.scores = rows(torch.int32, C), rows(torch.float32, C)
            self.tail_keys = rows(self.dtype, tail, self.key_size)
            self.tail_values = rows(self.dtype, tail, self.value_size)
            self.stats = torch.empty(self.statistics, B, H, C, dtype=torch.float32, device=self.device)
            self.key_step = rows(torch.float16, self._groups(), self.key_size)
            self.key_zero = torch.empty_like(self.key_step)
        self.is_initialized = True

    def _groups(self) -> int:
        """Groups in the table."""
        return -(-int(self.capacity * (1 + self.spare)) // self.group_rows)

    # ---- reading -------------------------------------------------------------------------------------------------

    def slots(self, name: str) -> Tensor:
        if name in ("keys", "values"):
            self._open()
            return getattr(self.scratch, name)[:, :, : self.rows]
        return super().slots(name)

    @property
    def reads_flat(self) -> bool:
        return self.scratch.owner is not self

    def _flat_rows(self) -> PackedRows:
        B, H = self.positions.shape[:2]
        return PackedRows(
            self.key_codes.flatten(0, 2),
            self.value_codes.flatten(0, 2),
            self.group.flatten(),
            self.key_step.flatten(0, 1),
            self.key_zero.flatten(0, 1),
            self.value_step.flatten(0, 2),
            self.value_zero.flatten(0, 2),
            self.tail_keys.flatten(0, 1),
            self.tail_values.flatten(0, 1),
            torch.full((B, H), self.tail, dtype=torch.int32, device=self.device),
        )

    def _open(self) -> None:
        """Read all rows into the scratch, unless they are there."""
        if self.scratch.owner is self:
            return
        self.scratch.lend(self)
        old = self.rows - self.tail
        self.scratch.keys[:, :, :old] = self._read_keys(old)
        self.scratch.values[:, :, :old] = self._read_values(old)
        self.scratch.keys[:, :, old : self.rows] = self.tail_keys[:, :, : self.tail]
        self.scratch.values[:, :, old : self.rows] = self.tail_values[:, :, : self.tail]

    def _read_keys(self, n: int) -> Tensor:
        """The oldest ``n`` keys (float32)."""
        return decode(unpack(self.key_codes[:, :, :n], self.bits), *self._key_levels(self.group[:, :, :n].long()))

    def _key_levels(self, group_BHS: Tensor) -> tuple[Tensor, Tensor]:
        """Step and zero point ``[B, H, S, D]`` of groups."""
        B, H, M, D = self.key_step.shape
        index = group_BHS + M * torch.arange(B * H, device=self.device).view(B, H, 1)
        return F.embedding(index, self.key_step.view(-1, D)), F.embedding(index, self.key_zero.view(-1, D))

    def _read_values(self, n: int) -> Tensor:
        """The oldest ``n`` values (float32)."""
        codes = unpack(self.value_codes[:, :, :n], self.bits).unflatten(-1, (-1, self.value_group))
        return decode(codes, self.value_step[:, :, :n, :, None], self.value_zero[:, :, :n, :, None]).flatten(-2)

    # ---- writing -------------------------------------------------------------------------------------------------

    def _write(self, new: slice | Tensor, k: Tensor, v: Tensor) -> None:
        T = k.shape[2]
        if T == 1 and self.reads_flat and self.tail < self.tail_keys.shape[2]:
            self.tail_keys[:, :, self.tail], self.tail_values[:, :, self.tail] = k[:, :, 0], v[:, :, 0]
        else:
            self._open()
            self.scratch.keys[:, :, new], self.scratch.values[:, :, new] = k, v
        self.group[:, :, new] = -1
        self.tail += T

    def settle(self) -> None:
        if self.scratch.owner is not self:
            return
        ready = max(0, self.tail - self.residual) // self.group_rows * self.group_rows
        if ready:
            self._quantise(ready)
        self.tail -= ready
        newest = slice(self.rows - self.tail, self.rows)
        self.tail_keys[:, :, : self.tail] = self.scratch.keys[:, :, newest]
        self.tail_values[:, :, : self.tail] = self.scratch.values[:, :, newest]
        self.scratch.owner = None

    def _quantise(self, ready: int) -> None:
        """Quantise those of the tail's oldest ``ready`` rows that are not yet."""
        n, first = self.rows, self.rows - self.tail
        group_BHS = self.group[:, :, :n].long()
        leaving_BHS = group_BHS < 0
        leaving_BHS[:, :, first + ready :] = False
        self._store_values(slice(first, first + ready), leaving_BHS[:, :, first : first + ready])
        target_BHS, made_BHM = regroup(group_BHS, leaving_BHS, self.key_step.shape[2], self.group_rows)
        self._store_keys(target_BHS, made_BHM)

    def _store_values(self, rows: slice, leaving_BHR: Tensor) -> None:
        x = self.scratch.values[:, :, rows].float().unflatten(-1, (-1, self.value_group))
        step, zero = levels(x.amin(-1), x.amax(-1), self.bits)
        codes = pack(encode(x, step[..., None], zero[..., None], self.bits).flatten(-2), self.bits)
        for name, new in (("value_codes", codes), ("value_step", step), ("value_zero", zero)):
            held = getattr(self, name)[:, :, rows]
            held.copy_(torch.where(leaving_BHR[..., None], new, held))

    def _store_keys(self, target_BHS: Tensor, made_BHM: Tensor) -> None:
        """Quantise the rows whose target is a group, by the limits of all rows that have the same target."""
        B, H, n = target_BHS.shape
        chosen_BHS = target_BHS >= 0
        M, x = made_BHM.shape[-1], self.scratch.keys[:, :, :n].float()
        index = _over(target_BHS.masked_fill(~chosen_BHS, M), self.key_size)
        lo, hi = (
            x.new_zeros(B, H, M + 1, self.key_size).scatter_reduce_(2, index, x, how, include_self=False)[:, :, :M]
            for how in ("amin", "amax")
        )
        for held, new in zip((self.key_step, self.key_zero), levels(lo, hi, self.bits), strict=True):
            held.copy_(torch.where(made_BHM[..., None], new, held))
        codes = pack(encode(x, *self._key_levels(target_BHS.clamp(min=0)), self.bits), self.bits)
        held = self.key_codes[:, :, :n]
        held.copy_(torch.where(chosen_BHS[..., None], codes, held))
        numbers = self.group[:, :, :n]
        numbers.copy_(torch.where(chosen_BHS, target_BHS, numbers))

    # ---- eviction and the rest -----------------------------------------------------------------------------------

    def keep(self, stay_BHS: Tensor, mean: int) -> None:
        self._open()
        super().keep(stay_BHS, mean)
        self.tail = min(self.tail, mean)
        self.settle()

    def _moving(self) -> list[Tensor]:
        return [*super()._moving(), self.scratch.keys, self.scratch.values]

    def grow(self, rows: int) -> None:
        self.scratch.owner = None
        super().grow(rows)
        for name in ("key_step", "key_zero"):
            old = getattr(self, name)
            with torch.inference_mode(False):
                new = old.new_empty(*old.shape[:2], self._groups(), self.key_size)
            new[:, :, : old.shape[2]] = old
            setattr(self, name, new)

    def reset(self) -> None:
        super().reset()
        self.tail, self.scratch.owner = 0, None

    def take(self, other: Any) -> None:
        scratch = self.scratch
        super().take(other)
        self.scratch = scratch

    def _reorder_rest(self, beam_idx: Tensor) -> None:
        super()._reorder_rest(beam_idx)
        for name in ("key_step", "key_zero", "tail_keys", "tail_values"):
            setattr(self, name, getattr(self, name).index_select(0, beam_idx))
        self.scratch.owner = None


def regroup(group_BHS: Tensor, leaving_BHS: Tensor, groups: int, size: int) -> tuple[Tensor, Tensor]:
    """Where rows go that must be quantised: ``(target [B, H, S], made [B, H, groups])``.

    Every head takes the fewest of its sparsest groups (free ones first) that together have room for their own rows and for
    those that leave the tail, and fills them anew in the order of the rows. ``target`` is a row's new group, -1 where it
    stays as it is; ``made`` says which groups are taken. A head in which no row leaves takes none.

    Args:
        group_BHS: int64, the group of each row, -1 where it is not quantised.
        leaving_BHS: bool, the rows to quantise, none of which has a group.
        groups: groups of a head; ``groups * size`` is at least the rows with a group and those that leave.
        size: rows of a full group.
    """
    held_BHS = group_BHS >= 0
    rows_BHM = torch.zeros(*group_BHS.shape[:2], groups, dtype=torch.int64, device=group_BHS.device)
    rows_BHM.scatter_add_(2, group_BHS.clamp(min=0), held_BHS.long())
    order_BHM = rows_BHM.argsort(dim=-1, stable=True)
    number_M = torch.arange(groups, device=group_BHS.device)
    entering_BH1 = leaving_BHS.sum(-1, keepdim=True)
    room_BHM = (number_M + 1) * size - rows_BHM.gather(-1, order_BHM).cumsum(-1)
    taken_BH1 = (room_BHM < entering_BH1).sum(-1, keepdim=True) + 1
    made_BHM = torch.zeros_like(rows_BHM, dtype=torch.bool)
    made_BHM.scatter_(2, order_BHM, (number_M < taken_BH1) & (entering_BH1 > 0))
    chosen_BHS = leaving_BHS | (held_BHS & made_BHM.gather(2, group_BHS.clamp(min=0)))
    rank_BHS = (chosen_BHS.cumsum(-1) - 1).clamp(min=0)
    target_BHS = order_BHM.gather(2, (rank_BHS // size).clamp(max=groups - 1))
    return target_BHS.masked_fill(~chosen_BHS, -1), made_BHM


def _over(index_BHS: Tensor, size: int) -> Tensor:
    """An index of rows, spread over their last axis."""
    return index_BHS[..., None].expand(-1, -1, -1, size)
