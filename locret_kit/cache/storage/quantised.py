"""Rows of one layer in 4 or 2 bits: keys by channel, values by token, the newest rows as they came.

Source: KIVI, arXiv 2402.02750. A value row has its own steps and zero points, one for every ``VALUE_GROUP`` channels, and is
quantised once; not as it came but rotated by a Hadamard matrix (QuaRot, arXiv 2404.00456), so that one large channel does not
coarsen the steps of its group. Keys are quantised by channel over a group of up to ``group`` rows. KIVI's groups are
consecutive tokens; an eviction leaves gaps in them, so here a row carries the number of its group, and the steps and zero
points of all groups (one of each a channel) stand in a table of fixed size (see ``groups``). Since any row may be in any group,
rows that are quantised together are grouped with rows like them, which makes the steps smaller, and the few that are like
none go in pairs, which keep them whole. A group that has lost all of its rows is free. Where too few are free for the rows
that are to be quantised, the sparsest groups are quantised again together with them: as few groups as make room, so full ones
never are, and what one eviction requantises is in proportion to what entered since the last.

A row's key is read back within half a step of its group, and every merge of its group with others adds at most half a step
of the new group. A number of a rotated value row is read back within half a step; rotating back leaves the length of the row's
error as it is, at most the root of the sum of its squared half steps. A step is at most
``(range + |min| / 500) / (2^bits - 1)`` of the numbers in the group, but for 0.2%.

A chunk that is read in one piece is attended to and evicted from before its survivors are quantised. Where it is read in
several pieces, or the policy reads logits and so evicts after the forward, rows are quantised as they leave the tail, so
pieces change the result by rounding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from locret_kernels.hadamard import hadamard
from locret_kernels.ragged_decode import PackedRows

from ...policies.policy import Policy
from .groups import GROUP, SPARE, pairs_of, regroup, table_size
from .packing import BITS, decode, encode, levels, pack, unpack, value_group
from .rows import BoundedLayer, Column, Index, Layout

FLOAT8 = 8
"""Bits that are no codes of groups but floating point: see ``float8``."""
RESIDUAL = 32
"""Newest rows that are always held as they came; up to ``group - 1`` more wait for their group to fill."""


def check_bits(kv_bits: int | None) -> None:
    """Raise ValueError unless ``kv_bits`` is 8, 4, 2 or None."""
    if kv_bits is not None and kv_bits not in (FLOAT8, *BITS):
        raise ValueError(
            f"kv_bits={kv_bits} must be 8, 4 or 2; without it, keys and values are kept in the model's dtype"
        )


def check_storage(kv_bits: int | None, policy: Policy) -> None:
    """Raise ValueError unless slots that ``policy`` keeps can be stored in ``kv_bits`` bits: a slot that was quantised is not
    written again."""
    check_bits(kv_bits)
    if kv_bits is not None and policy.merge is not None:
        raise ValueError(
            f"kv_bits={kv_bits} stores a slot once; policy={policy.name!r} merges evicted slots into it: leave one out"
        )
    if kv_bits == FLOAT8 and policy.ragged:
        raise ValueError(
            f"kv_bits=8 is for heads of one length; those of policy={policy.name!r} differ: take 4 or 2 bits"
        )


def check_head_size(bits: int, size: int, name: str = "kv_bits") -> None:
    """Raise ValueError where the codes of a head's numbers do not fill whole bytes; ``name`` is the setting."""
    if size * bits % 8:
        raise ValueError(f"{name}={bits} needs a head size that is a multiple of {8 // bits}, not {size}")


class Scratch:
    """Keys and values ``[B, H, rows, D]`` in the model's dtype of the one layer that is read now; all layers share it."""

    def __init__(self) -> None:
        self.owner: QuantisedLayer | None = None
        self.complete = True
        """Whether it holds all values, and not the tail's alone."""
        self.keys = self.values = torch.empty(0)

    def lend(self, layer: QuantisedLayer) -> None:
        """Give the buffers to a layer, made anew where they do not fit it."""
        B, H = layer.B, layer.H
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
    """Rows of one layer in ``bits`` bits, as many for every head (``ragged_quantised`` lets heads differ).

    Between blocks every row but the newest ``tail`` is quantised. In a block all rows are read into the scratch, new ones are
    written after them, and ``finish_block`` quantises those that have left the tail. A row of the tail may be quantised already
    (after an eviction among the newest); it keeps its codes. One token goes to the tail alone and its attention reads the
    codes as they are, until the tail is full: once every ``group`` tokens.
    """

    key_codes: Tensor
    """``[B, H, capacity, D * bits / 8]`` uint8, and so are the values'."""
    value_codes: Tensor
    value_step: Tensor
    """``[B, H, capacity, groups of channels]`` float16, and so is the zero point."""
    value_zero: Tensor
    group: Tensor
    """``[B, H, capacity]``: a row's key group; -1 where it is not quantised."""
    key_step: Tensor
    """``[B, tables, groups, D]`` float16, and so is the zero point; here each head has a table of its own."""
    key_zero: Tensor
    tail_keys: Tensor
    """``[B, H, residual + group - 1, D]``: the newest ``tail`` rows, and so are the values."""
    tail_values: Tensor
    takes_back = False

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

    def measure(self, k_BHTD: Tensor, v_BHTD: Tensor) -> None:
        super().measure(k_BHTD, v_BHTD)
        for size in (self.key_size, self.value_size):
            check_head_size(self.bits, size)
        self.value_group = value_group(self.value_size)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        tables, groups = self._tables()
        tail = self.B, self.H, self.residual + self.group_rows - 1
        with torch.inference_mode(False):
            # The newest rows as they came: [B, H, residual + group - 1, D].
            self.tail_keys = torch.empty(*tail, self.key_size, dtype=self.dtype, device=self.device)
            self.tail_values = torch.empty(*tail, self.value_size, dtype=self.dtype, device=self.device)
            # Per key group, not per row: one step and one zero point per channel.
            shape = self.B, tables, groups, self.key_size
            self.key_step = torch.empty(shape, dtype=torch.float16, device=self.device)
            self.key_zero = torch.empty_like(self.key_step)

    def columns(self) -> dict[str, Column]:
        # Packed codes, and for values one step and one zero point per group of channels.
        per_byte, groups = 8 // self.bits, self._tables()[1]
        levels = torch.float16, (self.value_size // self.value_group,)
        return {
            "key_codes": (torch.uint8, (self.key_size // per_byte,)),
            "value_codes": (torch.uint8, (self.value_size // per_byte,)),
            "value_step": levels,
            "value_zero": levels,
            "group": (torch.int16 if groups < 2**15 else torch.int32, ()),
            "positions": (torch.int32, ()),
            "scores": (torch.float32, ()),
        }

    # ---- which rows: what heads of different lengths do otherwise ------------------------------------------------

    def _tables(self) -> tuple[int, int]:
        """Tables of key groups for one item of the batch, and groups in each."""
        return self.H, table_size(self.capacity, 1, self.spare, self.group_rows)

    @property
    def longest(self) -> int:
        """Rows of the longest head."""
        return self.rows

    def _written(self, new: slice | Tensor) -> Index:
        """Index of new rows ``[B, H, T]``."""
        return slice(None), slice(None), new

    def _next_row(self) -> slice | Tensor:
        """The row that the next token becomes in every head."""
        return slice(self.rows, self.rows + 1)

    def _newest(self, older: int, newer: int) -> Index:
        """Index of the rows that are among the newest ``older`` of their head and not among its newest ``newer``."""
        return slice(None), slice(None), slice(self.rows - older, self.rows - newer)

    def _held(self) -> Index:
        """Index of all rows ``[B, tables, S]``: those that share a table side by side."""
        return self._newest(self.rows, 0)

    def _among(self, held: Index, some_BTN: Tensor) -> Index:
        """Index of some of the rows that are held ``[B, tables, N]``."""
        B, tables = (torch.arange(n, device=self.device) for n in some_BTN.shape[:2])
        return B[:, None, None], tables[:, None], some_BTN

    def _heads(self) -> tuple[Tensor, int]:
        """Head of each row ``[B, tables, S]`` (int64) among those that share a table, and how many share it."""
        return torch.zeros((), dtype=torch.int64, device=self.device).expand(self.B, self.H, self.rows), 1

    def _in_tail(self) -> Index:
        """Index of the rows that are in the tail, among the tail's."""
        return slice(None), slice(None), slice(0, self.tail)

    def _next_in_tail(self) -> Index:
        """Index of the tail's next row ``[B, H]``."""
        return slice(None), slice(None), self.tail

    def _tails(self) -> Tensor:
        """Rows of each head ``[B, H]`` (int32) that are in its tail."""
        return torch.full((self.B, self.H), self.tail, dtype=torch.int32, device=self.device)

    def _lent(self, name: str) -> Tensor:
        """The scratch's keys or values, as this layer's buffers lie."""
        return getattr(self.scratch, name)

    # ---- reading -------------------------------------------------------------------------------------------------

    def slots(self, name: str) -> Tensor:
        if name in ("keys", "values"):
            self._open()
            return self._lent(name)[:, :, : self.rows]
        return super().slots(name)

    @property
    def reads_flat(self) -> bool:
        return self.scratch.owner is not self

    def _flat_rows(self) -> PackedRows:
        return PackedRows(
            self.key_codes.flatten(0, -2),
            self.value_codes.flatten(0, -2),
            self.group.flatten(),
            self.key_step.flatten(0, 1),
            self.key_zero.flatten(0, 1),
            self.value_step.flatten(0, -2),
            self.value_zero.flatten(0, -2),
            self.tail_keys.flatten(0, 1),
            self.tail_values.flatten(0, 1),
            self._tails(),
        )

    def _open(self, *, values: bool = True) -> None:
        """Read all rows into the scratch, unless they are there. To quantise, the tail's ``values`` are enough."""
        scratch, open_already = self.scratch, self.scratch.owner is self
        if open_already and (scratch.complete or not values):
            return
        held, newest, in_tail = self._held(), self._newest(self.tail, 0), self._in_tail()
        # All rows from their codes first, then the tail's over them: rows of the tail have no codes, or keep exact ones.
        if not open_already:
            scratch.lend(self)
            lent = self._lent("keys")
            lent[held] = self._read_keys(held)
            lent[newest] = self.tail_keys[in_tail]
        lent = self._lent("values")
        tail = lent[newest].clone() if open_already else self.tail_values[in_tail]
        if values:
            lent[held] = self._read_values(held)
        lent[newest] = tail
        scratch.complete = values

    def _read_keys(self, at: Index) -> Tensor:
        """Keys of rows ``[B, tables, S]``; anything where a row is not quantised."""
        codes = unpack(self.key_codes[at], self.bits)  # [B, tables, S, D]
        return decode(codes, *self._key_levels(self.group[at].long().clamp(min=0))).to(self.dtype)

    def _key_levels(self, group_BTS: Tensor) -> tuple[Tensor, Tensor]:
        """Step and zero point ``[B, tables, S, D]`` of groups."""
        # Tables end to end [B * tables * M, D]: group m of table t is row t * M + m.
        B, tables, M, D = self.key_step.shape
        index = group_BTS + M * torch.arange(B * tables, device=self.device).view(B, tables, 1)
        return F.embedding(index, self.key_step.view(-1, D)), F.embedding(index, self.key_zero.view(-1, D))

    def _read_values(self, at: Index) -> Tensor:
        """Values of rows; anything where a row is not quantised."""
        # [..., D] -> [..., channel groups, channels of a group]; levels broadcast over the last axis
        codes = unpack(self.value_codes[at], self.bits).unflatten(-1, (-1, self.value_group))
        x = decode(codes, self.value_step[at][..., None], self.value_zero[at][..., None]).flatten(-2)
        return (x @ hadamard(self.value_size, x.device)).to(self.dtype)  # orthogonal and symmetric: its own inverse

    # ---- writing -------------------------------------------------------------------------------------------------

    def _write(self, new: slice | Tensor, k: Tensor, v: Tensor) -> None:
        T, at = k.shape[2], self._written(new)
        # One token while no row is open: it joins the tail, and attention reads codes; otherwise all goes to the scratch.
        if T == 1 and self.reads_flat and self.tail < self.tail_keys.shape[2]:
            next_one = self._next_in_tail()
            self.tail_keys[next_one], self.tail_values[next_one] = k[:, :, 0], v[:, :, 0]
        else:
            self._open()
            self._lent("keys")[at], self._lent("values")[at] = k, v
        self.group[at] = self.group.new_full((), -1)
        self.tail += T

    def overflow(self, keys_HRD: Tensor, values_HRD: Tensor) -> None:
        """Write the token for which the full tail has no room, from a copy of the tail that has; it is not yet counted.
        ``finish_block`` then quantises the group that is full."""
        self._open(values=False)
        at, new = self._next_in_tail(), self._written(self._next_row())  # [B, H] and [B, H, 1]
        self._lent("keys")[new] = keys_HRD[None][at].unsqueeze(2)
        self._lent("values")[new] = values_HRD[None][at].unsqueeze(2)
        self.group[new] = self.group.new_full((), -1)
        self.tail += 1

    def finish_block(self) -> None:
        if self.scratch.owner is not self:
            return
        # Whole groups leave the tail, and `residual` rows stay in it.
        ready = max(0, self.tail - self.residual) // self.group_rows * self.group_rows
        if ready:
            self._quantise(ready)
        self.tail -= ready
        newest, in_tail = self._newest(self.tail, 0), self._in_tail()
        self.tail_keys[in_tail], self.tail_values[in_tail] = self._lent("keys")[newest], self._lent("values")[newest]
        self.scratch.owner = None

    def _quantise(self, ready: int) -> None:
        """Quantise those of the tail's oldest ``ready`` rows that are not yet."""
        # held: [B, tables, S]; oldest: the tail's oldest `ready` rows, of which those with a group keep their codes.
        held, oldest = self._held(), self._newest(self.tail, self.tail - ready)
        leaving = torch.zeros_like(self.group, dtype=torch.bool)
        leaving[oldest] = self.group[oldest] < 0
        self._store_values(oldest, leaving[oldest])
        keys, group = self._lent("keys")[held].float(), self.group[held].long()
        target_BTS, made_BTM = regroup(
            keys,
            group,
            leaving[held],
            *self._heads(),
            self.key_step.shape[2],
            self.group_rows,
            pairs_of(self.capacity),
        )
        self._store_keys(held, keys, target_BTS, made_BTM)

    def _store_values(self, at: Index, leaving: Tensor) -> None:
        """Quantise the values of those of the rows ``at`` that are ``leaving``."""
        # Values are quantised once, in groups of channels: [..., D] -> rotated -> [..., channel groups, channels of a group]
        x = self._lent("values")[at].float()
        x = (x @ hadamard(self.value_size, x.device)).unflatten(-1, (-1, self.value_group))
        step, zero = levels(x.amin(-1), x.amax(-1), self.bits)
        codes = pack(encode(x, step[..., None], zero[..., None], self.bits).flatten(-2), self.bits)
        for held, new in ((self.value_codes, codes), (self.value_step, step), (self.value_zero, zero)):
            held[at] = torch.where(leaving[..., None], new, held[at])

    def _store_keys(self, at: Index, x: Tensor, target_BTS: Tensor, made_BTM: Tensor) -> None:
        """Quantise those of the keys ``x`` of rows whose target is a group, by the limits of all that have the same target."""
        # Groups that are made anew get new levels; rows of other groups keep levels and codes.
        if x.device.type == "cpu":  # few rows have a target; elsewhere the host would wait for their number
            some_BTN = (target_BTS < 0).byte().argsort(dim=-1, stable=True)
            some_BTN = some_BTN[..., : int((target_BTS >= 0).sum(-1).max())]
            at, target_BTS = self._among(at, some_BTN), target_BTS.gather(2, some_BTN)
            x = x.gather(2, some_BTN[..., None].expand(*some_BTN.shape, x.shape[-1]))
        chosen_BTS = target_BTS >= 0
        step, zero = levels(*self._limits(x, target_BTS, made_BTM.shape[-1]), self.bits)
        self.key_step.copy_(torch.where(made_BTM[..., None], step, self.key_step))
        self.key_zero.copy_(torch.where(made_BTM[..., None], zero, self.key_zero))
        del step, zero
        codes = pack(encode(x, *self._key_levels(target_BTS.clamp(min=0)), self.bits), self.bits)
        self.key_codes[at] = torch.where(chosen_BTS[..., None], codes, self.key_codes[at])
        self.group[at] = torch.where(chosen_BTS, target_BTS.to(self.group.dtype), self.group[at])

    def _limits(self, x: Tensor, target_BTS: Tensor, groups: int) -> tuple[Tensor, Tensor]:
        """The smallest and the largest number ``[B, tables, groups, D]`` of each channel of the keys of a group."""
        # Rows without a target go to one group too many, which is cut off: [B, tables, groups + 1, D] -> groups.
        B, tables, _ = target_BTS.shape
        index = torch.where(target_BTS >= 0, target_BTS, groups)[..., None].expand_as(x)
        lo, hi = (
            x.new_zeros(B, tables, groups + 1, self.key_size).scatter_reduce_(2, index, x, how, include_self=False)
            for how in ("amin", "amax")
        )
        return lo[:, :, :groups], hi[:, :, :groups]

    # ---- eviction and the rest -----------------------------------------------------------------------------------

    def keep(self, stay_BHS: Tensor, mean: int) -> None:
        self._open()  # rows move beside their codes, so that those of the tail are at hand
        super().keep(stay_BHS, mean)
        self.tail = min(self.tail, self.longest)
        self.finish_block()

    def _moving(self) -> list[Tensor]:
        lent = [self._lent(name) for name in ("keys", "values") if self.scratch.owner is self]
        return [*super()._moving(), *lent]

    def grow(self, rows: int) -> None:
        self.scratch.owner = None
        super().grow(rows)
        for name in ("key_step", "key_zero"):
            old = getattr(self, name)
            with torch.inference_mode(False):
                new = old.new_empty(*old.shape[:2], self._tables()[1], self.key_size)
            new[:, :, : old.shape[2]] = old
            setattr(self, name, new)

    def reset(self) -> None:
        super().reset()
        self.tail, self.scratch.owner = 0, None

    def export(self) -> tuple[dict[str, float], dict[str, Tensor]]:
        counts, tensors = super().export()
        counts["tail"] = self.tail
        if tensors:
            # Rows without a group have no codes yet, and free groups no levels: zeros, not what the memory held before.
            bare = tensors["group"] < 0
            for name in ("key_codes", "value_codes", "value_step", "value_zero"):
                tensors[name] = tensors[name].masked_fill(bare[..., None], 0)
            in_tail, used = self._in_tail(), self._used()
            tensors |= {name: getattr(self, name)[in_tail] for name in ("tail_keys", "tail_values")}
            tensors |= {name: getattr(self, name).masked_fill(~used, 0) for name in ("key_step", "key_zero")}
        return counts, tensors

    def _used(self) -> Tensor:
        """Boolean ``[B, tables, groups, 1]``: the groups that have rows."""
        group_BTS = self.group[self._held()].long()
        groups = torch.zeros(*self.key_step.shape[:2], self.key_step.shape[2] + 1, dtype=torch.bool, device=self.device)
        # Rows without a group mark one group too many, which is cut off.
        at = group_BTS.where(group_BTS >= 0, groups.shape[2] - 1)
        return groups.scatter_(2, at, True)[:, :, :-1, None]

    def layout(self, counts: Mapping[str, float], lengths: Sequence[int], query_heads: int) -> Layout:
        levels = torch.float16, (self.B, *self._tables(), self.key_size)
        tail = self._tail_shape(int(counts["tail"]), lengths)
        return super().layout(counts, lengths, query_heads) | {
            "tail_keys": (self.dtype, (*tail, self.key_size)),
            "tail_values": (self.dtype, (*tail, self.value_size)),
            "key_step": levels,
            "key_zero": levels,
        }

    def _tail_shape(self, tail: int, lengths: Sequence[int]) -> tuple[int, ...]:
        """Shape of the exported tail with one number per row."""
        return self.B, self.H, tail

    def _fill(self, tensors: Mapping[str, Tensor]) -> None:
        super()._fill(tensors)
        for name in ("tail_keys", "tail_values"):
            getattr(self, name)[self._in_tail()] = tensors[name].to(self.device)
        groups = tensors["key_step"].shape[2]  # a larger room has a larger table
        for name in ("key_step", "key_zero"):
            getattr(self, name)[:, :, :groups] = tensors[name].to(self.device)
