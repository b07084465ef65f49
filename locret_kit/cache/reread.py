"""Two-pass reading: after the first reading of the prompt's tail, the passages it asked for are read in the place of the text.

See ``policies.methods.reread`` for the choice. The positions that are read twice, the tail's included, are those of the
prompt; the cache takes them as the last tokens of a text of the same length.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..policies.base import Reread
from ..policies.policy import Policy
from .context import Context, Pins
from .geometry.schedule import Schedule
from .pins import pins_of
from .storage.rows import BoundedLayer
from .view import slots_of

Kept = Tensor | list[list[Tensor]]


def check_reread(policy: Policy, schedule: Schedule) -> None:
    """Raise ValueError where the prompt's end cannot be read twice as the policy asks; names setting and bound."""
    if policy.reread is None:
        return
    name, s = f"policy={policy.name!r}", schedule
    if s.one_shot:
        raise ValueError(f"{name} reads the prompt's last tokens twice: one_shot=True holds none of them back")
    if s.prompt_length is None:
        raise ValueError(f"{name} reads the end of the prompt twice: pass prompt_length=")
    if not 1 <= s.local_len <= s.chunk:
        raise ValueError(
            f"{name} reads the prompt's last local_len={s.local_len} tokens twice: from 1 to chunk={s.chunk} of them"
        )


def choose_passages(ctx: Context, reread: Reread, layers: Sequence[BoundedLayer], total: int) -> list[int]:
    """Positions in a prompt of ``total`` tokens that are read in its place, the pinned ones' and the tail's included. Every
    layer, which holds the first reading of the tail, is emptied; what it has seen then ends before those tokens."""
    body, tail = ctx.schedule.body or 0, ctx.schedule.tail
    size = reread.size(min(budget for budget in ctx.budgets if budget), tail)
    score_P = torch.zeros(body, dtype=torch.float32, device=ctx.model.device)
    for layer, rows in enumerate(layers):
        if rows.window is None:
            slots = slots_of(ctx, layer, rows, rows.rows, 0)
            reread.collect(score_P, slots, tail, size)
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


def prompt_positions(reread: Sequence[int], total: int, start: int, end: int) -> Sequence[int]:
    """Positions in the prompt of ``total`` tokens of those that are fed as its tokens ``start`` to ``end``, where the
    positions ``reread`` are read in the place of its last ones."""
    first = total - len(reread)
    return reread[start - first : end - first] if reread and start >= first else range(start, end)


def in_rows(pins: Pins, reread: Sequence[int], total: int) -> Pins:
    """Pins of a prompt of ``total`` tokens as ranges of the positions that rows carry, where the positions ``reread`` are read
    in the place of its last ones: what is not read again is gone."""
    if not reread:
        return pins
    first, pinned = total - len(reread), [range(*pin) for pin in pins]
    # A pinned token that is read again has another position among the rows.
    again = [(first + i, first + i + 1) for i, at in enumerate(reread) if any(at in pin for pin in pinned)]
    return pins_of([*again, *((max(start, total), end) for start, end in pins)])


def in_prompt(reread: Sequence[int], total: int, positions: Kept) -> Kept:
    """Positions at which a layer holds rows (``[B, H, rows]``, or per batch item and head) as positions in the prompt."""

    def moved(position: Tensor) -> Tensor:
        # Position p of the last len(reread) ones holds prompt token reread[p - (total - len)]; later ones were decoded.
        at = torch.tensor(reread, dtype=position.dtype, device=position.device)
        place = (position - (total - len(at))).clamp(max=len(at) - 1)
        return torch.where(position < total, at[place.long()], position)

    if not reread:
        return positions
    return [[moved(head) for head in heads] for heads in positions] if isinstance(positions, list) else moved(positions)
