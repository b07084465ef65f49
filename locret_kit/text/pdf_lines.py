"""Lines of a PDF, from the pieces that it draws. Raised and lowered texts (powers, notes, fractions) get marks, and
right-to-left pages are put in reading order.

A PDF draws letters in any order, and programs differ: some draw a line in visual order, some in reading order, some
in pieces. So letters of right-to-left scripts are sorted by position, from the left, and then reversed by the rules
of the Unicode Bidirectional Algorithm (UAX #9).
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
from typing import NamedTuple

import pypdfium2.raw as pdfium
from pypdfium2 import PdfTextPage

from .losses import fraction, marks

Box = tuple[float, float, float, float]
"""Left, bottom, right and top, in points."""
GUTTER = 6.0
"""Points between two columns, at least."""
SMALL = (0.4, 0.92)
"""Height of a raised or lowered text as a share of its line's. Smaller text belongs to a large initial."""
HIGHER, LOWER = (0.1, 0.9), (-0.6, -0.04)
"""Distance of raised and lowered text from its line, as shares of the line's height."""
APART, NEAR = 0.3, 0.15
"""Space between two numbers, and between two words, at least, as a share of their height."""

SCRIPT = re.compile(r"[^\s\u2e80-\uffff]{1,20}")
"""A text that may be raised or lowered: in Chinese or Japanese it is a smaller word, mostly."""
BEFORE = re.compile(r".*[\w)\]}.,;:?!%*'\"\u2018-\u201d]", re.DOTALL)
"""Pattern of text that a raised or lowered text may follow."""


class Piece(NamedTuple):
    """A part of a line that is drawn at once: its box, its base line, its font's size, its text, and the blanks before it."""

    box: Box
    base: float
    height: float
    text: str
    gap: str = ""

    def joined(self, other: Piece, text: str) -> Piece:
        """A piece with another one, and its text."""
        a, b = self.box, other.box
        return self._replace(box=(min(a[0], b[0]), min(a[1], b[1]), max(a[2], b[2]), max(a[3], b[3])), text=text)


def turned(left: float, bottom: float, right: float, top: float, turn: int) -> Box:
    """A box on a page that is turned by ``turn`` degrees."""
    for _ in range(turn // 90):
        left, bottom, right, top = bottom, -right, top, -left
    return left, bottom, right, top


def pieces_of(shown: PdfTextPage, turn: int) -> list[Piece]:
    """The pieces of lines that a page draws, in its order. Pieces are split at gaps wider than the letters are high,
    such as the gutter between columns that are drawn as one line."""
    text, count = shown.get_text_range(), shown.count_chars()
    whole = len(text) == count  # else some have no Unicode
    text = text if whole else "".join(chr(pdfium.FPDFText_GetUnicode(shown, at)) for at in range(count))
    raw = shown.raw
    x, y = ctypes.c_double(), ctypes.c_double()
    address = ctypes.cast(pdfium.FPDFText_GetTextObject, ctypes.c_void_p).value or 0
    drawn_by = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int)(address)
    page, matrix, size = ctypes.cast(raw, ctypes.c_void_p), pdfium.FS_MATRIX(), 0.0

    def box(at: int) -> Box:
        left, bottom, right, top = shown.get_charbox(at, loose=True)
        return turned(left, bottom, right, top, turn)

    def apart(at: int) -> bool:
        """Whether a digit is no part of the number before it, by its place."""
        if not text[at - 1 : at + 1].isdecimal() or at == 0:
            return False
        before, after = box(at - 1), box(at)
        return not before[1] - before[3] < after[0] - before[2] < APART * (after[3] - after[1])

    pieces: list[Piece] = []
    end, last = 0, None  # where the last word ended, and the object that drew it
    for word in re.finditer(r"\S+", text):
        first = word.start()
        drawn = drawn_by(page, first)
        while first < word.end():
            by, stop = drawn, first + 1
            while stop < word.end() and (drawn := drawn_by(page, stop)) == by and not apart(stop):
                stop += 1
            if by != last:
                pdfium.FPDFText_GetMatrix(raw, first, matrix)
                size = pdfium.FPDFText_GetFontSize(raw, first) * math.hypot(matrix.c, matrix.d)
            pdfium.FPDFText_GetCharOrigin(raw, first, x, y)
            base = turned(x.value, y.value, 0, 0, turn)[1]
            said = text[first:stop] if whole else shown.get_text_range(first, stop - first)
            one = Piece(box(first), base, size, said, " " if apart(first) else text[end:first])
            one = one if stop == first + 1 else one.joined(one._replace(box=box(stop - 1)), one.text)
            if by == last and "\n" not in one.gap and one.box[0] - pieces[-1].box[2] <= max(GUTTER, pieces[-1].height):
                pieces[-1] = pieces[-1].joined(one, pieces[-1].text + one.gap + one.text)
            elif said:
                pieces.append(one)
                last = by
            first = end = stop
    return pieces


def marked(pieces: list[Piece]) -> list[Piece]:
    """Merge raised and lowered pieces into their neighbours, as text with marks."""
    out: list[Piece] = []
    base, at = None, 0  # the last piece that stands on the line
    while at < len(pieces):
        one = pieces[at]
        end, text = _level(pieces, at)
        last = out[-1] if out else one
        mark = _place(one, base, last)
        if base and mark and text:
            before, near = last.text[-1], one.box[0] - last.box[2] < NEAR * base.height
            below, under = _level(pieces, end) if end < len(pieces) else (end, "")
            slash = mark == "^" and end + 1 < len(pieces) and pieces[end].text in ("/", "\u2044")
            if slash and pieces[end + 1].height < SMALL[1] * base.height:
                below, under = _level(pieces, end + 1)
            elif not (under and mark in "^o" and _under(pieces[at:end], pieces[end:below], base)) or (
                near and re.match(r"[^\W\d]|[)\]]", before)
            ):
                under = ""
            if under and (mark == "^" or (text + under).isdecimal()):
                text, end = " " * (before.isdecimal() or not near) + fraction(text, under), below
            elif mark != "o" and BEFORE.fullmatch(last.text):
                after = pieces[end].text[0] if end < len(pieces) and not pieces[end].gap else ""
                begin, close = marks(mark, text, before, after)
                text = begin + text + close if begin else " " * (" " in one.gap) + text
            else:
                text = ""
            if text:
                for other in pieces[at:end]:
                    last = last.joined(other, last.text)
                out[-1] = last._replace(text=last.text + text)
                at = end
                continue
        if base and last is not base and abs(one.base - base.base) < HIGHER[0] * base.height:  # back on the line
            space = one.box[0] - last.box[2]
            if "\n" in one.gap and space > -1:
                one = one._replace(gap=" " * (" " in one.gap or space > NEAR * base.height))
        # A note's number before the note.
        if not mark and len(text) in (1, 2, 3) and (one.gap or not at) and end < len(pieces):
            follower, right = pieces[end], pieces[end - 1].box[2]
            here = follower._replace(box=(one.box[0], 0, one.box[0], 0))
            if abs(follower.box[0] - right) < 0.5 * follower.height and _place(one, here, here) == "^":
                begin, close = marks("^", text, "", follower.text[0])
                one = one.joined(pieces[end - 1], begin + text + close)
                pieces[end] = follower._replace(gap="" if "\n" in follower.gap else follower.gap)
                at = end - 1
        base = one
        out.append(one)
        at += 1
    return out


def _level(pieces: list[Piece], at: int) -> tuple[int, str]:
    """The end of the adjacent pieces at the same height, and their text; '' if they are more than one word."""
    first, text, end = pieces[at], pieces[at].text, at + 1
    while end < len(pieces):
        one, last = pieces[end], pieces[end - 1]
        space, shift = one.box[0] - last.box[2], abs(one.base - first.base) + abs(one.height - first.height)
        if "\n" in one.gap or shift > 0.2 * first.height or not -NEAR < space / first.height < APART:
            break
        text, end = text + one.text, end + 1
    return end, text if SCRIPT.fullmatch(text) else ""


def _place(one: Piece, base: Piece | None, last: Piece) -> str:
    """Position of a piece relative to its line, whose last piece is ``last``: "^" raised, "_" lowered, "o" off the
    line at full size, '' otherwise."""
    if base is None or not base.height:
        return ""
    tall = base.height
    rise, size = (one.base - base.base) / tall, one.height / tall
    left = one.box[0]
    if not base.box[2] - 0.1 * tall <= left <= last.box[2] + 0.5 * tall:
        return "o" if HIGHER[0] < rise < HIGHER[1] and 0 < left - last.box[2] < 2 * tall else ""
    if not SMALL[0] < size < SMALL[1]:
        return "o" if HIGHER[0] < rise < HIGHER[1] and size < 1.1 else ""
    return "^" if HIGHER[0] < rise < HIGHER[1] else "_" if LOWER[0] < rise < LOWER[1] else ""


def _under(above: list[Piece], below: list[Piece], base: Piece) -> bool:
    """Whether pieces stand under other ones, and the line runs between them."""
    left, right = max(above[0].box[0], below[0].box[0]), min(above[-1].box[2], below[-1].box[2])
    wide = min(part[-1].box[2] - part[0].box[0] for part in (above, below))
    rise = (below[0].base - base.base) / base.height
    return right - left > 0.5 * wide and 1.5 * LOWER[0] < rise < 0


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

BESIDE = 4
"""Distance in letters between a mark and its letter, on either side."""


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
    """A page's character, by number, with its place."""
    x, y, matrix = ctypes.c_double(), ctypes.c_double(), pdfium.FS_MATRIX()
    pdfium.FPDFText_GetCharOrigin(shown, at, x, y)
    (left, _, right, _), loose = shown.get_charbox(at), shown.get_charbox(at, loose=True)
    pdfium.FPDFText_GetMatrix(shown, at, matrix)
    size = pdfium.FPDFText_GetFontSize(shown, at) * math.hypot(matrix.c, matrix.d)
    text = unicodedata.normalize("NFKC", text).strip() if _FORMS.match(text) else text
    return Drawn(at, text, round(x.value, 1), y.value, min(left, loose[0]), max(right, loose[2]), size)


def _by_base_line(drawn: list[Drawn]) -> Iterator[list[Drawn]]:
    """Characters of a line, split where the base line changes."""
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
        near = range(max(0, after - BESIDE), min(len(letters), after + BESIDE))
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
