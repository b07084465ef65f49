"""Documents as text. The oracle is the text that the test put into a file."""

import base64
import ctypes
import gc
import gzip
import io
import json
import os
import random
import re
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import tracemalloc
import warnings
import zlib
from functools import partial
from pathlib import Path
from zipfile import ZIP_BZIP2

import pytest
from bs4 import BeautifulSoup
from forked import start, status_of
from made_documents import REMOTE, docx, docx_files, drawn, epub, epub_files, html, pdf, zipped

from locret_kit.cli import command
from locret_kit.cli.command import text_of
from locret_kit.text import converters, reader
from locret_kit.text.converters import LACKS
from locret_kit.text.reader import convert, read_document, read_stream

ROOT = Path(__file__).resolve().parents[2]
LINE = "a cache keeps the well-known rows of long texts (some say 'prompts'), snake_case and *stars* too; 42% of 7,000"
WORDS = LINE.split()


def prose(seed: int, n: int) -> list[str]:
    """A page: ``n`` lines of words."""
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=10)) for _ in range(n)]


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def refuse(*args: object) -> None:
        raise AssertionError(f"a connection was opened: {args}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def read(data: bytes, name: str) -> str:
    return read_stream(io.BytesIO(data), name)


def refusal(data: bytes, name: str) -> str:
    with pytest.raises(ValueError) as caught:
        read(data, name)
    said = str(caught.value)
    assert said.startswith(name) and "\n" not in said
    return said.removeprefix(name)


# what a document says


@pytest.mark.parametrize("n_pages", [3, 200])
def test_a_pdf_says_every_word_of_every_page(n_pages):
    pages = [prose(i, 5) for i in range(n_pages)]
    text = read(pdf(pages), "book.pdf")
    assert text.split() == " ".join(line for page in pages for line in page).split()
    assert text.split("\n\n\f") == ["\n".join(page) for page in pages]  # a page ends with a blank line


def test_pages_without_text_are_counted():
    pages = [[], ["first"], [], ["second"]]
    assert [page.strip() for page in read(pdf(pages), "a.pdf").split("\f")] == ["", "first", "", "second"]


def test_an_encrypted_pdf_that_opens_without_a_password():
    assert read(pdf([["some words"]], password=""), "a.pdf") == "some words"


def test_word():
    lines = [*prose(1, 3), "1 < 2 & café"]
    text = read(docx(lines), "a.docx")
    assert text.startswith("\n\n".join(lines)) and re.search(r"\|\s*left\s*\|\s*right\s*\|", text)
    files = docx_files(["On page 42."])
    body = str(files["word/document.xml"]).replace("<w:r>", '<w:fldSimple w:instr=" PAGEREF a "><w:r>', 1)
    body = body.replace("</w:r>", "</w:r></w:fldSimple>", 1)
    assert read(zipped({**files, "word/document.xml": body}), "a.docx").startswith("On page 42.")


def test_a_book_in_its_reading_order():
    """Also where the names of its list have a prefix, and in UTF-16."""
    chapters = [" ".join(prose(i, 3)) for i in range(4)]
    whole, files = read(epub(chapters), "a.epub"), epub_files(chapters)
    text = re.sub(r"!\[\]\(\S*\)\s*", "", whole)
    assert [part for part in text.strip().split("\n\n") if not part.startswith("**")] == chapters
    listed = re.sub(r"(</?)", r"\1opf:", files["content.opf"]).replace("package>", "package xmlns:opf='x'>", 1)
    wide = {f"c{i}.xhtml": str(files[f"c{i}.xhtml"]).encode("utf-16") for i in range(4)}
    assert read(zipped({**files, "content.opf": listed, **wide}), "a.epub") == whole


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1"])
def test_a_page_of_the_web(encoding):
    lines = [*prose(1, 3), "1 < 2 & café"]
    text = read(html(lines, encoding), "a.html")
    assert text.startswith("\n\n".join(["# Title", *lines]))
    assert re.search(r"\|\s*left\s*\|\s*right\s*\|", text) and REMOTE in text
    assert "hidden" not in text and "color" not in text
    assert read(html(lines, encoding), "a.HTM") == text


@pytest.mark.parametrize("mark, encoding", [(b"", "utf-16"), (b"\xfe\xff", "utf-16-be")])
def test_a_page_in_utf16(mark, encoding):
    """Its bytes are valid UTF-8 where it has letters of ASCII alone."""
    assert "\n\nplain words\n\n" in read(mark + html(["plain words"], encoding), "a.html")


@pytest.mark.parametrize("encoding", ["utf-8", "shift_jis", "iso-2022-jp"])
def test_pages_of_the_web_one_after_the_other(encoding):
    """As ``cat`` joins them; and encodings that pages declare, of which one has the bytes of ASCII alone."""
    pages = [html([words], encoding) for words in ("最初のページ", "次のページ")]
    whole, parts = read(b"\n".join(pages), "a.html"), [read(page, "a.html") for page in pages]
    assert whole.startswith(parts[0]) and whole.endswith(parts[1]) and "最初のページ" in parts[0]


@pytest.mark.parametrize(("make", "suffix"), [(lambda t: pdf([t]), ".pdf"), (docx, ".docx"), (epub, ".epub")])
def test_the_content_says_the_format_where_the_name_does_not(make, suffix, tmp_path):
    data = make(["some words"])
    assert read(data, "stdin") == read(data, f"a{suffix}")
    (tmp_path / f"a{suffix}").write_bytes(data)
    assert read_document(str(tmp_path / f"a{suffix}")) == read(data, f"a{suffix}")


# refusals


def test_a_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none\.pdf does not exist$"):
        read_document(tmp_path / "none.pdf")


def test_empty_and_blank_documents():
    for name in ("a.txt", "a.md", "a.html", "a.pdf", "a.docx", "a.epub", "stdin"):
        assert refusal(b"", name) == " is empty"
    for data, name in ((b" \n\t", "a.txt"), (b"<p> <script>x</script></p>", "a.html")):
        assert refusal(data, name).startswith(" has no text")


def test_what_another_program_must_do_first():
    scan = drawn(*["q 500 0 0 700 50 50 cm BI /W 2 /H 2 /CS /G /BPC 8 ID abcd EI Q"] * 3)
    for data, name, said in [
        ("café au lait".encode("latin-1"), "a.txt", ": the text is not UTF-8: byte 3 is 0xe9; if it is text, save it as UTF-8"),
        ("café".encode("utf-16"), "a.txt", " is text in UTF-16: save it as UTF-8"),
        (b"a\xff", "a.bin", ": the text is not UTF-8: byte 1 is 0xff; if it is text, save it as UTF-8"),
        (scan, "a.pdf", " has no text on its 3 pages: run OCR first, such as ocrmypdf"),
        (pdf([["hidden"]], password="secret"), "a.pdf",
         " is encrypted: save it without a password, such as with qpdf --decrypt"),
    ]:  # fmt: skip
        assert refusal(data, name) == said
    assert "run OCR first" in refusal(b"\x89PNG\r\n\x1a\n", "a.png")


def test_encrypted_archives():
    for algorithm, opens in (("2001/04/xmlenc#aes128-cbc", False), ("2008/embedding", True)):
        locked = f"<x Algorithm='http://www.{'idpf' if opens else 'w3'}.org/{algorithm}'/>"
        data = zipped(epub_files(["words"]) | {"META-INF/encryption.xml": locked})
        if opens:  # fonts alone
            assert "words" in read(data, "a.epub")
        else:
            assert refusal(data, "a.epub") == " is encrypted: only a copy without protection can be read"
    data = bytearray(docx(["words"]))
    data[data.index(b"PK\x01\x02") + 8] |= 1
    assert refusal(bytes(data), "a.docx") == " is encrypted: only a copy without protection can be read"
    assert "with a password" in refusal(b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(512), "a.docx")


MADE = {".pdf": pdf([["some words"]] * 3), ".docx": docx(["some words"]), ".epub": epub(["some words"])}


@pytest.mark.parametrize("suffix", MADE)
@pytest.mark.parametrize("share", [0.01, 0.3, 0.7, 0.97])
def test_documents_that_are_cut_short(suffix, share):
    data = MADE[suffix]
    assert "damaged" in refusal(data[: int(len(data) * share) + 3], f"a{suffix}")


@pytest.mark.parametrize("suffix", MADE)
def test_changed_bytes_give_text_or_one_line(suffix):
    """Parsers may mend damage; whatever they raise is one line that names the file."""
    draw = random.Random(7)
    for _ in range(40):
        data = bytearray(MADE[suffix])
        for _ in range(8):
            data[draw.randrange(len(data))] = draw.randrange(256)
        try:
            assert read(bytes(data), f"a{suffix}")
        except ValueError as error:
            assert str(error).startswith(f"a{suffix}") and "\n" not in str(error)


@pytest.mark.parametrize("suffix", MADE)
@pytest.mark.parametrize("name", ["a.txt", "a.html", "a.pdf", "a.docx", "a.epub"])
def test_another_format_than_the_name_says(suffix, name):
    if not name.endswith(suffix):
        assert refusal(MADE[suffix], name) == f" is a {suffix} file by its content: rename it to a{suffix}"


def test_formats_that_are_not_read():
    assert "damaged, or no .pdf file" in refusal(b"plain words", "a.pdf")
    assert "damaged, or no .docx file" in refusal(b"plain words", "a.docx")
    assert refusal(b"\x1f\x8b\x08", "a.txt") == " is a gzip file: unpack it first"
    assert refusal(b"{\\rtf1 words}", "stdin") == " is a rich-text file: save it as .docx"
    assert "neither a .docx nor an .epub" in refusal(zipped({"a/b.xml": "<x/>"}), "a.docx")
    assert refusal(MADE[".docx"][:99], "stdin") == " is damaged: File is not a zip file"
    assert "unsupported compression method" in refusal(zipped(docx_files(["words"]), ZIP_BZIP2), "a.docx")


# bounds


def test_size(monkeypatch):
    monkeypatch.setattr(reader, "LIMIT", 100)
    assert read(b"x" * 100, "a.txt") == "x" * 100
    assert refusal(b"x" * 101, "a.txt") == " is larger than 100 bytes"

    class Endless(io.RawIOBase):
        def read(self, size: int = -1) -> bytes:
            assert 0 < size <= 101
            return b"x" * size

    with pytest.raises(ValueError, match="larger than 100 bytes"):
        read_stream(Endless(), "stdin")


@pytest.mark.parametrize("files", [docx_files(["words"]), epub_files(["words"])])
def test_a_zip_bomb_is_refused_before_it_is_unpacked(files, monkeypatch):
    monkeypatch.setattr(converters, "LIMIT", 2**20)
    data = zipped({**files, "word/media/image.png": bytes(64 * 2**20)})
    tracemalloc.start()
    said = refusal(data, "stdin")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    total = 64 * 2**20 + sum(len(content) for content in files.values())
    assert said == f" holds {total} bytes unpacked, more than {2**20}"
    assert len(data) < 2**17 and peak < 2**22


def test_a_zip_that_lies_about_its_sizes_is_unpacked_as_far_as_it_says():
    """The header says 10 bytes, with the right checksum of these; 64 MiB come out of a reader that unpacks at once."""
    before = docx(["words"])
    read(before, "a.docx")  # imports
    data = bytearray(zipped({**docx_files(["words"]), "word/media/image.png": bytes(64 * 2**20)}))
    real, said = (struct.pack("<I", size) for size in (64 * 2**20, 10))
    crc = struct.pack("<I", zlib.crc32(bytes(10)))
    for name in re.finditer(rb"word/media/image\.png", bytes(data)):
        at = name.start() - (16 if data[name.start() - 30 : name.start() - 26] == b"PK\x03\x04" else 30)
        assert data[at + 8 : at + 12] == real
        data[at : at + 4], data[at + 8 : at + 12] = crc, said
    tracemalloc.start()
    text = read(bytes(data), "a.docx")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert text == read(before, "a.docx") and peak < 2**23


# quiet, and without the extra


def test_no_warning_and_no_log_line_comes_out(caplog, capfd, tmp_path):
    deep = b"<?xml version='1.0'?>" + b"<div>" * 5000 + b"deep"
    lines = []
    gc.collect()  # what other tests left open is said here otherwise
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for name, data in {**{f"a{suffix}": data for suffix, data in MADE.items()}, "a.html": deep}.items():
            (tmp_path / name).write_bytes(data)
            assert "words" in (text := read_document(tmp_path / name, lost=lines.append)) or text == "deep"
        assert not caught and not caplog.records and capfd.readouterr() == ("", "")
        assert [line.partition(": ")[2] for line in lines] == [LACKS] * 4
        BeautifulSoup(deep + b"\x81\xff", "html.parser", from_encoding="utf-8")
        assert caught and caplog.records  # the test itself: the converter is not quiet


def test_the_extra_is_named(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "markitdown", None)
    line = re.search(r"^documents =(.*)", (ROOT / "pyproject.toml").read_text(), re.M)[1]
    listed = re.findall(r'"([^"]+)"', line)
    monkeypatch.setattr(command, "requires", lambda _: [f'{name}; extra == "documents"' for name in listed])
    for name in ("markitdown", "pypdfium2"):
        assert command.install_hint(ImportError(name=name)) == ": in the clone, pip install -e '.[documents]'"

    @command.command("locret-read")
    def main() -> int:
        return len(read(MADE[".docx"], "a.docx"))

    assert main() == 1
    assert capsys.readouterr().err.rstrip().endswith(": in the clone, pip install -e '.[documents]'")


def test_a_pdf_from_stdin_or_without_an_ending_is_converted(monkeypatch, tmp_path):
    """As a shell gives it: `locret-infer < book.pdf`."""
    data = pdf([prose(3, 4)])
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    (tmp_path / "book").write_bytes(data)
    assert "".join(text_of(None)) == "".join(text_of(str(tmp_path / "book"))) == read(data, "book.pdf")
    (tmp_path / "book.txt").write_bytes(data)
    with pytest.raises(ValueError, match=r"book\.txt is a \.pdf file by its content: rename it to book\.pdf"):
        list(text_of(str(tmp_path / "book.txt")))


def test_text_from_stdin_is_read_in_blocks_and_a_foreign_format_is_named(monkeypatch):
    text = "\ufeffGrüße, " + "a line of text\n" * 9000
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    pieces = list(text_of("-"))
    assert len(pieces) > 1 and "".join(pieces) == text[1:]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(gzip.compress(b"words"))))
    with pytest.raises(ValueError, match="stdin is a gzip file: unpack it first"):
        list(text_of(None))


# ---- text under any name, and losses -----------------------------------------------------------------------------------


def losses_of(data: bytes, name: str) -> tuple[str, list[str]]:
    lost = []
    return read_stream(io.BytesIO(data), name, lost=lost.append), lost


@pytest.mark.parametrize(
    "name", ["a.txt", "b.MD", "README", "a.csv", "a.py", "notes.2026", ".hidden", "a.JSON", "a.srt"]
)
def test_what_is_utf8_is_text_whatever_its_name(name, tmp_path):
    text = "  one\r\ntwo\r\t\n\n\n\n\x0cthré<e> 👩 *x* %PDF-1.4 \u00ad\ufb01\n "
    wanted = text.replace("\r\n", "\n").replace("\r", "\n")
    assert losses_of(text.encode(), name) == (wanted, [])
    (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert "".join(text_of(str(tmp_path / name))) == read_document(tmp_path / name) == wanted


def test_base64_in_a_text_is_told(tmp_path, capsys):
    picture = base64.encodebytes(random.Random(1).randbytes(3000)).decode()
    notebook = json.dumps({"image/png": picture})
    plain = "".join("ACGT" * 16 + "\n" for _ in range(40)) + "ACGT" * 800 + " " + "0f" * 2000
    for text, told in ((f"Subject: a\n\n{picture}", True), (notebook, True), (plain, False)):
        lost = losses_of(text.encode(), "a.eml")[1]
        assert bool(lost) == told
        (tmp_path / "a.eml").write_text(text)
        assert "".join(text_of(str(tmp_path / "a.eml"))) == text
        assert ("base64" in capsys.readouterr().err) == told


@pytest.mark.parametrize("make, name", [(html, "a.html"), (epub, "a.epub"), (docx, "a.docx")])
def test_invisible_breaks_leave_words(make, name):
    """Soft hyphens, word joiners, zero-width spaces; not the joiners of scripts and emoji, nor spaces of Thai and Khmer."""
    given = {
        "Haft\u00adpflicht\u00adversicherung": "Haftpflichtversicherung", "in\u200bter\u2060nal\ufeff": "internal",
        "\u0646\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645": None,
        "\u0915\u094d\u200d\u0937": None, "\U0001f469\u200d\U0001f4bb": None,
        "\u0e01\u0e32\u200b\u0e23": None, "\u1780\u17b6\u200b\u179a": None, "well-known": None,
    }  # fmt: skip
    text = read(make([f"Die {word} gilt." for word in given]), name)
    assert [word for word, want in given.items() if f"Die {want or word} gilt." not in text] == []
    assert not re.search("[\u00ad\u2060\ufeff]", text)


LOOKED = """
import contextlib, io, sys
from locret_kit.cli import chat, documents, infer
mains = {**vars(documents), "chat": chat.main, "infer": infer.main}
for line in sys.stdin.read().splitlines():
    command, *words = line.split("\t")
    with contextlib.redirect_stderr(io.StringIO()) as said:
        status = mains[command](words)
    print(status, "torch" in sys.modules, said.getvalue().strip(), sep="\t")
"""


def test_a_file_is_looked_at_before_torch_is_imported(tmp_path):
    """A name that is wrong, a scan, an old format: each is said without the seconds that loading takes."""
    files = {
        "scan.pdf": drawn("", ""), "empty.txt": b"", "blank.txt": b" \n", "latin.txt": b"x" * 70000 + b"\xe9",
        "a.rtf": b"{\\rtf1", "a.locret": b"x" * 99, "deck.pptx": zipped({"ppt/slides/slide1.xml": "<x/>"}), "prompts.jsonl": b"",
    }  # fmt: skip
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    heads = ["--ckpt", "checkpoints/smollm2-135m-locret"]
    told = {
        "scan.pdf": "run OCR", "empty.txt": "no text", "blank.txt": "no text", "latin.txt": "not UTF-8", "a.rtf": "as .docx",
        "deck.pptx": "as PDF", "none.pdf": "No such file",
    }  # fmt: skip
    cases = [(["infer", name, *heads, "--question", "x"], words) for name, words in told.items()]
    cases += [(["read", name, "-o", "new.locret", *heads], words) for name, words in told.items()]
    cases += [
        (["chat", "scan.pdf", *heads], "run OCR"),
        (["infer", "--batch", "none.jsonl", "-o", "out.jsonl", *heads], "No such file"),
        (["infer", "--batch", "prompts.jsonl", "-o", "out.jsonl", *heads], "holds no prompts"),
        *(([command, "a.locret", *more], "no saved cache") for command, *more in (("ask", "x"), ("kept",), ("chat",))),
        (["read", "scan.pdf", "-o", "a.locret", "--append"], "no saved cache"),
    ]
    lines, code = "\n".join("\t".join(words) for words, _ in cases), [sys.executable, "-c", LOOKED]
    done = subprocess.run(code, input=lines, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for (line, words), result in zip(cases, done.stdout.splitlines(), strict=True):
        status, torch, error = result.split("\t")
        assert (status, torch) == ("1", "False") and words in error and len(error) < 200, (line, result)


def test_the_commands_convert_under_limits(tmp_path, monkeypatch):
    (tmp_path / "a.html").write_bytes(b"<p>one two</p>")
    assert list(text_of(str(tmp_path / "a.html"))) == ["one two"]
    monkeypatch.setattr("locret_kit.cli.command.convert", partial(convert, text=3))
    with pytest.raises(ValueError, match="its text has 7 bytes, above the limit of 3"):
        text_of(str(tmp_path / "a.html"))
    with pytest.raises(ValueError, match=r"^two lines\.pdf is empty$"):
        convert(b"", "two\nlines.pdf")


def lower_limit() -> None:
    """Set a limit as a shell's or a cluster's ``ulimit -t``, which nobody but root may raise."""
    resource.setrlimit(resource.RLIMIT_CPU, (99, 99))
    ctypes.CDLL(None).prctl(24, 24)  # PR_CAPBSET_DROP, CAP_SYS_RESOURCE: takes root's power away


def ctrl_c() -> None:
    """Press Ctrl-C in a terminal whose program only notes it, as a conversation does."""
    os.setsid()
    signal.signal(signal.SIGINT, lambda *_: None)
    threading.Timer(0.4, os.killpg, (os.getpgrp(), signal.SIGINT)).start()


@pytest.mark.parametrize("meet", [lower_limit, ctrl_c])
def test_a_conversion_goes_on(meet, tmp_path):
    def run() -> int:
        meet()
        print(convert(b"<p>one two</p>", "a.html"))
        return 0

    status = status_of(start(run, tmp_path / "log"))
    assert (status, (tmp_path / "log").read_text()) == (0, "one two\n")
