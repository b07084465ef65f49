"""Pieces that several tests of overlap share."""

import string


def words(text: str) -> list[str]:
    """Lower-cased words between white space without punctuation."""
    bare = (word.lower().translate(str.maketrans("", "", string.punctuation)) for word in text.split())
    return [word for word in bare if word]


def grams(text: str) -> set[tuple[str, ...]]:
    """Every 13 words in a row."""
    found = words(text)
    return {tuple(found[i : i + 13]) for i in range(len(found) - 12)}
