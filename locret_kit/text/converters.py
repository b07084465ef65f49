"""Converters of documents: HTML, Word and EPUB through markitdown, PDF page by page through PDFium.

Nothing here opens another file or a connection: links and images stay words.
"""

import re
from io import BytesIO
from zipfile import ZIP_DEFLATED, ZIP_STORED, ZipFile

LIMIT = 256 * 2**20
"""Bytes of a document, at most; and bytes that a .docx or .epub, which is a zip archive, holds unpacked."""
PAGE = "\f"
"""Form feed, at the beginning of a PDF's second and later pages, as pdftotext has it."""
LACKS = "converted: notes, forms, columns, numbering or equations may be missing; a .txt is read as it is"
"""The line about every converted file."""
_BASE64 = re.compile(r"(?<![A-Za-z0-9+/])(?:(?:[A-Za-z0-9+/]{60,80}={0,2}(?:\\n|\s){1,4}){10}|[A-Za-z0-9+/]{2000})")
"""Ten lines of base64, or a long one: an attachment of a mail, a picture in a notebook."""
ENCODED = "it holds base64, such as pictures or attachments, which is read letter by letter: take the text out first"
_PREFIX = re.compile(rb"(</?)[\w.-]+:(?=(?:package|manifest|spine|item|itemref)\b)")
"""A prefix of names in an EPUB's list of chapters, of which its converter knows none."""
_FIELD = re.compile(rb"</?w:fldSimple\b[^>]*>")
"""Ends of a simple field in a Word file, whose result its converter leaves out."""
MARKS = b"\xff\xfe", b"\xfe\xff"
"""First bytes of text in UTF-16."""
_ENDS = re.compile(rb"</(?:body|html)\s*>", re.IGNORECASE)
"""Ends of a page, after which the pages of joined files go on: the converter reads the first body alone."""


class Refusal(ValueError):
    """A refusal of a document whose words are complete."""


def is_encoded(text: str) -> bool:
    """Whether a text holds base64: long runs of capitals, small letters and digits alike."""
    return any(all(re.search(kind, run[0]) for kind in ("[A-Z]", "[a-z]", "[0-9]")) for run in _BASE64.finditer(text))


def to_markdown(data: bytes, name: str, suffix: str) -> str:
    """The text of a page of HTML, a Word file or an EPUB as Markdown.

    Raises:
        Refusal: an archive that is encrypted or too large. Others: whatever the converter stumbles over.
    """
    from markitdown import StreamInfo
    from markitdown.converters import DocxConverter, EpubConverter, HtmlConverter

    kind = {".docx": DocxConverter, ".epub": EpubConverter}.get(suffix, HtmlConverter)
    if kind is HtmlConverter:  # bytes of other encodings that may be valid UTF-8 too
        other = "utf-16" if data.startswith(MARKS) else "iso-2022-jp" if b"\x1b$" in data else None
        data = _ENDS.sub(b"", data if other is None else data.decode(other).encode())
    stream = BytesIO(data) if kind is HtmlConverter else stored(data, name)
    plain = dict(escape_asterisks=False, escape_underscores=False)
    return str(kind().convert(stream, StreamInfo(extension=suffix), **plain).markdown)


def pages_of(data: bytes, name: str, notes: list[str]) -> str:
    """The pages of a PDF with a blank line between them, each but the first after ``PAGE``. Words that a line's end breaks are
    joined.

    Raises:
        Refusal: it is cut off or encrypted, or no page has text. PdfiumError: it cannot be read.
    """
    import pypdfium2.raw as pdfium
    from pypdfium2 import PdfDocument, PdfiumError

    begin, end = data.find(b"%PDF-"), data.rfind(b"%%EOF") + 5
    if end < 5:  # PDFium would give the pages that are there, and be silent on the rest
        raise Refusal(f"{name} is damaged: its end is missing; get it again, or repair it with qpdf")
    try:
        document = PdfDocument(data[begin:end])  # mails, servers and file systems leave bytes on either side
    except PdfiumError as error:
        if error.err_code in (pdfium.FPDF_ERR_PASSWORD, pdfium.FPDF_ERR_SECURITY):
            raise Refusal(f"{name} is encrypted: save it without a password, such as with qpdf --decrypt") from error
        raise
    with document:
        pages = [page.get_textpage().get_text_bounded() for page in document]
    blank = sum(not page.strip() for page in pages)
    if blank == len(pages):
        raise Refusal(f"{name} has no text on its {blank} pages: run OCR first, such as ocrmypdf")
    if blank:
        notes.append(f"{blank} of {len(pages)} pages have no text: run OCR, such as ocrmypdf, if they are scanned")
    # U+FFFE is PDFium's mark for a hyphen at a line's end.
    texts = (re.sub("\ufffe[\r\n]*", "", page).replace("\r\n", "\n").strip("\n") for page in pages)
    return f"\n\n{PAGE}".join(texts)


def stored(data: bytes, name: str) -> BytesIO:
    """A copy of a zip archive with its entries stored, not compressed.

    Entries are decompressed here in pieces, up to their declared sizes. A converter would decompress an entry at
    once, whatever its header declares.
    """
    out, locked = BytesIO(), Refusal(f"{name} is encrypted: only a copy without protection can be read")
    with ZipFile(BytesIO(data)) as archive, ZipFile(out, "w", ZIP_STORED) as copy:
        entries = archive.infolist()
        if (total := sum(entry.file_size for entry in entries)) > LIMIT:
            raise Refusal(f"{name} holds {total} bytes unpacked, more than {LIMIT}")
        for entry in entries:
            if entry.flag_bits & 1:
                raise locked
            if entry.compress_type not in (ZIP_STORED, ZIP_DEFLATED):
                raise Refusal(f"{name} has an unsupported compression method ({entry.filename}): compress it again")
            if entry.is_dir():
                continue
            with archive.open(entry) as packed, copy.open(entry.filename, "w") as unpacked:
                marked = entry.filename.endswith((".opf", "ml", ".htm"))
                while piece := packed.read(max(1, entry.file_size) if marked else 1 << 16):
                    if entry.filename == "META-INF/encryption.xml" and b"xmlenc#aes" in piece:  # text, not fonts
                        raise locked
                    unpacked.write(_readable(piece) if marked else piece)
    out.seek(0)
    return out


def _readable(piece: bytes) -> bytes:
    """An entry of XML or HTML as the converters read it."""
    utf8 = piece.decode("utf-16").encode() if piece.startswith(MARKS) else piece
    return _FIELD.sub(b"", _PREFIX.sub(rb"\1", utf8))
