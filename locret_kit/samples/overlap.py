"""What texts have in common, counted in 13-grams of words.

A word is what stands between white space, lower-cased and without punctuation; punctuation alone is no word. A gram is
13 words in a row. Source: GPT-3, arXiv 2005.14165, appendix C.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

N = 13
"""Words of a gram."""
_WORD = re.compile(r"\S+")
_PUNCTUATION = re.compile(r"[\W_]+")
_PRIME = np.uint64(0x9E3779B97F4A7C15)
PROBES, PROBE = 32, 400
"""Places at which a long text is compared with others, and characters of each."""

Grams = NDArray[np.uint64]
"""64-bit hashes of grams, by place or as a sorted set."""


@lru_cache(maxsize=2**20)
def _word(raw: str) -> int:
    """A word's hash; 0 for punctuation."""
    word = _PUNCTUATION.sub("", raw.lower())
    return int.from_bytes(blake2b(word.encode("utf-8", "replace"), digest_size=8).digest(), "little") if word else 0


def words(text: str) -> tuple[Grams, NDArray[np.int64]]:
    """Hashes ``[W]`` of the words of a text, and their half-open character spans ``[W, 2]``."""
    found = [(_word(match[0]), *match.span()) for match in _WORD.finditer(text)]
    ids = np.array([word for word, _, _ in found], np.uint64)
    spans = np.array([(start, end) for _, start, end in found], np.int64).reshape(-1, 2)
    return ids[ids > 0], spans[ids > 0]


def grams_of(ids: Grams) -> Grams:
    """Grams ``[W - 12]`` in the order of their first words; of fewer than 13 words none."""
    total = np.zeros(max(0, len(ids) - N + 1), np.uint64)
    for k in range(N):
        total = total * _PRIME + ids[k : k + len(total)]
    return total


def grams(text: str) -> Grams:
    """Every gram of a text, in order. A text of fewer than 13 words is one gram, so that it can be found again."""
    ids = words(text)[0]
    if 0 < len(ids) < N:
        ids = np.concatenate([np.zeros(N - len(ids), np.uint64), ids])
    return grams_of(ids)


def union(found: Sequence[Grams]) -> Grams:
    """The sorted set of all grams."""
    return np.unique(np.concatenate([np.empty(0, np.uint64), *found]))


def among(some: Grams, known: Grams) -> NDArray[np.bool_]:
    """Which of ``some`` are in the sorted set ``known``."""
    if not len(known):
        return np.zeros(len(some), np.bool_)
    return known[np.searchsorted(known, some).clip(max=len(known) - 1)] == some


def is_copy(text: str, known: Grams) -> bool:
    """Whether more than half of a text's grams are among ``known``; of a long text those of 32 places count."""
    if len(text) <= PROBES * PROBE:
        mine = grams(text)
    else:  # the first and the last word of a place may be cut
        starts = range(0, len(text) - PROBE + 1, (len(text) - PROBE) // (PROBES - 1))
        mine = np.concatenate([grams(text[at : at + PROBE])[1:-1] for at in starts])
    return len(mine) > 0 and bool(among(mine, known).mean() > 0.5)


def without(text: str, known: Grams) -> str:
    """The text less every word that a gram among ``known`` covers; a line ends where words are gone."""
    while True:
        ids, spans = words(text)
        at = np.flatnonzero(among(grams_of(ids), known))
        if not len(at):
            return text
        first = at[np.diff(at, prepend=-N - 1) > N]  # runs of grams that touch or overlap
        last = at[np.diff(at, append=len(ids) + N) > N] + N - 1
        pieces, done = [], 0
        for a, b in zip(spans[first, 0].tolist(), spans[last, 1].tolist(), strict=True):
            pieces.append(text[done:a])
            done = b
        text = "\n".join([*pieces, text[done:]])  # new neighbours may make a gram: look again
