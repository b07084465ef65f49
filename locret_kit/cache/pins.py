"""Tokens by their positions in the text: those that are pinned, and those that are read again."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..policies.base import Reread
from ..settings import FIRST, RunSettings, read_protect
from .context import Context, Pins
from .storage.rows import BoundedLayer
from .view import pinned_slots, slots_of


def first_pins(settings: RunSettings) -> Pins:
    """Pins that the settings ask for in any text."""
    return ((0, FIRST),) if "first" in read_protect(settings.protect) else ()


def pins_of(ranges: Iterable[tuple[int, int]]) -> Pins:
    """Half-open ranges of positions in order, those that touch united, empty ones left out."""
    made: list[tuple[int, int]] = []
    for start, end in sorted((start, end) for start, end in ranges if start < end):
        # Ranges are sorted by start, so one that touches the last is united with it.
        if made and start <= made[-1][1]:
            made[-1] = made[-1][0], max(end, made[-1][1])
        else:
            made.append((start, end))
    return tuple(made)


def without(pins: Pins, start: int, end: int) -> Pins:
    """Pins but for the positions ``[start, end)``."""
    return pins_of(part for a, b in pins for part in ((a, min(b, start)), (max(a, end), b)))


def check_room(ctx: Context, pins: Pins, layers: Sequence[BoundedLayer] = ()) -> None:
    """Raise ValueError where a layer has no room for the pinned tokens, its stabilizers or the prompt's tail, and
    one slot of the policy's choice.

    Evictions leave ``budget`` slots, stabilizers among them. The one before the tail leaves ``budget - tail``, without
    stabilizers. Tokens read so far count if ``layers`` still hold them. Before a second reading all count, and its
    passages must hold them: no layers are passed then.
    """
    if ctx.policy.keeps_everything or not any(ctx.budgets) or not pins:
        return
    s, reread = ctx.schedule, None if layers else ctx.policy.reread
    # What is still to come counts in full; of what was read, the slots that are left.
    coming = sum(end - start for start, end in without(pins, 0, layers[0].get_seq_length() if layers else 0))
    asked = [coming] * len(ctx.budgets)
    for i, rows in enumerate(layers):
        if ctx.budgets[i] and rows.is_initialized:
            asked[i] += _held(rows, pins)
    # Budgets may differ, and what a layer still holds: the one with the least beyond that decides.
    layer = min((i for i, budget in enumerate(ctx.budgets) if budget), key=lambda i: ctx.budgets[i] - asked[i])
    budget, beside = ctx.budgets[layer], max(s.stabilizers, s.tail)
    most = budget - beside - 1
    why = f"its {beside} stabilizers or tail tokens and one slot more need room too"
    if reread is not None and (size := reread.size(budget, s.tail)) <= most:
        most, why = size - 1, f"{size} tokens are read again, one of them by choice"
    if asked[layer] > most:
        raise ValueError(
            f"pins={asked[layer]} tokens must be at most {max(0, most)}: layer {layer} has a budget of {budget} slots, and {why}"
        )


def _held(rows: BoundedLayer, pins: Pins) -> int:
    """Pinned slots that a layer holds, per head; the mean where heads differ."""
    pinned_BHS = pinned_slots(pins, rows.slots("positions"), rows.layout.valid())
    if pinned_BHS is None or not pinned_BHS.numel():
        return 0
    # Equal heads: the fullest one decides. Ragged heads share their layer's slots: their mean, rounded up.
    held_1H = pinned_BHS.sum(-1)
    return -int(-held_1H.sum() // rows.layout.H) if rows.layout.ragged else int(held_1H.max())


# ---- two-pass reading ------------------------------------------------------------------------------------------------

# The passages that the first reading of the prompt's tail asked for are read in the place of the text, see
# ``policies.methods.reread`` for the choice. The positions that are read twice, the tail's included, are those of the prompt; the
# cache takes them as the last tokens of a text of the same length.


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
