"""Pages of a PDF as text, through PDFium: upright, columns one after another, with the values of forms and notes."""

from __future__ import annotations

import ctypes
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice, pairwise

import pypdfium2.raw as pdfium
from pypdfium2 import PdfDocument, PdfiumError, PdfPage

from .losses import Refusal, loss_lines
from .pdf_lines import GUTTER, LETTER, Box, Piece, in_reading_order, marked, pieces_of

HYPHEN = "\ufffe"
"""PDFium's mark for one at the end of a line, whose next line it has joined."""
_LETTER = r"[^\W\d_]"
_UNKNOWN = r"[\x00-\x08\x0e-\x1f\x7f-\x9f\ue000-\uf8ff\ufffd]"
"""Characters that a font draws and has no Unicode for."""
_MORE = re.compile(rb"\d\s+\d+\s+obj\b|\bxref\b|startxref")
"""Pattern of content after the %%EOF of an earlier state, in a file that was cut off."""
ROWS, WIDE = 4, 18
"""Rows that two columns have together, at least, and letters of their lines: those of a table are shorter."""


def pdf_text(data: bytes, name: str, losses: list[str]) -> str:
    """The pages of a PDF, with blank lines in between; its losses are added to ``losses``."""
    begin, end = data.find(b"%PDF-"), data.rfind(b"%%EOF") + 5
    whole = re.search(rb"/Linearized\b[^>]*/L\s+(\d+)", data[begin : begin + 1024])
    if end < 5 or _MORE.search(data, end) or (whole and len(data) - begin < int(whole[1])):
        # PDFium would give the pages that are there, and be silent on the rest.
        raise Refusal(f"{name} is damaged: its end is missing; get it again, or repair it with qpdf")
    try:
        document = PdfDocument(data[begin:end])  # mails, servers and file systems leave bytes on either side
    except PdfiumError as error:
        if error.err_code in (pdfium.FPDF_ERR_PASSWORD, pdfium.FPDF_ERR_SECURITY):
            raise Refusal(f"{name} is encrypted: save it without a password, such as with qpdf --decrypt") from error
        raise
    with document:
        if document.get_formtype():
            document.init_forms()
        pages, pictures, drawings = [], 0, 0
        for number in range(len(document)):
            page = document[number]
            there, drawn = pictures_of(page)
            pictures, drawings = pictures + there, drawings + drawn
            pages.append(_page(document, page))
            page.close()
        if not "".join(pages).strip():
            raise Refusal(f"{name} has no text on its {len(pages)} pages: run OCR first, such as ocrmypdf")
        # A page's number alone, such as "- 7 -" or "iv", is not its text.
        blank = sum(not re.search(_LETTER, re.sub(r"\b[ivxlc]+\b", "", page)) for page in pages)
        unknown = [number for number, page in enumerate(pages, 1) for _ in re.findall(_UNKNOWN, page)]
        where = f"# character* without Unicode, the first on page {unknown[0] if unknown else 0}: run OCR"
        scanned = f"# of {len(pages)} pages have no text but numbers: run OCR, such as ocrmypdf, if they are scanned"
        losses += loss_lines((blank, scanned), (len(unknown), where))
        losses += loss_lines(
            (document.get_formtype() == pdfium.FORMTYPE_XFA_FULL, "its form (XFA) is left out: print it to PDF"),
            (pictures, "# picture* left out"), (drawings, "drawings, such as charts, on # page* left out"),
            (document.count_attachments(), "# attached file* left out"),
        )  # fmt: skip
    return _joined(pages)


def _joined(pages: list[str]) -> str:
    """Pages one after another; words that a line or a page breaks are joined, nearly always as one word."""
    for n, page in enumerate(pages):
        # A page's number stands behind the last line, which PDFium takes for the rest of a broken word.
        page = re.sub(rf"(?<={_LETTER})[-{HYPHEN}](?=(?:\d{{1,4}}|[ivxlc]+)\s*$)", f"{HYPHEN}\n", page)
        end = re.search(rf"(?<={_LETTER})[-{HYPHEN}](?=(?:\n\W*\d{{1,4}}\W*)?$)", page)
        rest = re.match(rf"{_LETTER}+", pages[n + 1]) if n + 1 < len(pages) else None
        if end and rest and rest[0].islower():
            page = page[: end.start()] + HYPHEN + rest[0] + page[end.end() :]
            pages[n + 1] = re.sub(r"^[^\w\n]*[ \n]?", "", pages[n + 1][rest.end() :], count=1)
        pages[n] = page
    text = "\n\n".join(pages)
    # state-of-\nthe-art, X-\nRay and self-\nDriving keep theirs.
    text = re.sub(rf"(-{_LETTER}+){HYPHEN}(?={_LETTER})", r"\1-", text)
    text = re.sub(rf"(?<!\w)({_LETTER}){HYPHEN}(?={_LETTER})", r"\1-", text)
    text = re.sub(rf"(?<={_LETTER}){HYPHEN}(?={_LETTER})", lambda mark: _hyphen(text, mark), text)
    return text.replace(HYPHEN, "-")


def _hyphen(text: str, mark: re.Match[str]) -> str:
    before, after = text[mark.start() - 1], text[mark.end()]
    return "-" if after.isupper() and not before.isupper() else ""


def _page(document: PdfDocument, page: PdfPage) -> str:
    """The text of a page, then its form fields, then its notes."""
    shown = page.get_textpage()
    angles = Counter(
        round(pdfium.FPDFText_GetCharAngle(shown, at) / 1.5707963) % 4 for at in range(0, shown.count_chars(), 9)
    )
    turn = (4 - angles.most_common(1)[0][0]) % 4 * 90 if angles else 0
    if page.get_rotation() != turn:  # lines come in their order where they are upright
        shown.close()
        page.set_rotation(turn)
        shown = page.get_textpage()
    text = shown.get_text_range()
    if LETTER.search(text):
        text = text if turn else in_reading_order(shown, text)
    else:
        pieces = marked(pieces_of(shown, turn))
        text = _ordered(pieces) or "".join(one.gap + one.text for one in pieces)
    shown.close()
    notes = "\n".join(_annotations(document, page))
    text = text.replace("\r\n", "\n").encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    text = re.sub("[\ufb00-\ufb06]", lambda ligature: unicodedata.normalize("NFKC", ligature[0]), text)
    return f"{text.rstrip()}\n\n{notes}" if notes else text


def _annotations(document: PdfDocument, page: PdfPage) -> Iterator[str]:
    """Lines of a page's fields that are filled in and of its notes."""
    form = document.formenv
    for number in range(pdfium.FPDFPage_GetAnnotCount(page)):
        note = pdfium.FPDFPage_GetAnnot(page, number)
        kind = pdfium.FPDFAnnot_GetSubtype(note)
        if kind == pdfium.FPDF_ANNOT_WIDGET and form is not None:
            named = _words(partial(pdfium.FPDFAnnot_GetFormFieldAlternateName, form, note))
            named = named or _words(partial(pdfium.FPDFAnnot_GetFormFieldName, form, note))
            value = _words(partial(pdfium.FPDFAnnot_GetFormFieldValue, form, note))
            field = pdfium.FPDFAnnot_GetFormFieldType(form, note)
            if field in (pdfium.FPDF_FORMFIELD_CHECKBOX, pdfium.FPDF_FORMFIELD_RADIOBUTTON):
                yield f"[{'x' if pdfium.FPDFAnnot_IsChecked(form, note) else ' '}] {named}"
            elif value and field != pdfium.FPDF_FORMFIELD_PUSHBUTTON:
                yield f"{named}: {value}"
        elif kind not in (pdfium.FPDF_ANNOT_LINK, pdfium.FPDF_ANNOT_POPUP, pdfium.FPDF_ANNOT_WIDGET):
            words = _words(partial(pdfium.FPDFAnnot_GetStringValue, note, b"Contents"))
            if words:
                yield f"Note: {words}"
        pdfium.FPDFPage_CloseAnnot(note)


def _words(ask: Callable[..., int]) -> str:
    """The text that a function of PDFium writes into a buffer, of as many bytes as it says."""
    size = ask(None, 0)
    buffer = (ctypes.c_ushort * (size // 2 + 1))()
    ask(buffer, size)
    return bytes(buffer)[: max(0, size - 2)].decode("utf-16-le", "replace").strip()


# ---- columns ---------------------------------------------------------------------------------------------------------


def _ordered(pieces: list[Piece]) -> str:
    """The text of a page whose columns are drawn row by row; '' for other pages."""
    rows = _rows([piece.box for piece in pieces])
    lines = _columns(rows, pieces) if sum(len(row) > 1 for row in rows) >= ROWS else None
    return re.sub(rf"(?<={_LETTER})[-{HYPHEN}]\n(?={_LETTER})", HYPHEN, "\n".join(lines or []))


def _row(row: list[int], pieces: list[Piece]) -> str:
    """The text of pieces side by side, which may be parts of one word."""
    text = pieces[row[0]].text
    for before, after in pairwise(pieces[n] for n in row):
        near = not re.search(r"\s", after.gap) and after.box[0] - before.box[2] < 0.25 * before.height
        text += " " * (not near) + after.text
    return text


def _rows(boxes: list[Box]) -> list[list[int]]:
    """Numbers of the boxes in each row. A row is drawn from left to right at one height."""
    rows: list[list[int]] = []
    for n, (left, bottom, _, top) in enumerate(boxes):
        if rows:
            _, low, right, high = boxes[rows[-1][-1]]
            if left >= right - 1 and min(top, high) - max(bottom, low) > 0.5 * min(top - bottom, high - low):
                rows[-1].append(n)
                continue
        rows.append([n])
    return rows


def _columns(rows: list[list[int]], pieces: list[Piece]) -> list[str] | None:
    """Lines of a page, column after column where rows share a gutter and both sides are running text; None without any."""
    # A table has gutters too, but must be read row by row. Its cells are short and no sentence runs on, so ``_prose`` decides.
    lines, at, known = [], 0, False
    while at < len(rows):
        end, middle = _gutter(rows, at, [piece.box for piece in pieces])
        sides = [
            [part for row in rows[at:end] if (part := [n for n in row if (pieces[n].box[0] >= middle) == right])]
            for right in (False, True)
        ]
        if end - at >= ROWS and all(_prose([_row(row, pieces) for row in side]) for side in sides):
            known = True
            for side in sides:  # a side may have columns of its own: three columns are two gutters
                lines += _columns(side, pieces) or [_row(row, pieces) for row in side]
            at = end
        else:
            lines.append(_row(rows[at], pieces))
            at += 1
    return lines if known else None


def _gutter(rows: list[list[int]], at: int, boxes: list[Box]) -> tuple[int, float]:
    """The end of the rows from ``at`` on that leave one vertical strip free, and the middle of the strip (points)."""
    row = rows[at]
    gaps = [(boxes[b][0] - boxes[a][2], boxes[a][2], boxes[b][0]) for a, b in pairwise(row)]
    if not gaps or max(gaps)[0] < GUTTER:
        return at, 0.0
    # Start from the widest gap of the first row. Each row may narrow the strip; rows end where it is too narrow.
    _, low, high = max(gaps)
    for end in range(at, len(rows)):
        middle = (low + high) / 2
        left = max([low, *(boxes[n][2] for n in rows[end] if boxes[n][0] < middle)])
        right = min([high, *(boxes[n][0] for n in rows[end] if boxes[n][0] >= middle)])
        if right - left < GUTTER:
            return end, middle
        low, high = left, right
    return len(rows), (low + high) / 2


def _prose(lines: list[str]) -> bool:
    """Whether lines are running text: long, and often continued within a sentence."""
    on = sum(line[:1].islower() for line in lines)
    return len(lines) >= ROWS and sum(map(len, lines)) >= WIDE * len(lines) and 4 * on >= len(lines)


LEAST, WHOLE = 20.0, 0.8
"""Minimum side of a picture in points (smaller ones are bullets and rules); and minimum share of a page for a
scanned page, whose text is on top of its picture."""
SHAPES, LOOKED_AT = 3, 5000
"""Slanted or curved shapes, or bars, that make a drawing, at least; and objects of a page that are looked at, at most."""


def pictures_of(page: PdfPage) -> tuple[int, bool]:
    """The number of pictures on a page, and whether it has a drawing: lines that slant, curves, or bars of several lengths."""
    pictures = slanted = 0
    filled, stroke = ctypes.c_int(), ctypes.c_int()
    bars: dict[tuple[str, int], set[int]] = defaultdict(set)
    width, height = page.get_size()
    kinds = (pdfium.FPDF_PAGEOBJ_IMAGE, pdfium.FPDF_PAGEOBJ_PATH)
    for one in islice(page.get_objects(filter=kinds, max_depth=5), LOOKED_AT + 2):
        left, bottom, right, top = one.get_bounds()
        wide, high = right - left, top - bottom
        if one.type == pdfium.FPDF_PAGEOBJ_IMAGE:
            pictures += min(wide, high) >= LEAST and wide * high < WHOLE * width * height
        elif min(wide, high) > 2 and wide * high < WHOLE * width * height and slanted < SHAPES:
            slanted += _slants(one.raw)
            pdfium.FPDFPath_GetDrawMode(one.raw, filled, stroke)
            if filled.value:
                bars["up", round(bottom)].add(round(high))
                bars["right", round(left)].add(round(wide))
    return pictures, slanted >= SHAPES or any(len(lengths) >= SHAPES for lengths in bars.values())


def _slants(path: object) -> bool:
    """Whether a shape has a curve, or a side that is neither level nor upright."""
    before: tuple[float, float] | None = None
    for number in range(min(pdfium.FPDFPath_CountSegments(path), LOOKED_AT)):
        segment = pdfium.FPDFPath_GetPathSegment(path, number)
        x, y = ctypes.c_float(), ctypes.c_float()
        pdfium.FPDFPathSegment_GetPoint(segment, x, y)
        kind = pdfium.FPDFPathSegment_GetType(segment)
        slants = before is not None and min(abs(x.value - before[0]), abs(y.value - before[1])) > 1
        if kind == pdfium.FPDF_SEGMENT_BEZIERTO or (kind == pdfium.FPDF_SEGMENT_LINETO and slants):
            return True
        before = x.value, y.value
    return False
