"""Pinned text: ranges of positions whose tokens are never evicted."""

from collections.abc import Iterable, Sequence

from torch import Tensor

from ..settings import FIRST, RunSettings, read_protect
from .context import Context, Pins
from .storage.rows import BoundedLayer


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


def pinned_slots(pins: Pins, positions_BHS: Tensor, valid_BHS: Tensor) -> Tensor | None:
    """Boolean ``[B, H, S]``: the slots of pinned positions; None without pins. The host waits for nothing."""
    found = None
    for start, end in pins:
        inside = (positions_BHS >= start) & (positions_BHS < end) & valid_BHS
        found = inside if found is None else found | inside
    return found
