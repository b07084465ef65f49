"""What a PDF draws, piece by piece, with marks for what stands higher or lower than its line: powers, notes, fractions."""

from __future__ import annotations

import ctypes
import math
import re
from typing import NamedTuple

import pypdfium2.raw as pdfium
from pypdfium2 import PdfTextPage

from .losses import fraction, marks

Box = tuple[float, float, float, float]
"""Left, bottom, right and top, in points."""
GUTTER = 6.0
"""Points between two columns, at least."""
SMALL = (0.4, 0.92)
"""Height of a raised or lowered text, as a share of its line's: what is smaller stands beside a large initial."""
HIGHER, LOWER = (0.1, 0.9), (-0.6, -0.04)
"""How much higher and lower they stand, as shares of their line's height."""
APART, NEAR = 0.3, 0.15
"""Space between two numbers, and between two words, at least, as a share of their height."""

SCRIPT = re.compile(r"[^\s\u2e80-\uffff]{1,20}")
"""A text that may be raised or lowered: in Chinese or Japanese it is a smaller word, mostly."""
BEFORE = re.compile(r".*[\w)\]}.,;:?!%*'\"\u2018-\u201d]", re.DOTALL)
"""What a raised or lowered text stands beside."""


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
    """What a page draws at once of its lines, in its order; in pieces where words are farther from each other than they are
    high, as at the gutter of columns whose lines are drawn as one."""
    text, count = shown.get_text_range(), shown.count_chars()
    whole = len(text) == count  # else some have no Unicode
    text = text if whole else "".join(chr(pdfium.FPDFText_GetUnicode(shown, at)) for at in range(count))
    raw, found = shown.raw, pdfium.FS_RECTF()
    x, y = ctypes.c_double(), ctypes.c_double()
    address = ctypes.cast(pdfium.FPDFText_GetTextObject, ctypes.c_void_p).value or 0
    drawn_by = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int)(address)
    page, matrix, size = ctypes.cast(raw, ctypes.c_void_p), pdfium.FS_MATRIX(), 0.0

    def box(at: int) -> Box:
        pdfium.FPDFText_GetLooseCharBox(raw, at, found)
        return turned(found.left, found.bottom, found.right, found.top, turn)

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
    """Pieces with the raised and lowered ones in those that they stand beside, as text with marks."""
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
    """The end of the pieces that stand beside one at its height, and their text; '' where they are more than a word."""
    first, text, end = pieces[at], pieces[at].text, at + 1
    while end < len(pieces):
        one, last = pieces[end], pieces[end - 1]
        space, shift = one.box[0] - last.box[2], abs(one.base - first.base) + abs(one.height - first.height)
        if "\n" in one.gap or shift > 0.2 * first.height or not -NEAR < space / first.height < APART:
            break
        text, end = text + one.text, end + 1
    return end, text if SCRIPT.fullmatch(text) else ""


def _place(one: Piece, base: Piece | None, last: Piece) -> str:
    """How a piece stands beside its line, whose last piece is ``last``: "^" or "_", "o" off it and as large, else ''."""
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
