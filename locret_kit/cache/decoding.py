"""One token's attention over all heads of a layer in one call, whatever their lengths and the bits of their rows.

Lengths and positions may be known to the device alone, and nothing is read back from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from locret_kernels.backend import function
from locret_kernels.column_stats.reference import MARGIN
from locret_kernels.ragged_decode import Float8Rows, PackedRows, Rotation, Spans


@dataclass(frozen=True)
class VarlenRows:
    """Rows of a layer as the decoding kernels read them, in place: ``N`` of all heads, a stretch each."""

    rows: tuple[Tensor, Tensor] | Float8Rows | PackedRows
    """Keys and values ``[N, D]``."""
    positions_N: Tensor
    stats_XN: Tensor
    starts_BH: Tensor
    """First row of each head, and their number."""
    lengths_BH: Tensor
    longest: int
    """No head has more rows."""
    last_BH: Tensor | None = None
    """Rank of each head's newest row, where it is at hand."""

    def newest(self, window: int | None) -> VarlenRows:
        """At most the ``window`` newest rows of every head."""
        if window is None:
            return self
        seen_BH = self.lengths_BH.clamp(max=window)
        starts_BH = self.starts_BH + (self.lengths_BH - seen_BH)
        return replace(self, starts_BH=starts_BH, lengths_BH=seen_BH, longest=min(self.longest, window), last_BH=None)


@dataclass(frozen=True)
class RowRotation:
    """How keys that are stored before RoPE are rotated: by their rank, or among the newest ``span`` tokens by their distance
    where that places them higher (see ``positions``)."""

    cos_SR: Tensor
    sin_SR: Tensor
    q_cos_SR: Tensor
    q_sin_SR: Tensor
    span: int = 0
    seen: Tensor | None = None
    """Tokens of the text, the newest included (integer without axes); with a span above 0."""
    newest: tuple[Tensor, Tensor] | None = None
    """cos and sin of the newest tokens, where they are at hand: of rows that are placed by their rank."""

    @staticmethod
    def tables_at(place_BH: Tensor, cos_SR: Tensor, sin_SR: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin ``[P, 1, 1, R]`` of a place in each of the ``P = B * H`` heads."""
        place_P = place_BH.flatten()
        return cos_SR[place_P][:, None, None], sin_SR[place_P][:, None, None]

    def places(self, flat: VarlenRows) -> tuple[Tensor, Tensor | None]:
        """Where the newest token of each head is ``[B, H]``, and the rows where that is above their rank ``[N]``."""
        # The query stands where its own row does, which is the newest of its head.
        rank_BH = flat.lengths_BH - 1 if flat.last_BH is None else flat.last_BH
        if not self.span:
            return rank_BH, None
        assert self.seen is not None
        before = (self.seen - self.span).clamp(min=0)
        return torch.maximum(rank_BH, self.seen - 1 - before), flat.positions_N - before


def decode_rows(
    q_BQ1D: Tensor,
    flat: VarlenRows,
    scaling: float,
    backend: str,
    statistics: Sequence[str] = (),
    turn: RowRotation | None = None,
    group: int = 0,
) -> Tensor:
    """Attention output ``[B, Q, 1, D]`` of the newest token, which is the last row of every head already; slots gain its
    ``statistics``, and those of each of the ``group`` query heads per key/value head unless it is 0. With ``turn`` the query
    comes before RoPE, as the keys are."""
    q_BQD, rotation = q_BQ1D.squeeze(2), None  # one token: no axis of its own
    if turn is not None:
        place_N: Tensor | None = None
        newest = turn.newest
        if newest is None:
            newest_BH, place_N = turn.places(flat)
            newest = turn.tables_at(newest_BH, turn.q_cos_SR, turn.q_sin_SR)
        # P = B * H: a group turns alike
        group_PG1D = q_BQ1D.reshape(flat.lengths_BH.numel(), -1, 1, q_BQ1D.shape[-1])
        q_BQD = function("rotate_rows", backend)(group_PG1D, *newest).view(q_BQD.shape)
        rotation = Rotation(turn.cos_SR, turn.sin_SR, place_N)
    decode = function("packed_decode" if isinstance(flat.rows, PackedRows) else "ragged_decode", backend)
    spans = Spans(flat.starts_BH, flat.lengths_BH, flat.longest)
    if not (statistics and group):
        decoded = decode(q_BQD, flat.rows, spans, scaling, rotation, received=bool(statistics))
        if statistics:
            _accumulate_statistics(flat, flat.stats_XN, decoded.received_BHS, statistics)
        return decoded.out_BQD.unsqueeze(2)
    # One call per query head of a group, since a call returns the mean of what its query heads gave.
    heads = [decode(q_BQD[:, g::group], flat.rows, spans, scaling, rotation, received=True) for g in range(group)]
    received = [one.received_BHS for one in heads]
    mean_BHS = torch.stack(received).mean(0)
    for stats_XN, one in zip(flat.stats_XN.unflatten(0, (1 + group, -1)), (mean_BHS, *received), strict=True):
        _accumulate_statistics(flat, stats_XN, one, statistics)
    return torch.stack([one.out_BQD for one in heads], dim=2).flatten(1, 2).unsqueeze(2)


def _accumulate_statistics(flat: VarlenRows, stats_XN: Tensor, received_BHS: Tensor, statistics: Sequence[str]) -> None:
    """Add what one query gave to the running statistics; the same as ``column_stats`` of one query."""
    made = {
        "sum": lambda: received_BHS,
        "square": received_BHS.square,
        "above": lambda: received_BHS > (1 + MARGIN) / flat.lengths_BH[..., None].float(),
    }
    rank_S = torch.arange(flat.longest, device=received_BHS.device)
    # Row [B, H, longest] of each rank; ranks past a head's end add zero to its first row.
    index_BHS = flat.starts_BH[..., None] + rank_S.where(rank_S < flat.lengths_BH[..., None], 0)  # 0 is added there
    for stat_N, name in zip(stats_XN, statistics, strict=True):
        stat_N.index_add_(0, index_BHS.flatten(), made[name]().flatten().to(stat_N.dtype))
