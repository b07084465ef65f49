"""Pages of a PDF in scripts that run from right to left, in the order in which they are read.

A PDF draws letters in any order, and programs differ: some draw a line as it stands, some as it is read, some in pieces. So
letters are taken by their places, from the left, and put in reading order by the rules of the Unicode Bidirectional Algorithm
(UAX #9), backwards.
"""

from __future__ import annotations

import ctypes
import math
import re
import unicodedata
from bisect import bisect
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import pypdfium2.raw as pdfium
from pypdfium2 import PdfTextPage

LETTER = re.compile("[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufefc\U00010800-\U00010fff\U0001e800-\U0001efff]")
"""Characters of scripts that run from right to left."""
_OTHER_LETTER = re.compile(r"(?![\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufefc])[^\W\d_]")
_FORMS = re.compile("[\ufb1d-\ufd3d\ufd50-\ufdfc\ufe70-\ufefc]")
"""Shapes of letters at the beginning, in the middle and at the end of words, and ligatures."""
_KINDS = {"L": "L", "R": "R", "AL": "A", "EN": "n", "AN": "n", "CS": ",", "ES": "-", "ET": "%"}
_LAM, _ALEFS = "\u0644", "\u0622\u0623\u0625\u0627\u0671"
_OPENING, _CLOSING = "([{«", ")]}»"
_BRACKETS = frozenset(_OPENING + _CLOSING)
_FLIPPED = str.maketrans(_OPENING + _CLOSING, _CLOSING + _OPENING)
GAP = 0.1
"""Space between two words, at least, as a share of the font's size; the blanks that PDFium has stand within words too."""
SAME_LINE = 0.6
"""Distance of base lines within a line, at most, as a share of the font's size."""

NEAR = 4
"""Letters on either side of a mark to one of which it belongs."""


@dataclass(frozen=True)
class Drawn:
    """A character and its place in points: its origin, its left and right edges, and the font's size."""

    number: int
    text: str
    x: float
    y: float
    left: float
    right: float
    size: float

    @property
    def middle(self) -> float:
        """Middle between the edges."""
        return (self.left + self.right) / 2

    @property
    def is_mark(self) -> bool:
        """Whether it stands above or below a letter."""
        return bool(unicodedata.combining(self.text[:1] or " "))


def in_reading_order(shown: PdfTextPage, text: str) -> str:
    """The text of an upright page, as PDFium has it, with the lines that hold letters of right-to-left scripts put in order."""
    if not LETTER.search(text):
        return text
    rtl = len(LETTER.findall(text)) > len(_OTHER_LETTER.findall(text))
    characters = [chr(pdfium.FPDFText_GetUnicode(shown, at)) for at in range(shown.count_chars())]
    lines, first = [], 0
    for at, character in enumerate([*characters, "\n"]):
        if character != "\n":
            continue
        if LETTER.search("".join(characters[first:at])):
            drawn = [_drawn(shown, n, characters[n]) for n in range(first, at) if not characters[n].isspace()]
            lines += [reading_order(from_left(line), rtl) for line in _by_base_line(drawn)]
        else:
            lines.append(shown.get_text_range(first, at - first).rstrip("\r\n"))
        first = at + 1
    return "\n".join(lines)


def _drawn(shown: PdfTextPage, at: int, text: str) -> Drawn:
    """A character of a page by its number."""
    x, y, left, right, low, high = (ctypes.c_double() for _ in range(6))
    matrix, loose = pdfium.FS_MATRIX(), pdfium.FS_RECTF()
    pdfium.FPDFText_GetCharOrigin(shown, at, x, y)
    pdfium.FPDFText_GetCharBox(shown, at, left, right, low, high)
    pdfium.FPDFText_GetLooseCharBox(shown, at, loose)
    pdfium.FPDFText_GetMatrix(shown, at, matrix)
    size = pdfium.FPDFText_GetFontSize(shown, at) * math.hypot(matrix.c, matrix.d)
    text = unicodedata.normalize("NFKC", text).strip() if _FORMS.match(text) else text
    return Drawn(at, text, round(x.value, 1), y.value, min(left.value, loose.left), max(right.value, loose.right), size)


def _by_base_line(drawn: list[Drawn]) -> Iterator[list[Drawn]]:
    """Characters of a line, apart where the next ones stand on another base line."""
    line: list[Drawn] = []
    for one in drawn:
        if line and abs(one.y - line[-1].y) > SAME_LINE * max(one.size, line[-1].size):
            yield line
            line = []
        line.append(one)
    if line:
        yield line


def from_left(line: list[Drawn]) -> list[str]:
    """Characters from the left, each with its marks behind it, and blanks where there is room for one."""

    def place(one: Drawn) -> tuple[float, float, int]:
        return one.x, one.middle, -one.number if LETTER.match(one.text) else one.number

    letters = sorted((one for one in line if not one.is_mark), key=place)
    for n, (left, right) in enumerate(pairwise(letters)):
        if left.x == right.x and left.text == _LAM and right.text in _ALEFS:  # of one glyph, which is read lam, alef
            letters[n : n + 2] = right, left
    if not letters:
        return ["".join(one.text for one in line)]
    clusters, places = [[letter] for letter in letters], [letter.x for letter in letters]
    for mark in (one for one in line if one.is_mark):
        after = bisect(places, mark.x)
        near = range(max(0, after - NEAR), min(len(letters), after + NEAR))
        n = min(near, key=lambda n: (letters[n].x != mark.x, abs(letters[n].middle - mark.middle)))
        clusters[n].append(mark)
    visual, end = [], clusters[0][0].left
    for cluster in clusters:
        gap = min(one.left for one in cluster) - end
        visual += [" "] * (gap > GAP * cluster[0].size) + ["".join(one.text for one in cluster)]
        end = max(end, *(one.right for one in cluster))
    return visual


def reading_order(visual: list[str], rtl: bool) -> str:
    """A line in reading order.

    Args:
        visual: characters from the left, each with its marks behind it.
        rtl: whether the line as a whole runs from right to left.
    """
    kinds = "".join(
        "(" if one in _BRACKETS else _KINDS.get(unicodedata.bidirectional(one[:1] or " "), " ") for one in visual
    )
    if rtl:
        parts = _from_right(visual, kinds)
    else:
        parts, at = [], 0
        for run in re.finditer("[RA](?:[^L]*[RA])?", kinds):
            parts += visual[at : run.start()] + _from_right(visual[run.start() : run.end()], run[0])
            at = run.end()
        parts += visual[at:]
    # A bracket may be there as the character that looks like it: one that opens stands before a word, and has none before it.
    text = re.sub(rf"(?<![^\s{re.escape(_OPENING)}])[{re.escape(_CLOSING)}](?=\w)", _flip, "".join(parts))
    return re.sub(rf"(?<=[^\s{re.escape(_OPENING)}])[{re.escape(_OPENING)}](?!\w)", _flip, text)


def _flip(bracket: re.Match[str]) -> str:
    return bracket[0].translate(_FLIPPED)


def _from_right(visual: list[str], kinds: str) -> list[str]:
    """Characters from the right; words and numbers among them that run from left to right stay as they are."""
    # A range and a percentage run from left to right among Hebrew letters, and not among Arabic ones.
    number = "n(?:,?n)*" if "A" in kinds else "%*n(?:[,-]?n)*%*"
    parts, end = [], len(visual)
    for start, stop in reversed([run.span() for run in re.finditer(f"L(?:[^RA]*L)?(?:[^RA(]*n)?|{number}", kinds)]):
        parts += visual[stop:end][::-1] + visual[start:stop]
        end = start
    return parts + visual[:end][::-1]
