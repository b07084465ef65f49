"""Losses of a conversion: what a file holds and its text does not."""

from __future__ import annotations

import re
from collections.abc import Iterable

NEAR = 4096
"""Letters behind a passage within which the next one is looked for first, so that long documents take no square of time."""

_BASE64 = re.compile(r"(?<![A-Za-z0-9+/])(?:(?:[A-Za-z0-9+/]{60,80}={0,2}(?:\\n|\s){1,4}){10}|[A-Za-z0-9+/]{2000})")
"""Ten lines of base64, or a long one: an attachment of a mail, a picture in a notebook."""
ENCODED = "it holds base64, such as pictures or attachments, which is read letter by letter: take the text out first"


class Refusal(ValueError):
    """A refusal of a document whose words are complete."""


def told(*counts: tuple[int, str]) -> list[str]:
    """Lines that tell how many of what is lost: "#" is the number, "*" its noun's s."""
    return [words.replace("#", str(n)).replace("*", "s" * (n != 1)) for n, words in counts if n]


def is_encoded(text: str) -> bool:
    """Whether a text holds base64: long runs of capitals, small letters and digits alike."""
    return any(all(re.search(kind, run[0]) for kind in ("[A-Z]", "[a-z]", "[0-9]")) for run in _BASE64.finditer(text))


def letters(text: str) -> str:
    """The letters and digits of a text, with a mark where digits are apart: converters change blanks and marks."""
    return re.sub(r"[^\w\0]|_", "", re.sub(r"(?<=\d)[\W_]+(?=\d)", "\0", text))


def missing(passages: Iterable[tuple[str, list[str]]], text: str) -> list[str]:
    """Passages that a text lacks. A number is there as a whole: no digits stand next to it.

    Args:
        passages: each whole, and in pieces, between which something else may stand in the text. They come mostly in the
            order of the text.
    """
    shown, at, lost = letters(text), 0, []

    def joined(place: int) -> bool:
        """Whether digits stand on both sides of a place."""
        return 0 < place < len(shown) and shown[place - 1 : place + 1].isdecimal()

    def find(passage: str, start: int, end: int | None = None) -> int:
        place = shown.find(passage, start, end)
        while place >= 0 and passage and (joined(place) or joined(place + len(passage))):
            place = shown.find(passage, place + 1, end)
        return place

    for whole, pieces in passages:
        for passage in [letters(whole)] if letters(whole) in shown[at : at + NEAR] else map(letters, pieces):
            place = find(passage, at, at + NEAR + len(passage))
            place = find(passage, at) if place < 0 else place
            if place >= 0:
                at = place + len(passage)
            elif find(passage, 0) < 0:
                lost.append(whole)
                break
    return lost
