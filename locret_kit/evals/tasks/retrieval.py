"""InfiniteBench's R.KV and Math.Find, made to any length.

Source: github.com/OpenBMB/InfiniteBench, data/construct_synthetic_dataset.py and src/prompt.py (those for open models).
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median

from ..metrics import Answer
from .task import Example, Task, count_ids, span_of, spread_depth, too_short, wrap

TOLERANCE = 0.01
TRIES = 400


LIST_MAX = 99
FINDS = (
    "largest number",
    "second largest number",
    "third largest number",
    "smallest number",
    "second smallest number",
    "third smallest number",
    "median number",
)


@dataclass(frozen=True)
class Draft:
    """A prompt's text before it is wrapped, and its answer."""

    text: str
    answer: Answer
    depth: float | None = None
    prefix: str = ""
    """Beginning of the answer."""
    context: str = ""
    """The part of the text that is asked about; '' where it does not say."""


def fit(request: Example, chat: bool, name: str, build: Callable[[random.Random, int], Draft], least: int) -> Draft:
    """``build(rng, n)`` for an ``n`` whose prompt has the length asked for, or at most 1% fewer tokens.

    One item may be longer than 1%. Then other random items are tried (the generator's seed gets a further number) until
    the total fits; which one is found depends on the arguments alone.

    Args:
        build: makes a candidate with ``n`` items; more items make a longer prompt. least: the smallest ``n`` that makes sense.

    Raises:
        TooShort: the fixed parts are longer than the length. ValueError: no candidate is near enough.
    """
    length, seed = request.length, f"{name}:{request.length}:{request.sample}:{request.seed}"

    def measured(salt: int, n: int) -> tuple[Draft, int]:
        draft = build(random.Random(f"{seed}|{salt}"), n)
        return draft, count_ids(request.tokenizer, *wrap(request, draft.text, draft.prefix, chat=chat))

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


def synthetic(request: Example, name: str, build: Callable[[random.Random, int], Draft], *, least: int = 1) -> Example:
    """The example whose draft ``build(rng, n)`` fits the length asked for."""
    chat = request.wants_chat(False)
    draft = fit(request, chat, name, build, least)
    prompt, special = wrap(request, draft.text, draft.prefix, chat=chat)
    text = span_of(prompt, draft.context) if draft.context else None
    return replace(request, prompt=prompt, answer=draft.answer, special=special, depth=draft.depth, text=text)


def random_uuid(rng: random.Random) -> str:
    """A version-4 UUID from the generator's bits."""
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def kv_task() -> Task:
    """A JSON object of random identifiers; the value of one key is asked for."""

    def make(request: Example) -> Example:
        depth = spread_depth(request.sample)

        def build(rng: random.Random, n: int) -> Draft:
            pairs = [(random_uuid(rng), random_uuid(rng)) for _ in range(n)]
            asked = min(n - 1, int(depth * n))
            body = ", ".join(f'"{key}": "{value}"' for key, value in pairs)
            text = (
                "Extract the value corresponding to the specified key in the JSON object below.\n\n"
                f"JSON data:\n{{{body}}}\n\n\n"
                f'Key: "{pairs[asked][0]}"\nThe value associated with the specified key is: '
            )
            return Draft(text, pairs[asked][1], round(asked / max(1, n - 1), 4))

        return synthetic(request, "R.KV", build)

    return Task("R.KV", make, "has_word", max_new_tokens=50)


def math_find_task() -> Task:
    """A long list of numbers; its largest, smallest or median one is asked for."""

    def make(request: Example) -> Example:
        which = FINDS[request.sample % len(FINDS)]

        def build(rng: random.Random, n: int) -> Draft:
            low = rng.randint(0, LIST_MAX // 5) if "smallest" in which or rng.random() < 0.5 else 0
            high = rng.randint(4 * LIST_MAX // 5, LIST_MAX) if "largest" in which or low == 0 else LIST_MAX
            numbers = [rng.randint(low, high) for _ in range(n)]
            text = (
                f"What is the {which} in the following list?\n\n{numbers}\n\n"
                f"You should answer with only one number, no other words. The {which} of the list is: "
            )
            return Draft(text, find(numbers, which))

        return synthetic(request, "Math.Find", build, least=8)

    return Task("Math.Find", make, "equal_number", max_new_tokens=4)


def find(numbers: list[int], which: str) -> float:
    """The number asked for: the second largest is the largest of those below the largest.

    Raises:
        ValueError: the list has too few different numbers.
    """
    if which == "median number":
        middle = median(numbers)
        return int(middle) if middle == int(middle) else middle
    order = sorted(set(numbers), reverse="largest" in which)
    rank = 1 if "second" in which else 2 if "third" in which else 0
    if rank >= len(order):
        raise ValueError(f"a list with a {which} must have {rank + 1} different numbers, it has {len(order)}")
    return order[rank]
