"""Documents as text: plain text as it is; a PDF through PDFium; HTML and Word through markitdown, and so each chapter of an EPUB.

What a file holds and its text does not is a loss, which is told in one line each.

The one converter of a format is called on bytes in memory, without plugins or guesses of another format. It opens no other
file and no connection: links and images of a document stay words. HTML, Word and EPUB become Markdown; a PDF keeps the lines
of its pages.
"""

from __future__ import annotations

import logging
import posixpath
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from threading import Lock
from typing import BinaryIO
from urllib.parse import unquote
from zipfile import ZIP_DEFLATED, ZIP_STORED, ZipFile

from ..files import read_utf8
from ..naming import first_line

LIMIT = 256 * 2**20
"""Bytes of a document, at most; and bytes that a .docx or .epub, which is a zip archive, holds unpacked."""
CONVERTED = (".html", ".htm", ".pdf", ".docx", ".epub")
"""Extensions of the formats that need the extra ``documents``."""
Lost = Callable[[str], None]
"""Takes the line that tells a loss."""
_FOREIGN = (
    (b"\x1f\x8b", "a gzip file: unpack it first"),
    (b"\xd0\xcf\x11\xe0", "an old Office file, or one with a password: save it as .docx without a password"),
    (b"{\\rtf", "a rich-text file: save it as .docx"),
    (b"\x89PNG", "an image: run OCR first, such as ocrmypdf"),
    (b"\xff\xd8\xff", "an image: run OCR first, such as ocrmypdf"),
    (b"\xff\xfe", "text in UTF-16: save it as UTF-8"),
    (b"\xfe\xff", "text in UTF-16: save it as UTF-8"),
)
"""First bytes of formats that are not read, and what their owner is told."""
SHAPE = "{http://schemas.microsoft.com/office/word/2010/wordprocessingShape}"
"""Namespace of what Word draws; the text in it is not read."""
_OFFICE = (
    ("ppt/", "a presentation: save it as PDF"),
    ("xl/", "a spreadsheet: save it as PDF, or its sheets as .csv"),
    ("content.xml", "an OpenDocument file: save it as .docx or PDF"),
    ("Index/", "a file of Apple's: save it as PDF"),
)
"""Names of entries of zip archives that are not read, and what their owner is told."""
_LOGGERS = ("bs4", "charset_normalizer", "mammoth", "markitdown", "pypdfium2")
_TURN = Lock()
"""Held during a conversion: PDFium runs in one thread at a time, and warnings are silenced for the whole process."""


def may_be_text(first: bytes) -> bool:
    """Whether a file that begins with these bytes may be plain text: no format that ``read_stream`` knows by its first 8."""
    return not first.startswith((b"%PDF-", b"PK\x03\x04", *(start for start, _ in _FOREIGN)))


class _Refused(ValueError):
    """A refusal whose words are complete."""


def tell(line: str) -> None:
    """Warn of a loss."""
    warnings.warn(line, stacklevel=3)


def read_document(path: str | Path, *, limit: int = LIMIT, lost: Lost = tell) -> str:
    """The text of a file. Its format, ``limit``, ``lost`` and further errors are those of ``read_stream``.

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
        return read_stream(stream, str(path), limit=limit, lost=lost)


def read_stream(stream: BinaryIO, name: str, *, limit: int = LIMIT, lost: Lost = tell) -> str:
    """The text of a byte stream that is called ``name``: an upload, or stdin.

    The format is the name's extension: .html and .htm (UTF-8, or what they declare), .pdf, .docx, .epub. Any other name is read
    by its content: a PDF, a .docx, an .epub, or else plain text (UTF-8; without a byte-order mark, and lines end with a newline).

    Converted text has no spaces at the ends of lines and never two blank lines in a row. In that of a PDF, a page ends with
    a blank line, and the letters around a hyphen at the end of a line are joined: nearly always that is one word.

    Args:
        limit: bytes, at most, of the stream, and of a zip archive's entries together. Nothing beyond is read or unpacked.
        lost: told of each loss; by default it is a warning.

    Raises:
        ValueError: one line that begins with the name: another format than the extension says, or one that is not read, too
            large, damaged, encrypted, not UTF-8, or no text, as in a scanned PDF.
        ImportError: the extra ``documents`` is not installed, and the format needs it.
    """
    suffix = Path(name).suffix.lower()
    suffix = suffix if suffix in (*CONVERTED, ".txt", ".md") else ""
    data = b"".join(_pieces(stream, limit + 1))
    if len(data) > limit:
        raise ValueError(f"{name} is larger than limit={limit} bytes")
    if not data:
        raise ValueError(f"{name} is empty")
    losses: list[str] = []
    try:
        text = _text(data, name, suffix, limit, losses)
    except (_Refused, ImportError, MemoryError):
        raise
    except Exception as error:  # parsers of untrusted bytes raise whatever they stumble over
        raise ValueError(f"{name} is damaged{suffix and f', or no {suffix} file'}: {first_line(error)}") from error
    if not text.strip():
        raise ValueError(f"{name} has no text")
    for line in losses:
        lost(f"{name}: {line}")
    return text


def _pieces(stream: BinaryIO, size: int) -> Iterator[bytes]:
    """At most ``size`` bytes of a stream, which may give fewer at a time than it is asked for."""
    while size and (piece := stream.read(min(size, 1 << 20))):
        size -= len(piece)
        yield piece


def _text(data: bytes, name: str, suffix: str, limit: int, losses: list[str]) -> str:
    """The text of a whole document, which may be blank. Lines about losses are added to ``losses``."""
    kind = _format(data, suffix)
    if kind and kind not in CONVERTED:
        raise _Refused(f"{name} is {kind}")
    if suffix and kind != (suffix if suffix in (".pdf", ".docx", ".epub") else ""):
        if not kind:
            raise _Refused(f"{name} is damaged, or no {suffix} file: it begins with {data[:8]!r}")
        raise _Refused(f"{name} is a {kind} file by its content: rename it to {Path(name).with_suffix(kind).name}")
    if (suffix or kind) in CONVERTED:
        return _convert(data, name, suffix or kind, limit, losses)
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
        foreign = (words for part, words in _OFFICE if any(name.startswith(part) for name in names))
        return next(foreign, "a zip archive that holds neither a .docx nor an .epub")
    return next((words for first, words in _FOREIGN if data.startswith(first)), "")


def _convert(data: bytes, name: str, kind: str, limit: int, losses: list[str]) -> str:
    """The text of a document in one of the formats ``CONVERTED``."""
    with _TURN, _quiet():
        if kind == ".pdf":
            text = _pdf(data, name, losses)
        elif kind == ".epub":
            text = _book(data, name, limit, losses)
        else:
            text = _markdown(_prepared(data, name, limit, losses) if kind == ".docx" else data, name, kind)
    text = "\n".join(line.rstrip() for line in text.split("\n"))
    return re.sub(r"\n{3,}", "\n\n", text).strip("\n")


def _pdf(data: bytes, name: str, losses: list[str]) -> str:
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
    # A page's number alone, such as "- 7 -" or "iv", is not its text.
    blank = sum(not re.search(r"[^\W\d_]", re.sub(r"\b[ivxlc]+\b", "", page)) for page in pages)
    if blank:
        losses.append(
            f"{blank} of {len(pages)} pages have no text but numbers: run OCR, such as ocrmypdf, if they are scanned"
        )
    hyphen = "\ufffe"  # PDFium's mark for one at the end of a line, whose next line it has joined
    return re.sub(rf"(?<=[^\W\d_]){hyphen}(?=[^\W\d_])", "", text).replace(hyphen, "-")


def _prepared(data: bytes, name: str, limit: int, losses: list[str]) -> bytes:
    """A Word file whose moved text is where it was moved to and whose breaks are breaks; its losses are noted."""
    from defusedxml.ElementTree import fromstring

    word, out = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}", BytesIO()
    counts: dict[str, int] = {}
    with ZipFile(_stored(data, name, limit)) as archive, ZipFile(out, "w", ZIP_STORED) as copy:
        for entry in archive.namelist():
            part = archive.read(entry)
            if entry == "word/document.xml":
                part = re.sub(rb"(</?w:)moveTo(?=[\s>/])", rb"\1ins", part)
                part = re.sub(rb"<w:cr\s*/>|<w:br\s[^>]*w:type=\"(?:page|column)\"[^>]*/>", rb"<w:br/>", part)
                body = fromstring(part)
                boxes = len(body.findall(f".//{word}txbxContent"))
                newer = len(body.findall(f".//{SHAPE}txbx/{word}txbxContent"))
                counts["text boxes"] = max(
                    0, 2 * newer - boxes
                )  # Word writes each once more, for older programs: that is read
            elif found := re.fullmatch(r"word/(header|footer|comments)\d*\.xml", entry):
                root = fromstring(part)
                wanted = root.iterfind(f"{word}comment") if found[1] == "comments" else [root]
                number = sum(1 for one in wanted if any((text.text or "").strip() for text in one.iter(f"{word}t")))
                what = found[1] if found[1] == "comments" else f"{found[1]}s"
                counts[what] = counts.get(what, 0) + number
            copy.writestr(entry, part)
    for what, number in counts.items():
        if number:
            losses.append(f"{number} {what} left out")
    return out.getvalue()


def _markdown(data: bytes, name: str, kind: str) -> str:
    """A page of the Web or a Word file as Markdown, its characters unescaped."""
    from markitdown import MissingDependencyException, StreamInfo
    from markitdown.converters import DocxConverter, HtmlConverter

    converter = (DocxConverter if kind == ".docx" else HtmlConverter)()
    options = {"escape_asterisks": False, "escape_underscores": False, "escape_misc": False}
    try:
        return converter.convert(BytesIO(data), StreamInfo(extension=kind), **options).markdown
    except MissingDependencyException as error:
        raise ImportError(f"{name} needs more of markitdown than is installed", name="markitdown") from error


def _book(data: bytes, name: str, limit: int, losses: list[str]) -> str:
    """The chapters of an EPUB in the order of its spine, after its title and authors."""
    from defusedxml.ElementTree import fromstring

    with ZipFile(_stored(data, name, limit)) as archive:
        entries = {entry.casefold(): entry for entry in archive.namelist()}
        container = fromstring(archive.read(entries["meta-inf/container.xml"]))
        package = next(unquote(part.get("full-path", "")) for part in container.iterfind(".//{*}rootfile"))
        book = fromstring(archive.read(entries[posixpath.normpath(package).casefold()]))
        items = {item.get("id"): item for item in book.iterfind("{*}manifest/{*}item")}
        spine = [part.get("idref") for part in book.iterfind("{*}spine/{*}itemref")]
        heads = (("Title", "title"), ("Authors", "creator"))
        texts = [
            f"**{head}:** {', '.join(found)}"
            for head, tag in heads
            if (found := [" ".join(one.itertext()).strip() for one in book.iterfind(f"{{*}}metadata/{{*}}{tag}")])
        ]
        missing = blank = pictures = 0
        for chapter in dict.fromkeys(spine):  # each once: a spine that names a page a thousand times would take minutes
            item = items.get(chapter)
            href = "" if item is None else unquote(item.get("href", "").partition("#")[0])
            entry = entries.get(posixpath.normpath(posixpath.join(posixpath.dirname(package), href)).casefold())
            if not href or entry is None:
                missing += 1
                continue
            page = archive.read(entry)
            text = _markdown(page, f"{name}, {entry}", ".html")
            if re.sub(r"!\[[^\]]*\]\([^)]*\)", "", text).strip():
                texts.append(text.strip())
            elif re.search(rb"<(?:\w+:)?(?:img|image|svg|object)\b", page):
                pictures += 1
            else:
                blank += 1
    for number, words in (
        (missing, "of the spine are not in the file"), (pictures, "are pictures without text"), (blank, "have no text"),
    ):  # fmt: skip
        if number:
            losses.append(f"{number} of {len(dict.fromkeys(spine))} chapters {words}")
    if not spine or missing == len(dict.fromkeys(spine)):
        raise _Refused(f"{name} has no chapter: its spine names none that is in the file")
    return "\n\n".join(texts)


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
