"""Between the two readings of the prompt's tail: see ``policies.answering``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..policies.base import Policy
from .eviction import count_eviction
from .geometry.schedule import Schedule
from .view import slots_of

if TYPE_CHECKING:
    from .bounded import BoundedCache


def check_answering(policy: Policy, schedule: Schedule) -> None:
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


def start_reread(cache: BoundedCache) -> None:
    """Where the tail has been read for the first time: empty every layer, and choose the passages that are read in the place of
    the text, right before the tail; what the cache has seen then ends before them."""
    answering, total, body = cache.policy.reread, cache.get_seq_length(), cache.schedule.body or 0
    if answering is None or not cache.needs_reread or total != cache.schedule.prompt_length:
        return
    tail = cache.schedule.tail
    size = answering.size(min(budget for budget in cache.budgets if budget), tail)
    score_P = torch.zeros(body, device=cache.model.device)
    for layer, rows in enumerate(cache.bounded):
        if rows.window is None:
            slots = slots_of(cache, layer, rows.rows, 0)
            answering.collect(score_P, slots, tail, size)
            count_eviction(cache, rows, slots.valid.shape[:2].numel() * (rows.rows - tail))
    cache.passages = [*answering.choose(score_P, size).tolist(), *range(body, total)]
    for rows in cache.bounded:
        rows.reset()
        rows.seen = total - len(cache.passages)
    cache.last_hidden = None


def source(cache: BoundedCache, start: int, end: int) -> Sequence[int]:
    """Where in the prompt the tokens stand that the cache takes as those of positions ``start`` to ``end``."""
    moved = (cache.schedule.prompt_length or 0) - len(cache.passages)
    if not cache.passages or start < moved:
        return range(start, end)
    return cache.passages[start - moved : end - moved]


def in_prompt(cache: BoundedCache, positions: Any) -> Any:
    """The positions at which a layer holds rows (a tensor, or lists of tensors) as positions in the prompt."""
    if not cache.passages:
        return positions
    if isinstance(positions, list):
        return [in_prompt(cache, some) for some in positions]
    total = cache.schedule.prompt_length or 0
    at = torch.tensor(cache.passages, dtype=positions.dtype, device=positions.device)
    place = (positions - (total - len(at))).clamp(max=len(at) - 1)
    return torch.where(positions < total, at[place.long()], positions)
