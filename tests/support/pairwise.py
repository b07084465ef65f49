"""Samples of grids of parameters in which each two values occur together."""

from collections.abc import Iterable, Sequence
from itertools import product
from zlib import crc32


def pairs(first: Iterable, second: Iterable, third: Sequence) -> list[tuple]:
    """Combinations of every value of the first, a tuple or not, with every one of the second, and in turn one of the third.

    Each two occur together where the third has no more values than the others.
    """
    grid = product(enumerate(first), enumerate(second))
    made = [(a if isinstance(a, tuple) else (a,), b, third[(i + j) % len(third)]) for (i, a), (j, b) in grid]
    return [(*a, b, c) for a, b, c in made]


def one_of(choices: Sequence[str], text: str, turn: int = 0) -> str:
    """A choice by lot, the same for a text on every machine; with another ``turn`` another one."""
    return choices[(crc32(text.encode()) + turn) % len(choices)]
