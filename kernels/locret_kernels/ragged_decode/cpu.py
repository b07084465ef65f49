"""Decoding attention over flat rows in one call (``cpu.cpp``): as the definition but for rounding. Rows in few bits are the
reference's."""

from pathlib import Path

import torch
from torch import Tensor

from .. import check_some, cpp
from .. import ragged_decode as reference
from . import Angles, Decoded, Rotation, Rows, Spans, Turn

SOURCE = Path(__file__).with_name("cpu.cpp")
DECODE = cpp.Struct(SOURCE, "Decode")


def ragged_decode(
    q_BQD: Tensor, rows: Rows, spans: Spans, scaling: float, turn: Turn = None, received: bool = False
) -> Decoded:
    """See the definition, ``ragged_decode``. Keys and values are contiguous."""
    starts_BH, lengths_BH, longest = spans
    check_some("longest", longest, "rows")
    (B, Q, D), H = q_BQD.shape, starts_BH.shape[1]
    if isinstance(turn, Rotation):
        turn.check(longest, D)
    # What else there is would be misread.
    alike = rows[0].shape == rows[1].shape and all((x.dtype, x.shape[1]) == (q_BQD.dtype, D) for x in rows[:2])
    takes = alike and q_BQD.dtype in cpp.TYPES and D <= cpp.MAX_CHANNELS
    if not takes or not cpp.runs(SOURCE, *(options := cpp.head_options(q_BQD.dtype, D))):
        return reference.ragged_decode(q_BQD, rows, spans, scaling, turn, received)
    keys, values = rows[:2]
    exact, device = cpp.SUMS[q_BQD.dtype], q_BQD.device
    out = torch.empty(B, Q, D, dtype=exact, device=device)
    got = torch.zeros(B, H, longest, dtype=torch.float32, device=device) if received else None
    if isinstance(turn, Angles):
        q_BQD, turn = turn.tables(q_BQD, spans, exact)
    cos = sin = places = None
    if turn is not None:
        cos, sin = (table.to(exact).contiguous() for table in (turn.cos_SR, turn.sin_SR))
        places = None if turn.place_N is None else turn.place_N.int().contiguous()
    starts, lengths, q = starts_BH.long().contiguous(), lengths_BH.long().contiguous(), q_BQD.to(exact).contiguous()
    at = DECODE.of(
        keys.dtype, keys=keys, values=values, starts=starts, lengths=lengths, q=q, out=out, cos=cos, sin=sin, places=places,
        received=got, texts=B, queries=Q, heads=H, channels=D, rotated=0 if cos is None else cos.shape[-1], longest=longest,
        scaling=scaling,
    )  # fmt: skip
    cpp.load(SOURCE, *options).locret_ragged_decode(at.ctypes.data, torch.get_num_threads())
    return Decoded(out.to(keys.dtype), got)
