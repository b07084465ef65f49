"""A text's rows as a compiled call reads them: addresses, lengths and tables of rotation, until its next boundary."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from locret_kernels import cpp
from locret_kernels.decoder_step import PACKED, ROWS
from locret_kernels.ragged_decode import ByteRows, PackedRows

from ...backbones.rope import Rope
from ...cache.bounded import BoundedCache
from ...cache.context import Context
from ...cache.step import evict_if_due, make_room
from ...cache.storage.quantised import GroupedBits, RowBits
from ...cache.view import entry_scores, scores_of
from ...heads import RetainingHeads


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
    heads: RetainingHeads | None
    """Retaining heads that the call can ask."""
    scores: bool
    """Whether new tokens are scored."""
    recent: bool
    """Whether their queries are kept."""
    tables: PositionTables
    own: list[tuple[Rope, Tensor]] = field(default_factory=list)
    """Rotations of stored new keys, and the memory ``[2, R]`` with the tables of the next token."""
    keepalive: list[object] = field(default_factory=list)
    """Objects to whose memory addresses point."""

    @classmethod
    def of(cls, cache: BoundedCache, H: int, tables: PositionTables) -> RowPointers:
        """The addresses of a cache's rows, with ``H`` heads in every layer and room for a token, and how long they hold."""
        ctx, seen, L = cache.context, cache.get_seq_length(), len(cache.bounded)
        ctx.tables.clear()
        make_room(ctx, cache.bounded, 1)
        starts_LH, lengths_LH = (np.zeros((L, H), np.int64) for _ in range(2))
        rows_L, packed_L = np.zeros(L, ROWS.dtype), np.zeros(L, PACKED.dtype)
        score, heads = ctx.policy.score, ctx.heads
        asked = heads if score.is_head and heads is not None and heads.config.activation == "silu" else None
        recent = any(rows.recent for rows in cache.bounded)
        made = cls(
            rows_L, packed_L, starts_LH, lengths_LH, ctx.until_cut(cache.bounded), seen, ctx, asked, score.scores_new_tokens,
            recent, tables,
        )  # fmt: skip
        own: dict[int, tuple[Rope, Tensor]] = {}
        for layer, rows in enumerate(cache.bounded):
            flat = rows.varlen()
            starts_LH[layer], lengths_LH[layer] = flat.starts_BH[0].numpy(), flat.lengths_BH[0].numpy()
            fields: dict[str, object] = dict(
                starts=starts_LH[layer].ctypes.data, lengths=lengths_LH[layer].ctypes.data,
                positions=flat.positions_N, scores=rows.scores, window=rows.window, before=0 if ctx.positions.span else -1,
            )  # fmt: skip
            if rows.statistics:
                statistics = sum(cpp.STATISTICS[name] for name in ctx.statistics)
                fields |= dict(stats=flat.stats_XN[0], stats_stride=flat.stats_XN.stride(0))
                fields |= dict(by_head=bool(ctx.group), statistics=statistics)
            if (rope := ctx.read_rope(rows)) is not None:
                longest = rows.capacity * (H if rows.layout.ragged else 1)
                cos, sin = tables.below(rope, max(longest, ctx.positions.span or 0))
                fields |= dict(cos=cos, sin=sin, rotated=cos.shape[1])
            elif (rope := ctx.write_rope(rows)) is not None:
                R = 2 * len(rope.inv_freq)
                _, held = own.setdefault(id(rope), (rope, torch.empty(2, R, dtype=tables.sums, device=rows.device)))
                fields |= dict(own_cos=held[0], own_sin=held[1], rotated=R)
            if isinstance(rows.codec, GroupedBits | RowBits):
                point_at(packed_L[layer], flat.rows, rows.codec)
                fields["packed"] = packed_L[layer : layer + 1].ctypes.data
            else:
                fields |= dict(keys=flat.rows[0], values=flat.rows[1])
            if isinstance(rows.codec, GroupedBits):
                made.left = min(made.left, rows.codec.max_tail - rows.codec.tail + 1)
            ROWS.point(rows_L[layer], tables.dtype, **fields)
            made.keepalive.append((flat, fields))
        made.own = list(own.values())
        return made

    def are_of(self, cache: BoundedCache) -> bool:
        """Whether a cache's rows still lie as they were found, with room for a token."""
        return self.left > 0 and self.context is cache.context and self.seen == cache.get_seq_length()

    def place(self) -> None:
        """Say where in the text the next token stands."""
        self.rows["position"], span = self.seen, self.context.positions.span
        if span:
            self.rows["before"] = max(0, self.seen + 1 - span)
        for rope, held in self.own:
            cos, sin = rope.tables(torch.tensor([self.seen], device=held.device), self.tables.dtype)
            held[0], held[1] = cos[0], sin[0]

    def score(self, cache: BoundedCache, q_LQD: Tensor, k_LHD: Tensor, v_LHD: Tensor, *, scored: bool) -> None:
        """Hand the new token's q, k and v before RoPE to the policy: entry scores, where they are not there, and recent
        queries."""
        for layer, rows in enumerate(cache.bounded):
            q, k, v = (x[layer][None, :, None] for x in (q_LQD, k_LHD, v_LHD))
            if scored and self.scores and rows.window is None:
                newest = torch.from_numpy(self.starts_LH[layer] + self.lengths_LH[layer])
                score_BHT = scores_of(entry_scores(self.context, rows, self.seen, q, k, v), k)
                rows.scores.view(-1)[newest] = score_BHT.reshape(-1).to(rows.scores.dtype)
            if rows.recent:
                rows.append_queries(q)

    def count(self, cache: BoundedCache) -> None:
        """A row more in every layer, and the evictions that are due."""
        self.lengths_LH += 1
        self.packed["tail"] += 1
        self.left -= 1
        self.seen += 1
        for rows in cache.bounded:
            rows.codec.count()
            rows.count(1)
            if not self.left:
                evict_if_due(self.context, [rows])
                rows.codec.finish_block()
        cache.state.unfinished = False
