"""Prompts of a wanted number of tokens, out of whole items."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from .task import count_ids, too_short

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

D = TypeVar("D")
TOLERANCE = 0.01
TRIES = 400


def fit(
    build: Callable[[random.Random, int], D],
    text_of: Callable[[D], tuple[str, bool]],
    *,
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    seed: str,
    least: int = 1,
) -> D:
    """Result of ``build(rng, n)`` for an ``n`` whose prompt has ``length`` tokens, or at most 1% fewer.

    One item may be longer than 1%. Then other random items are tried (the generator's seed gets a further number) until
    the total fits; which one is found depends on the arguments alone.

    Args:
        build: makes a candidate with ``n`` items; more items make a longer prompt.
        text_of: the candidate's prompt, and whether special tokens are added to it.
        least: the smallest ``n`` that makes sense.

    Raises:
        TooShort: the fixed parts are longer than ``length``. ValueError: no candidate is near enough.
    """

    def measured(salt: int, n: int) -> tuple[D, int]:
        candidate = build(random.Random(f"{seed}|{salt}"), n)
        prompt, special = text_of(candidate)
        return candidate, count_ids(tokenizer, prompt, special)

    smallest = measured(0, least)[1]
    if smallest > length:
        raise too_short(length, smallest)
    tolerance = max(1, int(TOLERANCE * length))
    n, per_item = least, max(1.0, (measured(0, 2 * least + 8)[1] - smallest) / (least + 8))
    n = max(least, least + int((length - smallest) / per_item))
    for salt in range(TRIES):
        low, high = least, None
        for _ in range(24):
            candidate, size = measured(salt, n)
            if length - tolerance <= size <= length:
                return candidate
            low, high = (n, high) if size <= length else (low, n)
            step = int((length - size) / per_item)
            guess = n + (step or (1 if size <= length else -1))
            if high is not None:
                if high - low <= 1:
                    break
                guess = min(guess, high - 1)
            n = max(guess, low + 1 if size <= length else low)
        n = low
    raise ValueError(f"length={length} is too small to be met within 1% by this task's items")
