"""Keys and values of rows as integers: in 8 bits each row by itself; in 4 or 2 bits keys by channel, values by token, the newest
rows as they came.

**8 bits**: a row has its own steps and zero points, one for every 32 channels, is quantised as it enters and never again, and
moves as it is. A number is read back within half a step.

**4 and 2 bits**. Source: KIVI, arXiv 2402.02750. A value row is quantised like one in 8 bits,
but rotated by a Hadamard matrix before (QuaRot, arXiv 2404.00456), so that one large channel does not coarsen the steps of its
group. Keys are quantised by channel over a group of up to ``group`` rows. KIVI's groups are
consecutive tokens, but an eviction leaves gaps in them. So here a row carries the number of its group, and the steps and zero
points of all groups (one of each a channel) stand in a table of fixed size (see ``key_groups``). Any row may be in any group.
Rows that are quantised together are grouped with rows like them, which makes the steps smaller. The few that are like
none go in pairs, which keep them whole. A group that has lost all of its rows is free. Where too few are free for the new
rows, the sparsest groups are quantised again together with them. These are as few groups as make room, so full ones
never are. What one eviction requantises is in proportion to what entered since the last.

A row's key is read back within half a step of its group, and every merge of its group with others adds at most half a step
of the new group. A number of a rotated value row is read back within half a step. Rotating back leaves the length of the row's
error unchanged, at most the root of the sum of its squared half steps. A step is at most
``(range + |min| / 500) / (2^bits - 1)`` of the numbers in the group, but for 0.2%.

A chunk that is read in one piece is attended to and evicted from before its survivors are quantised. Where it is read in
several pieces, or the policy reads logits and so evicts after the forward, rows are quantised as they leave the tail, so
pieces change the result by rounding.
"""

from bisect import bisect_left
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from locret_kernels import cpp
from locret_kernels import quantise as quantiser
from locret_kernels.quantise import decode, encode, levels, pack, row_codes, row_numbers, shared_channels, unpack
from locret_kernels.ragged_decode import ByteRows, PackedRows, hadamard

from ...settings import INT32_MAX
from .codec import BITS, CODECS, Codec, Column, Scratch
from .key_groups import GROUP, SPARE, pairs_of, regroup, table_size
from .layouts import ALL, Index, Layout, Shapes

# ---- 8 bits ---------------------------------------------------------------------------------------------------------


PARTS = ("codes", "step", "zero")


class RowBits(Codec):
    """Keys and values in 8 bits, each row by itself. One token's attention reads the codes as they lie, a chunk's all rows in
    the model's dtype, its own too as they are stored."""

    key_codes: Tensor
    """``[H, capacity, D]`` uint8, and so are the values'."""
    value_codes: Tensor
    key_step: Tensor
    """``[H, capacity, groups of channels]`` float16, and so are the zero point and those of values."""
    key_zero: Tensor
    value_step: Tensor
    value_zero: Tensor

    def columns(self) -> dict[str, Column]:
        made: dict[str, Column] = {}
        for name, size in (("key", self.key_size), ("value", self.value_size)):
            shape = (size // shared_channels(size),)
            made[f"{name}_codes"] = torch.uint8, (size,)
            made |= {f"{name}_{level}": (torch.float16, shape) for level in ("step", "zero")}
        return made

    def write(self, at: Index, k_HTD: Tensor, v_HTD: Tensor) -> None:
        for name, x in (("key", k_HTD), ("value", v_HTD)):
            for part, new in zip(PARTS, row_codes(x, shared_channels(x.shape[-1])), strict=True):
                getattr(self, f"{name}_{part}")[at] = new

    def read(self, name: str, at: Index) -> Tensor:
        return row_numbers(*(getattr(self, f"{name[:-1]}_{part}")[at] for part in PARTS)).to(self.dtype)

    def flat(self) -> ByteRows:
        return ByteRows(*(getattr(self, name.rpartition("_")[0]).flatten(0, -2) for name in ByteRows._fields))


# ---- 4 and 2 bits ---------------------------------------------------------------------------------------------------


TAILS = ("tail_keys", "tail_values")
LEVELS = ("key_step", "key_zero")
RESIDUAL = 32
"""Newest rows that are always held as they came; up to ``group - 1`` more wait for their group to fill."""


class GroupedBits(Codec):
    """Keys and values in ``bits`` bits, of heads of equal length.

    Between blocks every row but the newest ``tail`` of each head is quantised. In a block all rows are read into the scratch,
    new ones are written after them, and ``finish_block`` quantises those that have left the tail. A row of the tail may be
    quantised already (after an eviction among the newest); it keeps its codes. One token goes to the tail alone and its
    attention reads the codes as they are, until the tail is full: once every ``group`` tokens.
    """

    COUNTS = ("tail",)
    takes_back = False
    packed = True
    key_codes: Tensor
    """``[H, capacity, D * bits / 8]`` uint8, and so are the values'."""
    value_codes: Tensor
    value_step: Tensor
    """``[H, capacity, groups of channels]`` float16, and so is the zero point."""
    value_zero: Tensor
    group: Tensor
    """A row's key group; -1 where it is not quantised."""
    key_step: Tensor
    """``[H, groups, D]`` float16, and so is the zero point."""
    key_zero: Tensor
    tail_keys: Tensor
    """``[H, residual + group, D]``: the newest ``tail`` rows as they came, and so are the values. The last row is for the token
    that fills a group."""
    tail_values: Tensor

    def __init__(
        self, bits: int, scratch: Scratch, *, group: int = GROUP, residual: int = RESIDUAL, spare: float = SPARE
    ) -> None:
        self.bits, self.scratch = bits, scratch
        self.group_rows, self.residual, self.spare = group, residual, spare
        self.tail = 0

    def measure(self, layout: Layout, key_size: int, value_size: int, dtype: torch.dtype) -> None:
        super().measure(layout, key_size, value_size, dtype)
        for size in (key_size, value_size):
            if size * self.bits % 8:  # codes must fill whole bytes
                raise ValueError(
                    f"kv_bits={self.bits} needs a head size that is a multiple of {8 // self.bits}, not {size}"
                )
        self.value_group = shared_channels(value_size)

    def columns(self) -> dict[str, Column]:
        # Packed codes, and for values one step and one zero point per group of channels.
        per_byte, levels = 8 // self.bits, (torch.float16, (self.value_size // self.value_group,))
        return {
            "key_codes": (torch.uint8, (self.key_size // per_byte,)),
            "value_codes": (torch.uint8, (self.value_size // per_byte,)),
            "value_step": levels,
            "value_zero": levels,
            "group": (torch.int16 if self._groups() < 2**15 else torch.int32, ()),
        }

    def tables(self) -> Shapes:
        return self._tables(self.max_tail + 1)

    def _tables(self, tail: int) -> Shapes:
        # Per key group, not per row: one step and one zero point per channel.
        levels: Shapes = dict.fromkeys(LEVELS, (torch.float16, (self.layout.H, self._groups(), self.key_size)))
        return levels | {
            "tail_keys": (self.dtype, (self.layout.H, tail, self.key_size)),
            "tail_values": (self.dtype, (self.layout.H, tail, self.value_size)),
        }

    @property
    def max_tail(self) -> int:
        """Rows that the tail has between blocks, at most."""
        return self.residual + self.group_rows - 1

    def _groups(self, rows: int | None = None) -> int:
        """Key groups of a head with room for ``rows`` rows; by default for those of the layout."""
        return table_size(self.layout.capacity if rows is None else rows, self.spare, self.group_rows)

    # ---- reading -------------------------------------------------------------------------------------------------

    @property
    def open(self) -> bool:
        return self.scratch.owner is self

    def read(self, name: str, at: Index) -> Tensor:
        """``keys`` or ``values`` of rows, of the index's shape, unpacked to the scratch first."""
        self.read_all()
        return getattr(self.scratch, name)[at]

    def flat(self) -> PackedRows:
        return PackedRows(
            self.key_codes.flatten(0, -2),
            self.value_codes.flatten(0, -2),
            self.group.flatten(),
            self.key_step,
            self.key_zero,
            self.value_step.flatten(0, -2),
            self.value_zero.flatten(0, -2),
            self.tail_keys,
            self.tail_values,
            torch.full((1, self.layout.H), self.tail, dtype=torch.int32, device=self.layout.device),
        )

    def read_all(self, *, values: bool = True) -> None:
        """Read all rows into the scratch, unless they are there. To quantise, the tail's ``values`` are enough."""
        scratch, was_open = self.scratch, self.open
        if was_open and (scratch.complete or not values):
            return
        rows, newest = self.layout.every(), self.layout.last(self.tail)
        # All rows from their codes first, then the tail's over them: rows of the tail have no codes, or keep exact ones.
        if not was_open:
            scratch.acquire(self)
            scratch.keys[rows] = self._read_keys(rows)
            scratch.keys[newest] = self.tail_keys[:, : self.tail]
        tail = scratch.values[newest].clone() if was_open else self.tail_values[:, : self.tail]
        if values:
            scratch.values[rows] = self._read_values(rows)
        scratch.values[newest] = tail
        scratch.complete = values

    def _read_keys(self, at: Index) -> Tensor:
        """Keys of rows ``[H, S]``; anything where a row is not quantised."""
        codes = unpack(self.key_codes[at], self.bits)  # [H, S, D]
        return decode(codes, *self._key_levels(self.group[at].long().clamp(min=0))).to(self.dtype)

    def _key_levels(self, group_HS: Tensor) -> tuple[Tensor, Tensor]:
        """Step and zero point ``[H, S, D]`` of groups."""
        # Tables end to end [H * M, D]: group m of head h is row h * M + m.
        H, M, D = self.key_step.shape
        index = group_HS + M * torch.arange(H, device=self.layout.device)[:, None]
        return F.embedding(index, self.key_step.view(-1, D)), F.embedding(index, self.key_zero.view(-1, D))

    def _read_values(self, at: Index) -> Tensor:
        """Values ``[..., D]`` of rows, of the index's shape; anything where a row is not quantised."""
        x = row_numbers(unpack(self.value_codes[at], self.bits), self.value_step[at], self.value_zero[at])
        return (x @ hadamard(self.value_size, x.device)).to(self.dtype)  # orthogonal and symmetric: its own inverse

    # ---- writing -------------------------------------------------------------------------------------------------

    def write(self, at: Index, k_HTD: Tensor, v_HTD: Tensor) -> None:
        T = k_HTD.shape[1]
        # One token while no row is open: it joins the tail, and attention reads codes; otherwise all goes to the scratch.
        if T == 1 and self.tail < self.max_tail and not self.open:
            self.tail_keys[:, self.tail], self.tail_values[:, self.tail] = k_HTD[:, 0], v_HTD[:, 0]
        else:
            self.read_all()
            self.scratch.keys[at], self.scratch.values[at] = k_HTD, v_HTD
        self.group[at] = self.group.new_full((), -1)
        self.tail += T

    def count(self) -> None:
        """Count a token that a compiled call has written to the tail. One that fills a group goes to its row, which is not
        counted yet, and ``finish_block`` quantises the group."""
        if self.tail == self.max_tail:
            self.read_all(values=False)
            new, own = self.layout.following(1), slice(self.tail, self.tail + 1)
            self.scratch.keys[new], self.scratch.values[new] = self.tail_keys[:, own], self.tail_values[:, own]
            self.group[new] = self.group.new_full((), -1)
        self.tail += 1

    def finish_block(self) -> None:
        # Nothing was read into the scratch, so no row has left the tail.
        if not self.open:
            return
        self.tail = min(self.tail, self.layout.rows)  # an eviction may have left fewer
        # Whole groups leave the tail, and `residual` rows stay in it.
        ready = max(0, self.tail - self.residual) // self.group_rows * self.group_rows
        if ready:
            self._quantise(ready)
        self.tail -= ready
        newest, scratch = self.layout.last(self.tail), self.scratch
        self.tail_keys[:, : self.tail], self.tail_values[:, : self.tail] = scratch.keys[newest], scratch.values[newest]
        scratch.owner = None

    def _quantise(self, ready: int) -> None:
        """Quantise those of the tail's oldest ``ready`` rows that are not yet."""
        # rows: [H, S]; oldest: the tail's oldest `ready` rows, of which those with a group keep their codes.
        rows, first = self.layout.every(), self.layout.rows - self.tail
        oldest = ALL, slice(first, first + ready)
        leaving = torch.zeros_like(self.group, dtype=torch.bool)
        leaving[oldest] = self.group[oldest] < 0
        self._store_values(oldest, leaving[oldest])
        keys, group, pairs = self.scratch.keys[rows].float(), self.group[rows].long(), pairs_of(self.layout.capacity)
        target_HS, made_HM = regroup(keys, group, leaving[rows], self.key_step.shape[1], self.group_rows, pairs)
        self._store_keys(rows, keys, target_HS, made_HM)

    def _store_values(self, at: Index, leaving: Tensor) -> None:
        """Quantise the values of the rows ``at`` that are ``leaving``, a bool of their shape."""
        # Values are quantised once: [..., D] -> rotated -> codes
        x = self.scratch.values[at].float()
        codes, step, zero = row_codes(x @ hadamard(self.value_size, x.device), self.value_group, self.bits)
        codes = pack(codes, self.bits)
        for held, new in ((self.value_codes, codes), (self.value_step, step), (self.value_zero, zero)):
            held[at] = torch.where(leaving[..., None], new, held[at])

    def _store_keys(self, at: Index, x: Tensor, target_HS: Tensor, made_HM: Tensor) -> None:
        """Quantise those of the keys ``x`` of rows whose target is a group, by the limits of all that have the same target."""
        # Groups that are made anew get new levels; rows of other groups keep levels and codes.
        if x.device.type == "cpu":  # few rows have a target; elsewhere the host would wait for their number
            some_HN = (target_HS < 0).byte().argsort(dim=-1, stable=True)
            some_HN = some_HN[:, : int((target_HS >= 0).sum(-1).max())]
            at = torch.arange(len(x), device=x.device)[:, None], some_HN
            x, target_HS = x[at], target_HS[at]
        chosen_HS = target_HS >= 0
        step, zero = levels(*self._limits(x, target_HS, made_HM.shape[-1]), self.bits)
        self.key_step.copy_(torch.where(made_HM[..., None], step, self.key_step))
        self.key_zero.copy_(torch.where(made_HM[..., None], zero, self.key_zero))
        del step, zero
        codes = pack(encode(x, *self._key_levels(target_HS.clamp(min=0)), self.bits), self.bits)
        self.key_codes[at] = torch.where(chosen_HS[..., None], codes, self.key_codes[at])
        self.group[at] = torch.where(chosen_HS, target_HS.to(self.group.dtype), self.group[at])

    def _limits(self, x: Tensor, target_HS: Tensor, groups: int) -> tuple[Tensor, Tensor]:
        """The smallest and the largest number ``[H, groups, D]`` of each channel of the keys of a group."""
        # Rows without a target go to one group too many, which is cut off: [H, groups + 1, D] -> groups.
        index = torch.where(target_HS >= 0, target_HS, groups)[..., None].expand_as(x)
        lo, hi = (
            x.new_zeros(len(x), groups + 1, self.key_size).scatter_reduce_(1, index, x, how, include_self=False)
            for how in ("amin", "amax")
        )
        return lo[:, :groups], hi[:, :groups]

    # ---- the rest ------------------------------------------------------------------------------------------------

    def moving(self) -> list[Tensor]:
        """Every buffer ``[H, capacity, D]``, or flat ``[N, D]``, whose rows an eviction moves. Open rows move too,
        next to their codes."""
        # Rows that are open move beside their codes, so that those of the tail are at hand.
        open_rows = [self.scratch.keys, self.scratch.values] if self.open else []
        return [*super().moving(), *open_rows]

    def grow(self) -> None:
        self.scratch.owner = None
        for name in LEVELS:
            old = getattr(self, name)
            new = old.new_empty(self.layout.H, self._groups(), self.key_size)
            new[:, : old.shape[1]] = old
            setattr(self, name, new)

    def clear(self) -> None:
        self.tail, self.scratch.owner = 0, None

    def room(self, tensors: Mapping[str, Tensor]) -> int:
        """Rows per head that the exported key groups ``[H, groups, D]`` need room for."""
        # By numbers and not by its shape: a file may say anything.
        numbers = self.layout.H * self.key_size
        groups = tensors["key_step"].numel() // numbers if "key_step" in tensors else 0
        return bisect_left(range(INT32_MAX), groups, lo=self.layout.capacity, key=self._groups)

    def export(self, rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Columns ``[H, S, C]``, tails ``[H, tail, D]`` and levels of key groups ``[H, groups, D]``. Rows without a
        group and free groups are zero."""
        # Rows without a group have no codes yet, and free groups no levels: zeros, not what the memory held before.
        bare = rows["group"] < 0
        coded = ("key_codes", "value_codes", "value_step", "value_zero")
        blanked = {name: rows[name].masked_fill(bare[..., None], 0) for name in coded}
        tails, used = {name: getattr(self, name)[:, : self.tail] for name in TAILS}, self._used()
        return blanked | tails | {name: getattr(self, name).masked_fill(~used, 0) for name in LEVELS}

    def _used(self) -> Tensor:
        """Boolean ``[H, groups, 1]``: the groups that have rows."""
        group_HS, (H, M, _) = self.group[self.layout.every()].long(), self.key_step.shape
        groups = torch.zeros(H, M + 1, dtype=torch.bool, device=self.layout.device)
        # Rows without a group mark one group too many, which is cut off.
        return groups.scatter_(1, group_HS.where(group_HS >= 0, M), True)[:, :-1, None]

    def exported(self) -> Shapes:
        return self._tables(self.tail)

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Take back the tails ``[H, tail, D]`` and the levels of key groups ``[H, groups, D]``."""
        for name in TAILS:
            getattr(self, name)[:, : self.tail] = tensors[name].to(self.layout.device)
        groups = tensors["key_step"].shape[1]  # a larger room has a larger table
        for name in LEVELS:
            getattr(self, name)[:, :groups] = tensors[name].to(self.layout.device)

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Raise ValueError for groups ``[H, S]`` out of bounds, or a tail that is too long."""
        if "group" not in tensors:
            return
        group, groups, packed = tensors["group"], self._groups(), self.layout.rows - self.tail
        if self.tail > (most := min(self.layout.rows, self.max_tail)):
            raise ValueError(f"tail={self.tail} must be at most {most}")
        if group.numel() and not (group.min() >= -1 and group.max() < groups):
            raise ValueError(f"group must be from -1 to {groups - 1}")
        if (group[..., :packed] < 0).any():
            raise ValueError(f"group=-1 must be of the newest {self.tail} rows alone")


# ---- keys and values in few bits by compiled calls ---------------------------------------------------------------------

# ``locret_kernels.quantise`` reads and quantises while a prompt is read on a CPU: of one text, with as many rows for every head.


class CompiledBits(GroupedBits):
    """``GroupedBits`` by compiled calls, equal up to the order of sums. Rounding can decide which rows are most alike, so rows
    may share other groups."""

    @property
    def fits(self) -> bool:
        """Whether the calls take the layer: keys as wide as values."""
        alike = self.key_size == self.value_size and self.group.dtype == torch.int16
        return alike and self.layout.device.type == "cpu" and self.dtype in cpp.TYPES

    def read_all(self, *, values: bool = True) -> None:
        # Open rows can lack their values alone (`count`), which the plain form then reads.
        if self.open or not self.fits:
            super().read_all(values=values)
            return
        self.scratch.acquire(self)
        quantiser.load().locret_open(self._described().ctypes.data, values, torch.get_num_threads())
        self.scratch.complete = values

    def _quantise(self, ready: int) -> None:
        if not self.fits:
            super()._quantise(ready)
            return
        quantiser.load().locret_quantise(self._described(ready).ctypes.data, torch.get_num_threads())

    def _described(self, ready: int = 0) -> np.ndarray:
        """Sizes and addresses of the layer with the scratch next to it, as the calls read them."""
        buffers = {name: getattr(self, name) for name in (*self.columns(), *self.tables())}
        # The calls check nothing: what they may read and write follows from these numbers.
        return quantiser.GROUP.of(
            self.dtype, **buffers, hadamard=hadamard(self.value_size, self.layout.device), keys=self.scratch.keys,
            values=self.scratch.values, heads=self.layout.H, rows=self.layout.rows, capacity=self.layout.capacity,
            channels=self.key_size, bits=self.bits, groups=self.key_step.shape[1], value_group=self.value_group, tail=self.tail,
            ready=ready, full=self.group_rows, pairs=pairs_of(self.layout.capacity), type=cpp.TYPES[self.dtype],
            tail_room=self.tail_keys.shape[1],
            # All layers share the scratch, so it may have room for more rows than this one.
            room=self.scratch.keys.shape[1],
        )  # fmt: skip


@CODECS.register("8", *map(str, BITS))
def few_bits(bits: int | str, scratch: Scratch, compiled: bool, grows: bool) -> Codec:
    """Codec of ``kv_bits=8``, ``4`` and ``2``."""
    if int(bits) == 8:
        return RowBits()
    # Under full attention no group ever gets sparse, so the table needs no spare ones.
    return (CompiledBits if compiled else GroupedBits)(int(bits), scratch, spare=0.0 if grows else SPARE)
