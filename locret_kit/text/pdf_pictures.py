"""Pictures and drawings of a PDF, which its text does not have: they are counted, so that their loss can be told."""

from __future__ import annotations

import ctypes
from collections import defaultdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pypdfium2 import PdfPage

LEAST, WHOLE = 20.0, 0.8
"""Points of a picture's sides, at least: smaller ones are bullets and rules; and the share of a page from which on a picture
is the page itself, scanned, whose text lies over it."""
SHAPES, LOOKED_AT = 3, 5000
"""Slanted or curved shapes, or bars, that make a drawing, at least; and objects of a page that are looked at, at most."""


def pictures_of(page: PdfPage) -> tuple[int, bool]:
    """The number of pictures on a page, and whether it has a drawing: lines that slant, curves, or bars of several lengths."""
    import pypdfium2.raw as pdfium

    pictures = slanted = 0
    bars: dict[tuple[str, int], set[int]] = defaultdict(set)
    width, height = page.get_size()
    for number, one in enumerate(
        page.get_objects(filter=(pdfium.FPDF_PAGEOBJ_IMAGE, pdfium.FPDF_PAGEOBJ_PATH), max_depth=5)
    ):
        left, bottom, right, top = one.get_bounds()
        wide, high = right - left, top - bottom
        if one.type == pdfium.FPDF_PAGEOBJ_IMAGE:
            pictures += min(wide, high) >= LEAST and wide * high < WHOLE * width * height
        elif min(wide, high) > 2 and wide * high < WHOLE * width * height and slanted < SHAPES:
            slanted += _slants(one.raw)
            if _is_filled(one.raw):
                bars["up", round(bottom)].add(round(high))
                bars["right", round(left)].add(round(wide))
        if number > LOOKED_AT:
            break
    return pictures, slanted >= SHAPES or any(len(lengths) >= SHAPES for lengths in bars.values())


def _is_filled(path: object) -> bool:
    import pypdfium2.raw as pdfium

    mode, stroke = ctypes.c_int(), ctypes.c_int()
    pdfium.FPDFPath_GetDrawMode(path, mode, stroke)
    return bool(mode.value)


def _slants(path: object) -> bool:
    """Whether a shape has a curve, or a side that is neither level nor upright."""
    import pypdfium2.raw as pdfium

    before: tuple[float, float] | None = None
    for number in range(min(pdfium.FPDFPath_CountSegments(path), LOOKED_AT)):
        segment = pdfium.FPDFPath_GetPathSegment(path, number)
        x, y = ctypes.c_float(), ctypes.c_float()
        pdfium.FPDFPathSegment_GetPoint(segment, x, y)
        kind = pdfium.FPDFPathSegment_GetType(segment)
        if kind == pdfium.FPDF_SEGMENT_BEZIERTO:
            return True
        if (
            kind == pdfium.FPDF_SEGMENT_LINETO
            and before
            and min(abs(x.value - before[0]), abs(y.value - before[1])) > 1
        ):
            return True
        before = x.value, y.value
    return False
