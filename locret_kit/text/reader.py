"""Documents as text: plain text and Markdown as they are; a PDF through PDFium; HTML, Word and EPUB through markitdown.

The one converter of a format is called on bytes in memory, without plugins or guesses of another format. It opens no other
file and no connection: links and images of a document stay words. HTML, Word and EPUB become Markdown; a PDF keeps the lines
of its pages.
"""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from threading import Lock
from typing import BinaryIO
from zipfile import ZIP_DEFLATED, ZIP_STORED, ZipFile

from ..files import read_utf8
from ..naming import first_line, nearest

LIMIT = 256 * 2**20
"""Bytes of a document, at most; and bytes that a .docx or .epub, which is a zip archive, holds unpacked."""
CONVERTED = (".html", ".htm", ".pdf", ".docx", ".epub")
"""Extensions of the formats that need the extra ``documents``."""
KNOWN = (".txt", ".md", *CONVERTED)
_FOREIGN = (
    (b"\x1f\x8b", "a gzip file: unpack it first"),
    (b"\xd0\xcf\x11\xe0", "an old Office file, or one with a password: save it as .docx without a password"),
    (b"{\\rtf", "a rich-text file: save it as .docx"),
    (b"\xff\xfe", "text in UTF-16: save it as UTF-8"),
    (b"\xfe\xff", "text in UTF-16: save it as UTF-8"),
)
"""First bytes of formats that are not read, and what their owner is told."""
_LOGGERS = ("bs4", "charset_normalizer", "mammoth", "markitdown", "pypdfium2")
_TURN = Lock()
"""Held during a conversion: PDFium runs in one thread at a time, and warnings are silenced for the whole process."""


def may_be_text(first: bytes) -> bool:
    """Whether a file that begins with these bytes may be plain text: no format that ``read_stream`` knows by its first 8."""
    return not first.startswith((b"%PDF-", b"PK\x03\x04", *(start for start, _ in _FOREIGN)))


class _Refused(ValueError):
    """A refusal whose words are complete."""


def read_document(path: str | Path, *, limit: int = LIMIT) -> str:
    """The text of a file. Its format, ``limit`` and further errors are those of ``read_stream``.

    Raises:
        FileNotFoundError: nothing is there.
        ValueError: a folder, or what ``read_stream`` refuses.
    """
    path = Path(path)
    if path.is_dir():
        raise ValueError(f"{path} is a folder: name a file")
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist")
    with path.open("rb") as stream:
        return read_stream(stream, str(path), limit=limit)


def read_stream(stream: BinaryIO, name: str, *, limit: int = LIMIT) -> str:
    """The text of a byte stream that is called ``name``: an upload, or stdin.

    The format is the name's extension: .txt and .md (UTF-8; the exact text, without a byte-order mark), .html and .htm (UTF-8,
    or what they declare), .pdf, .docx, .epub. A name without an extension is read by its content: a PDF, a .docx, an .epub,
    or else plain text.

    Converted text has no spaces at the ends of lines and never two blank lines in a row. In that of a PDF, a page ends with
    a blank line, and the letters around a hyphen at the end of a line are joined: nearly always that is one word.

    Args:
        limit: bytes, at most, of the stream, and of a zip archive's entries together. Nothing beyond is read or unpacked.

    Raises:
        ValueError: one line that begins with the name: an unknown extension, another format than the extension says, too
            large, damaged, encrypted, not UTF-8, or no text, as in a scanned PDF.
        ImportError: the extra ``documents`` is not installed, and the format needs it.
    """
    suffix = Path(name).suffix.lower()
    if suffix and suffix not in KNOWN:
        raise ValueError(f"{name} must end in one of {', '.join(KNOWN)}.{nearest(suffix, KNOWN)}")
    data = b"".join(_pieces(stream, limit + 1))
    if len(data) > limit:
        raise ValueError(f"{name} is larger than limit={limit} bytes")
    if not data:
        raise ValueError(f"{name} is empty")
    try:
        text = _text(data, name, suffix, limit)
    except (_Refused, ImportError, MemoryError):
        raise
    except Exception as error:  # parsers of untrusted bytes raise whatever they stumble over
        raise ValueError(f"{name} is damaged{suffix and f', or no {suffix} file'}: {first_line(error)}") from error
    if not text.strip():
        raise ValueError(f"{name} has no text")
    return text


def _pieces(stream: BinaryIO, size: int) -> Iterator[bytes]:
    """At most ``size`` bytes of a stream, which may give fewer at a time than it is asked for."""
    while size and (piece := stream.read(min(size, 1 << 20))):
        size -= len(piece)
        yield piece


def _text(data: bytes, name: str, suffix: str, limit: int) -> str:
    """The text of a whole document, which may be blank."""
    kind = _format(data, suffix)
    if kind and kind not in CONVERTED:
        raise _Refused(f"{name} is {kind}")
    if suffix and kind != (suffix if suffix in (".pdf", ".docx", ".epub") else ""):
        if not kind:
            raise _Refused(f"{name} is damaged, or no {suffix} file: it begins with {data[:8]!r}")
        raise _Refused(f"{name} is a {kind} file by its content: rename it to {Path(name).with_suffix(kind).name}")
    if (suffix or kind) in CONVERTED:
        return _convert(data, name, suffix or kind, limit)
    try:
        return "".join(read_utf8(BytesIO(data)))
    except ValueError as error:
        raise _Refused(f"{name}: {error}") from error


def _format(data: bytes, suffix: str) -> str:
    """The format of the bytes: '.pdf', '.docx', '.epub', words for a format that is not read, or '' for text."""
    if data.startswith(b"%PDF-") or (suffix == ".pdf" and b"%PDF-" in data[:1024]):
        return ".pdf"
    if data.startswith(b"PK\x03\x04"):
        with ZipFile(BytesIO(data)) as archive:
            names = archive.namelist()
        if "META-INF/container.xml" in names:
            return ".epub"
        if any(name.startswith("word/") for name in names):
            return ".docx"
        return "a zip archive that holds neither a .docx nor an .epub"
    return next((words for first, words in _FOREIGN if data.startswith(first)), "")


def _convert(data: bytes, name: str, kind: str, limit: int) -> str:
    """The text of a document in one of the formats ``CONVERTED``."""
    with _TURN, _quiet():
        text = _pdf(data, name) if kind == ".pdf" else _markdown(data, name, kind, limit)
    text = "\n".join(line.rstrip() for line in text.split("\n"))
    return re.sub(r"\n{3,}", "\n\n", text).strip("\n")


def _pdf(data: bytes, name: str) -> str:
    """The pages of a PDF, with blank lines in between."""
    from pypdfium2 import PdfDocument, PdfiumError
    from pypdfium2.raw import FPDF_ERR_PASSWORD, FPDF_ERR_SECURITY

    if b"%%EOF" not in data[-2048:]:  # PDFium would give the pages that are there, and be silent on the rest
        raise _Refused(f"{name} is damaged: it has no %%EOF at its end; get it again, or repair it with qpdf")
    try:
        document = PdfDocument(data)
    except PdfiumError as error:
        if error.err_code in (FPDF_ERR_PASSWORD, FPDF_ERR_SECURITY):
            raise _Refused(f"{name} is encrypted: save it without a password, such as with qpdf --decrypt") from error
        raise
    with document:
        pages = []
        for number in range(len(document)):
            page = document[number]
            pages.append(page.get_textpage().get_text_range())
            page.close()
    text = "\n\n".join(pages)
    if not text.strip():
        raise _Refused(f"{name} has no text on its {len(pages)} pages: run OCR first, such as ocrmypdf")
    hyphen = "\ufffe"  # PDFium's mark for one at the end of a line, whose next line it has joined
    return re.sub(rf"(?<=[^\W\d_]){hyphen}(?=[^\W\d_])", "", text).replace(hyphen, "-")


def _markdown(data: bytes, name: str, kind: str, limit: int) -> str:
    """A page of the Web, a Word file or a book as Markdown, its characters unescaped."""
    from markitdown import MissingDependencyException, StreamInfo
    from markitdown.converters import DocxConverter, EpubConverter, HtmlConverter

    stream = _stored(data, name, limit) if kind in (".docx", ".epub") else BytesIO(data)
    converter = {".docx": DocxConverter, ".epub": EpubConverter}.get(kind, HtmlConverter)()
    options = {"escape_asterisks": False, "escape_underscores": False, "escape_misc": False}
    try:
        return converter.convert(stream, StreamInfo(extension=kind), **options).markdown
    except MissingDependencyException as error:
        raise ImportError(f"{name} needs more of markitdown than is installed", name="markitdown") from error


def _stored(data: bytes, name: str, limit: int) -> BytesIO:
    """The same zip archive with its entries stored, not packed.

    Entries are unpacked here in pieces, up to the sizes that they declare and no further. A converter that unpacks an entry at
    once would unpack what a header hides.
    """
    out, locked = BytesIO(), _Refused(f"{name} is encrypted: only a copy without protection can be read")
    with ZipFile(BytesIO(data)) as archive, ZipFile(out, "w", ZIP_STORED) as copy:
        entries = archive.infolist()
        if (total := sum(entry.file_size for entry in entries)) > limit:
            raise _Refused(f"{name} holds {total} bytes unpacked, more than limit={limit}")
        for entry in entries:
            if entry.flag_bits & 1:
                raise locked
            if entry.compress_type not in (ZIP_STORED, ZIP_DEFLATED):
                raise _Refused(f"{name} is packed by an unusual method ({entry.filename}): pack it anew")
            if entry.is_dir() or entry.filename.lower().startswith(
                "customxml/"
            ):  # no text; Word misspells some of them
                continue
            with archive.open(entry) as packed, copy.open(entry.filename, "w") as unpacked:
                while piece := packed.read(1 << 16):
                    if (
                        entry.filename == "META-INF/encryption.xml" and b"xmlenc#aes" in piece
                    ):  # a book's text, not its fonts
                        raise locked
                    unpacked.write(piece)
    out.seek(0)
    return out


@contextmanager
def _quiet() -> Iterator[None]:
    """No warnings and no log lines of the converters, for one conversion at a time."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL + 1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
