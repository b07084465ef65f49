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


def counted(number: int, one: str, many: str = "") -> str:
    """A number with its noun: "1 header", "2 headers"."""
    return f"{number} {one if number == 1 else many or f'{one}s'}"


def is_encoded(text: str) -> bool:
    """Whether a text holds base64: long runs of capitals, small letters and digits alike."""
    return any(all(re.search(kind, run[0]) for kind in ("[A-Z]", "[a-z]", "[0-9]")) for run in _BASE64.finditer(text))


def letters(text: str) -> str:
    """The letters and digits of a text: converters change blanks and marks."""
    return re.sub(r"[\W_]+", "", text)


def missing(passages: Iterable[tuple[str, list[str]]], text: str) -> list[str]:
    """Passages that a text lacks.

    Args:
        passages: each whole, and in pieces, between which something else may stand in the text. They come mostly in the
            order of the text.
    """
    shown, at, lost = letters(text), 0, []
    for whole, pieces in passages:
        for passage in [letters(whole)] if letters(whole) in shown[at : at + NEAR] else map(letters, pieces):
            place = shown.find(passage, at, at + NEAR + len(passage))
            place = shown.find(passage, at) if place < 0 else place
            if place >= 0:
                at = place + len(passage)
            elif passage not in shown:
                lost.append(whole)
                break
    return lost
