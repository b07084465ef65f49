"""Overlap of texts, counted in 13-grams of words.

Words are separated by white space, lower-cased and stripped of punctuation; punctuation alone is no word. A gram is
13 words in a row. Source: GPT-3, arXiv 2005.14165, appendix C. In scripts without blanks between words, such as Chinese,
each character is a word.
"""

import re
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

N = 13
"""Words of a gram."""
UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
    "\U00020000-\U0003ffff"
)
"""Characters of scripts without blanks between words: Thai, Lao, Burmese, Khmer, Japanese and Chinese."""
_RAW = re.compile(rf"[{UNSPACED}]|[^\s{UNSPACED}]+")
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


def words(text: str) -> Grams:
    """Hashes of the words of a text, in order; 0 for text between white space that is no word."""
    words_of_text = _RAW.findall(text)
    return np.fromiter(map(_word, words_of_text), np.uint64, len(words_of_text))


def grams_of(ids: Grams) -> Grams:
    """Grams ``[W - 12]`` of ``[W]`` words, in the order of their first ones; of fewer than 13 words none."""
    total = np.zeros(max(0, len(ids) - N + 1), np.uint64)
    for k in range(N):
        total = total * _PRIME + ids[k : k + len(total)]
    return total


def grams(text: str) -> Grams:
    """Every gram of a text, in order. A text of fewer than 13 words is one gram, so that it can be found again."""
    ids = words(text)
    ids = ids[ids > 0]
    if 0 < len(ids) < N:
        ids = np.concatenate([np.zeros(N - len(ids), np.uint64), ids])
    return grams_of(ids)


def union(sets: Sequence[Grams]) -> Grams:
    """The sorted set of all grams."""
    return np.unique(np.concatenate([np.empty(0, np.uint64), *sets]))


def among(some: Grams, known: Grams) -> NDArray[np.bool_]:
    """Whether each of ``some`` is in the sorted set ``known``."""
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
    ids = words(text)
    left = np.flatnonzero(ids)
    while len(at := np.flatnonzero(among(grams_of(ids[left]), known))):
        covers = np.zeros(len(left) + 1, np.int64)  # changes of how many grams cover a word
        covers[at] += 1
        covers[at + N] -= 1
        left = left[covers.cumsum()[:-1] == 0]  # new neighbours may make a gram: look again
    gone = ids > 0
    gone[left] = False
    if not gone.any():
        return text
    edges = np.flatnonzero(np.diff(gone, prepend=False, append=False))
    spans = np.array([match.span() for match in _RAW.finditer(text)])
    pieces, done = [], 0
    for start, end in zip(spans[edges[::2], 0].tolist(), spans[edges[1::2] - 1, 1].tolist(), strict=True):
        pieces.append(text[done:start])
        done = end
    return "\n".join([*pieces, text[done:]])
