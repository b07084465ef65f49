"""A text's rows as a compiled call reads them: addresses, lengths and tables of rotation, until its next boundary."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from locret_kernels import cpp
from locret_kernels.decoder_step import PACKED, ROWS
from locret_kernels.ragged_decode import ByteRows, PackedRows

from ...backbones.decoder_attention import Rope
from ...cache.bounded import BoundedCache
from ...cache.context import Context
from ...cache.storage.quantised import GroupedBits, RowBits


def point_at(at: np.ndarray, packed: PackedRows | ByteRows, codec: GroupedBits | RowBits) -> None:
    """Write the addresses of rows in few bits into an element of ``PACKED``."""
    named = {name.rpartition("_")[0]: x for name, x in packed._asdict().items()}  # the names of C++, without sizes
    sizes = {"bits": 8}
    if isinstance(packed, PackedRows) and isinstance(codec, GroupedBits):
        sizes = {"bits": packed.bits, "group_bytes": packed.group_N.itemsize, "groups": packed.key_step_PMD.shape[1]}
        sizes |= {"tail": codec.tail, "tail_room": packed.tail_keys_PRD.shape[1]}
    PACKED.point(at, codec.dtype, **named | sizes, value_groups=packed.value_step_NC.shape[1])


class PositionTables:
    """cos and sin ``[positions, R]`` of each rotation, as far as they were needed: made in ``dtype``, held in ``sums``."""

    def __init__(self, dtype: torch.dtype, sums: torch.dtype) -> None:
        self.dtype, self.sums = dtype, sums
        self._made: dict[tuple[bytes, float], tuple[Tensor, Tensor]] = {}

    def below(self, rope: Rope, length: int) -> tuple[Tensor, Tensor]:
        """Tables ``[N, R]`` of the positions from 0 on, for at least ``length`` positions."""
        # By their numbers: texts have objects of their own for the same rotation.
        key = rope.inv_freq.float().numpy().tobytes(), rope.scaling
        made = self._made.get(key)
        if made is None or len(made[0]) < length:
            cos, sin = rope.tables(torch.arange(length, device=rope.inv_freq.device), self.dtype)
            made = self._made[key] = cos.to(self.sums).contiguous(), sin.to(self.sums).contiguous()
        return made  # not what another thread has put there meanwhile, which may be shorter


@dataclass
class RowPointers:
    """A text's rows as the call reads them, until its next boundary.

    Attributes:
        left: tokens until a boundary, where rows are evicted or a group is quantised.
        seen, context: those of the cache; a difference shows another writer or another text.
    """

    rows: np.ndarray
    packed: np.ndarray
    starts_LH: np.ndarray
    lengths_LH: np.ndarray
    left: int
    seen: int
    context: Context
    own: list[tuple[Rope, Tensor]] = field(default_factory=list)
    """Rotations of stored new keys, and the memory ``[2, R]`` with the tables of the next token."""
    held: list[object] = field(default_factory=list)
    """Objects to whose memory addresses point."""
    wider: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Layer in few bits whose tail is full -> a copy of its keys and values ``[H, rows, D]`` with room for one row more."""

    @classmethod
    def of(cls, cache: BoundedCache, H: int, tables: PositionTables) -> RowPointers:
        """The addresses of a cache's rows, with ``H`` heads in every layer, and how long they hold."""
        ctx, seen, L = cache.context, cache.get_seq_length(), len(cache.bounded)
        starts_LH, lengths_LH = (np.zeros((L, H), np.int64) for _ in range(2))
        rows_L, packed_L = np.zeros(L, ROWS.dtype), np.zeros(L, PACKED.dtype)
        made = cls(rows_L, packed_L, starts_LH, lengths_LH, ctx.until_cut(cache.bounded), seen, ctx)
        own: dict[int, tuple[Rope, Tensor]] = {}
        for layer, rows in enumerate(cache.bounded):
            flat, at = rows.varlen(), made.rows[layer]
            made.starts_LH[layer], made.lengths_LH[layer] = flat.starts_BH[0].numpy(), flat.lengths_BH[0].numpy()
            ROWS.point(
                at, starts=made.starts_LH[layer].ctypes.data, lengths=made.lengths_LH[layer].ctypes.data,
                positions=flat.positions_N, scores=rows.scores, window=rows.window, before=0 if ctx.positions.span else -1,
            )  # fmt: skip
            if rows.statistics:
                statistics = sum(cpp.STATISTICS[name] for name in ctx.statistics)
                ROWS.point(
                    at, stats=flat.stats_XN, stats_stride=flat.stats_XN.shape[1], by_head=bool(ctx.group), statistics=statistics
                )  # fmt: skip
            if (rope := ctx.read_rope(rows)) is not None:
                longest = rows.capacity * (H if rows.layout.ragged else 1)
                cos, sin = tables.below(rope, max(longest, ctx.positions.span or 0))
                ROWS.point(at, tables.dtype, cos=cos, sin=sin, rotated=cos.shape[1])
                made.held.append((cos, sin))
            elif (rope := ctx.write_rope(rows)) is not None:
                R = 2 * len(rope.inv_freq)
                _, held = own.setdefault(id(rope), (rope, torch.empty(2, R, dtype=tables.sums, device=rows.device)))
                ROWS.point(at, tables.dtype, own_cos=held[0], own_sin=held[1], rotated=R)
            if isinstance(rows.codec, GroupedBits | RowBits):
                point_at(made.packed[layer], flat.rows, rows.codec)
                at["packed"] = made.packed[layer : layer + 1].ctypes.data
            else:
                ROWS.point(at, tables.dtype, keys=flat.rows[0], values=flat.rows[1])
            if isinstance(rows.codec, GroupedBits):
                made.left = min(made.left, rows.codec.max_tail - rows.codec.tail + 1)
            made.held.append(flat)
        made.own = list(own.values())
        return made

    def widen(self, cache: BoundedCache) -> None:
        """Make room for the token that fills a group of rows. The group is then quantised."""
        for layer, rows in enumerate(cache.bounded):
            codec = rows.codec
            if isinstance(codec, GroupedBits) and codec.tail == codec.max_tail:
                keys, values = (F.pad(x, (0, 0, 0, 1)) for x in (codec.tail_keys, codec.tail_values))
                self.wider[layer], at = (keys, values), self.packed[layer]
                PACKED.point(at, codec.dtype, tail_keys=keys, tail_values=values, tail_room=codec.tail + 1)
