"""Marks for numbers of a PDF that stand higher or lower than their line: exponents, marks of notes, stacked fractions."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from .raised import marks

if TYPE_CHECKING:
    from pypdfium2 import PdfTextPage

Box = tuple[float, float, float, float]
"""Left, bottom, right and top, in points."""
Edit = tuple[int, int, str]
"""The first of some characters, the one after the last, and what stands in their place."""
SMALL = 0.92
"""Height of a raised or lowered number, at most, as a share of its line's."""
HIGHER, LOWER = (0.1, 0.9), (-0.6, -0.04)
"""How much higher and lower numbers stand, as shares of their line's height."""
APART = 0.3
"""Space between the digits of a number, at most, as a share of their height."""
SIGNS = "+-\u2212"


def turned(box: Box, turn: int) -> Box:
    """A box on a page that is turned by ``turn`` degrees."""
    left, bottom, right, top = box
    return {
        0: box, 90: (bottom, -right, top, -left), 180: (-right, -top, -left, -bottom), 270: (-top, left, -bottom, right)
    }[turn]  # fmt: skip


def letters_of(shown: PdfTextPage, turn: int) -> list[tuple[str, Box]]:
    """The characters of a page, with their boxes, as high as the font is."""
    import pypdfium2.raw as pdfium

    found, letters = pdfium.FS_RECTF(), []
    for number in range(shown.count_chars()):
        pdfium.FPDFText_GetLooseCharBox(shown, number, found)
        box = turned((found.left, found.bottom, found.right, found.top), turn)
        letters.append((chr(pdfium.FPDFText_GetUnicode(shown, number)), box))
    return letters


class DrawnNumbers:
    """The places of a page's characters, and the marks that these ask for."""

    def __init__(self, shown: PdfTextPage, letters: list[tuple[str, Box]], turn: int) -> None:
        self._shown, self._turn = shown, turn
        self._text, self._boxes = "".join(letter for letter, _ in letters), [box for _, box in letters]

    def edits(self) -> list[Edit]:
        """Changes of the text, in its order."""
        edits: list[Edit] = []
        text, at, base = self._text, 0, -1  # the last character that stands on the line
        while at < len(text):
            if text[at] in "\r\n":
                base = -1
            elif not text[at].isspace():
                end = self._number(at)
                change = self._change(base, at, end) if base >= 0 and end > at else None
                if change is not None:
                    edits += change[0]
                    at = change[1]
                    continue
                if text[max(0, at - 1) : at + 1].isdecimal() and at > 0 and self._apart(at):
                    edits.append((at, at, " "))
                base = at
            at += 1
        return edits

    def _number(self, at: int) -> int:
        """The end of the number that begins at a character, all of it in one place; the character itself where none does."""
        text, end = self._text, at + (self._text[at : at + 1] in [*SIGNS])
        if end >= len(text):
            return at
        (_, bottom, _, top) = self._boxes[at]
        while end < len(text) and (
            text[end].isdecimal() or (text[end] in ".," and end > at and text[end + 1 : end + 2].isdecimal())
        ):
            (_, low, _, high) = self._boxes[end]
            if abs(low - bottom) + abs(high - top) > 0.1 * (top - bottom):
                break
            end += 1
        return end if text[at:end].strip(SIGNS) else at

    def _change(self, base: int, at: int, end: int) -> tuple[list[Edit], int] | None:
        """The changes for a number that stands off the line of ``base``, and where the text goes on; None where it does not."""
        text, boxes = self._text, self._boxes
        high, tall = self._height(at), self._height(base)
        if not tall or (high >= SMALL * tall and abs(boxes[at][1] - boxes[base][1]) < HIGHER[0] * tall):
            return None
        rise, small = self._rise(base, at), high < SMALL * tall
        before = text[at - 1]
        if HIGHER[0] < rise < HIGHER[1]:
            below = self._next(end)
            stop = self._number(below) if below < len(text) else below
            if stop > below > end and LOWER[0] < self._rise(base, below) < 0 and self._above(at, end, below, stop):
                edits, rest = self._rest(base, stop)
                return [(at, at, " " * before.isdecimal()), (end, below, "/"), *edits], rest
            if small and text[below : below + 1] in ("/", "\u2044") and self._height(below + 1) < SMALL * tall:
                return [(at, at, " " * before.isdecimal()), (end, below, "")], max(self._number(below + 1), below + 1)
        if not small or not (HIGHER[0] < rise < HIGHER[1] or LOWER[0] < rise < LOWER[1]):
            return None
        first = at
        while text[first - 1].isspace():
            first -= 1
        if boxes[at][0] - boxes[first - 1][2] > 0.5 * tall or (first < at and rise < 0):
            return None
        edits, rest = self._rest(base, end)
        after = text[end : end + 1]
        begin, close = marks("^" if rise > 0 else "_", text[at:end], text[first - 1], after)
        return [(first, at, begin), (end, end, close), *edits], rest

    def _apart(self, at: int) -> bool:
        """Whether a digit is no part of the number before it, by its place."""
        gap = self._boxes[at][0] - self._boxes[at - 1][2]
        return not -self._height(at) < gap < APART * self._height(at)

    def _rest(self, base: int, end: int) -> tuple[list[Edit], int]:
        """The change that joins what follows to its line, where PDFium begins a new one there, and where the text goes on."""
        after = self._next(end)
        if after == end or after == len(self._text) or "\n" not in self._text[end:after]:
            return [], end
        if abs(self._rise(base, after)) > HIGHER[0] or self._boxes[after][0] < self._boxes[end - 1][2] - 1:
            return [], end
        apart = " " in self._text[end:after] or self._boxes[after][0] - self._boxes[end - 1][2] > 0.15 * self._height(
            base
        )
        return [(end, after, " " * apart)], after

    def _next(self, at: int) -> int:
        """The next character from a place on that is drawn."""
        while at < len(self._text) and self._text[at].isspace():
            at += 1
        return at

    def _above(self, at: int, end: int, below: int, stop: int) -> bool:
        """Whether one number stands above another one."""
        left, right = (
            max(self._boxes[at][0], self._boxes[below][0]),
            min(self._boxes[end - 1][2], self._boxes[stop - 1][2]),
        )
        return right - left > 0.3 * (self._boxes[at][2] - self._boxes[at][0])

    def _height(self, at: int) -> float:
        at = min(at, len(self._boxes) - 1)
        return self._boxes[at][3] - self._boxes[at][1]

    def _rise(self, base: int, at: int) -> float:
        """How much higher than another character's one's base line is, as a share of the other one's height."""
        return (self._base_line(at) - self._base_line(base)) / self._height(base)

    def _base_line(self, at: int) -> float:
        import pypdfium2.raw as pdfium

        x, y = ctypes.c_double(), ctypes.c_double()
        pdfium.FPDFText_GetCharOrigin(self._shown, at, x, y)
        return turned((x.value, y.value, x.value, y.value), self._turn)[1]
