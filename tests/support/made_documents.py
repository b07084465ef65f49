"""Documents made in memory, so that a test knows what they hold."""

import hashlib
import io
import re
import struct
from collections import defaultdict
from xml.sax.saxutils import escape
from zipfile import ZIP_DEFLATED, ZipFile


def rc4(key: bytes, data: bytes) -> bytes:
    """The stream cipher of PDF's first security handler."""
    box, j, out = list(range(256)), 0, bytearray()
    for i in range(256):
        j = (j + box[i] + key[i % len(key)]) % 256
        box[i], box[j] = box[j], box[i]
    i = j = 0
    for byte in data:
        i = (i + 1) % 256
        j = (j + box[i]) % 256
        box[i], box[j] = box[j], box[i]
        out.append(byte ^ box[(box[i] + box[j]) % 256])
    return bytes(out)


def pdf(pages: list[list[str]], *, password: str | None = None) -> bytes:
    """A PDF with a page per list of lines.

    With a password, content streams are encrypted by the standard handler, revision 2 (PDF reference 1.7, section 3.5).
    """
    shown = [[re.sub(r"([()\\])", r"\\\1", line) for line in lines] for lines in pages]
    drawings = [
        "BT /F 10 Tf 12 TL 50 760 Td " + " ".join(f"({line}) Tj T*" for line in lines) + " ET" for lines in shown
    ]
    if password is None:
        return drawn(*drawings)
    pad = bytes.fromhex("28bf4e5e4e758a4164004e56fffa01082e2e00b6d0683e802f0ca9fe6453697a")
    user = (password.encode() + pad)[:32]
    owner = rc4(hashlib.md5((b"owner" + pad)[:32]).digest()[:5], user)
    key = hashlib.md5(user + owner + struct.pack("<i", -4) + b"0123456789abcdef").digest()[:5]
    salts = [struct.pack("<I", 5 + 2 * page)[:3] + b"\0\0" for page in range(len(pages))]
    keys = [hashlib.md5(key + salt).digest()[:10] for salt in salts]
    hidden = [rc4(own, drawing.encode("cp1252")) for own, drawing in zip(keys, drawings, strict=True)]
    secrets = f"/Filter /Standard /V 1 /R 2 /P -4 /O <{owner.hex()}> /U <{rc4(key, pad).hex()}>"
    name = b"0123456789abcdef".hex()
    return drawn(*hidden, trailer=f"/ID [<{name}> <{name}>] /Encrypt << {secrets} >>")


def zipped(files: dict[str, str | bytes], method: int = ZIP_DEFLATED) -> bytes:
    out = io.BytesIO()
    with ZipFile(out, "w", method) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return out.getvalue()


OFFICE = "http://schemas.openxmlformats.org/"
REMOTE = "http://192.0.2.1/picture.png"


def docx_files(paragraphs: list[str]) -> dict[str, str | bytes]:
    """Parts of a Word file: paragraphs, a table, and a picture that lies elsewhere."""
    rel, main = f"{OFFICE}officeDocument/2006/relationships", f"{OFFICE}wordprocessingml/2006/main"
    text = [f'<w:p><w:r><w:t xml:space="preserve">{escape(line)}</w:t></w:r></w:p>' for line in paragraphs]
    cells = "".join(f"<w:tc><w:p><w:r><w:t>{word}</w:t></w:r></w:p></w:tc>" for word in ("left", "right"))
    picture = (
        '<w:p><w:r><w:drawing><wp:inline><a:graphic><a:graphicData><pic:pic><pic:blipFill><a:blip r:link="r1"/>'
        "</pic:blipFill></pic:pic></a:graphicData></a:graphic></wp:inline></w:drawing></w:r></w:p>"
    )
    spaces = (
        f'xmlns:w="{main}" xmlns:r="{rel}" xmlns:a="{OFFICE}drawingml/2006/main" '
        f'xmlns:pic="{OFFICE}drawingml/2006/picture" xmlns:wp="{OFFICE}drawingml/2006/wordprocessingDrawing"'
    )
    body = "".join(text) + f"<w:tbl><w:tr>{cells}</w:tr></w:tbl>" + picture
    relations = f'<Relationships xmlns="{OFFICE}package/2006/relationships">%s</Relationships>'
    types = f"{OFFICE}package/2006/content-types"
    kind = "application/vnd.openxmlformats-officedocument.wordprocessingml.document.main+xml"
    return {
        "[Content_Types].xml": f'<Types xmlns="{types}"><Override PartName="/word/document.xml" ContentType="{kind}"/></Types>',
        "_rels/.rels": relations % f'<Relationship Id="r1" Type="{rel}/officeDocument" Target="word/document.xml"/>',
        "word/_rels/document.xml.rels": relations
        % f'<Relationship Id="r1" Type="{rel}/image" Target="{REMOTE}" TargetMode="External"/>',
        "word/document.xml": f"<w:document {spaces}><w:body>{body}</w:body></w:document>",
    }


def epub_files(chapters: list[str]) -> dict[str, str | bytes]:
    """Parts of a book; its chapters lie in the archive in another order than they are read."""
    items = "".join(
        f'<item id="c{i}" href="c{i}.xhtml" media-type="application/xhtml+xml"/>' for i in range(len(chapters))
    )
    spine = "".join(f'<itemref idref="c{i}"/>' for i in range(len(chapters)))
    page = (
        f'<?xml version="1.0"?><html><head><title>no</title></head><body><p>%s</p><img src="{REMOTE}"/></body></html>'
    )
    return {
        "mimetype": "application/epub+zip",
        **{f"c{i}.xhtml": page % escape(chapters[i]) for i in reversed(range(len(chapters)))},
        "content.opf": f"<package><metadata/><manifest>{items}</manifest><spine>{spine}</spine></package>",
        "META-INF/container.xml": '<container><rootfiles><rootfile full-path="content.opf"/></rootfiles></container>',
    }


def docx(paragraphs: list[str]) -> bytes:
    return zipped(docx_files(paragraphs))


def epub(chapters: list[str]) -> bytes:
    return zipped(epub_files(chapters))


def html(paragraphs: list[str], encoding: str = "utf-8") -> bytes:
    body = "".join(f"<p>{escape(text)}</p>" for text in paragraphs)
    return (
        f"<html><head><meta charset='{encoding}'><style>p {{ color: red }}</style><script src='{REMOTE}.js'>var hidden</script>"
        f"</head><body><h1>Title</h1>{body}<table><tr><td>left</td><td>right</td></tr></table><img src='{REMOTE}'></body></html>"
    ).encode(encoding)


def drawn(*contents: str | bytes, objects: tuple[str, ...] = (), **held: str) -> bytes:
    """A PDF of pages by their operators, such as those of ``at``. Further objects have the numbers from 4 + 2 pages on.

    Args:
        held: what dictionaries hold besides: of a page, the catalog, the font, a page's stream and the trailer.
    """
    more, kids = defaultdict(str, held), " ".join(f"{4 + 2 * i} 0 R" for i in range(len(contents)))
    parts: list[str | bytes] = [
        f"<< /Type /Catalog /Pages 2 0 R {more['catalog']} >>",
        f"<< /Type /Pages /Kids [{kids}] /Count {len(contents)} >>",
        f"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica {held.get('font', '/Encoding /WinAnsiEncoding')} >>",
    ]
    for i, content in enumerate(contents):
        drawing = content if isinstance(content, bytes) else content.encode("cp1252")
        parts.append(
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 595 842] /Contents {5 + 2 * i} 0 R "
            f"/Resources << /Font << /F 3 0 R >> >> {more['page']} >>"
        )
        parts.append(b"<< /Length %d %s >>\nstream\n%s\nendstream" % (len(drawing), more["stream"].encode(), drawing))
    out, places = bytearray(b"%PDF-1.4\n"), ""
    for number, part in enumerate([*parts, *objects], 1):
        places += f"{len(out):010d} 00000 n \n"
        out += b"%d 0 obj\n%s\nendobj\n" % (number, part if isinstance(part, bytes) else part.encode("cp1252"))
    size = len(parts) + len(objects) + 1
    table = f"xref\n0 {size}\n0000000000 65535 f \n{places}trailer << /Size {size} /Root 1 0 R {more['trailer']} >>\nstartxref\n"
    return bytes(out) + f"{table}{len(out)}\n%%EOF\n".encode()
