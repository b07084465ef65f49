"""English words for keys and word lists, the same everywhere: those of ``words.yaml``."""

from __future__ import annotations

import random
from importlib import resources

import yaml

_WORDS = yaml.safe_load(resources.files(__package__).joinpath("words.yaml").read_text(encoding="utf-8"))
ADJECTIVES, NOUNS, VERBS = (tuple(_WORDS[name].split()) for name in ("adjectives", "nouns", "verbs"))


def singles() -> list[str]:
    """All words, each once, in a fixed order."""
    return list(dict.fromkeys((*NOUNS, *ADJECTIVES, *VERBS)))


def distinct(rng: random.Random, n: int) -> list[str]:
    """``n`` different words in random order; where there are not enough, words run together ("rivergate").

    Raises:
        ValueError: more words are asked for than pairs of nouns give.
    """
    words = singles()
    if n <= len(words):
        return rng.sample(words, n)
    known = set(words)
    pairs = [pair for a in NOUNS for b in NOUNS if (pair := a + b) not in known]
    if n - len(words) > len(set(pairs)):
        raise ValueError(f"n={n} must be at most {len(words) + len(set(pairs))} different words")
    chosen = words + rng.sample(sorted(set(pairs)), n - len(words))
    rng.shuffle(chosen)
    return chosen
