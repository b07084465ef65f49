"""Two-pass reading: the passages that the first reading of the prompt's tail asked for are read in the place of the text.

See ``policies.methods.reread`` for the choice. The positions that are read twice, the tail's included, are those of the
prompt; the cache takes them as the last tokens of a text of the same length.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..policies.base import Reread
from .context import Context, Pins
from .pins import pins_of
from .storage.rows import BoundedLayer
from .view import slots_of

Kept = Tensor | list[list[Tensor]]


def choose_passages(ctx: Context, reread: Reread, layers: Sequence[BoundedLayer], total: int) -> list[int]:
    """Positions in a prompt of ``total`` tokens that are read again in its place, with the pinned tokens and the
    tail.

    Every layer holds the first reading of the tail and is emptied. Its seen tokens then end before the chosen ones.
    """
    body, tail = ctx.schedule.body or 0, ctx.schedule.tail
    size = reread.size(min(budget for budget in ctx.budgets if budget), tail)
    score_P = torch.zeros(body, dtype=torch.float32, device=ctx.model.device)
    for rows in layers:
        if rows.window is None:
            slots = slots_of(ctx, rows, rows.rows, 0)
            votes_P = score_P.to(rows.device)  # layers may lie on several
            reread.collect(votes_P, slots, tail, size)
            score_P.copy_(votes_P)
            ctx.counters.count_eviction(rows, slots.valid.shape[:2].numel() * (rows.rows - tail))
    # Layers without a window have pooled their votes; all layers then start again before the chosen tokens.
    pinned = {position for start, end in ctx.pins for position in range(start, min(end, body))}
    voted = reread.choose(score_P, size - len(pinned)).tolist()
    chosen = [*sorted({*voted, *pinned}), *range(body, total)]
    for rows in layers:
        rows.reset()
        # What is fed next ends where the prompt ends, so the boundaries of the schedule stay.
        rows.seen = total - len(chosen)
    return chosen


def to_cache_positions(pins: Pins, reread: Sequence[int], total: int) -> Pins:
    """Pins of a prompt of ``total`` tokens as ranges of the positions in rows. The positions ``reread`` are read in
    the place of its last ones; other tokens are gone."""
    if not reread:
        return pins
    first, pinned = total - len(reread), [range(*pin) for pin in pins]
    # A pinned token that is read again has another position among the rows.
    again = [(first + i, first + i + 1) for i, at in enumerate(reread) if any(at in pin for pin in pinned)]
    return pins_of([*again, *((max(start, total), end) for start, end in pins)])


def to_prompt_positions(reread: Sequence[int], total: int, positions: Kept) -> Kept:
    """Positions at which a layer holds rows (``[1, H, rows]``, or ``[0][h]`` where heads differ) as positions in the prompt."""

    def moved(position: Tensor) -> Tensor:
        """Positions in the prompt of positions in rows, of the same shape."""
        # Position p of the last len(reread) ones holds prompt token reread[p - (total - len)]; later ones were decoded.
        at = torch.tensor(reread, dtype=position.dtype, device=position.device)
        place = (position - (total - len(at))).clamp(max=len(at) - 1)
        return torch.where(position < total, at[place.long()], position)

    if not reread:
        return positions
    return [[moved(head) for head in heads] for heads in positions] if isinstance(positions, list) else moved(positions)
