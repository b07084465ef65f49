"""Documents as text: plain text unchanged, and .html, .pdf, .docx and .epub as their converters give it.

Every converted file gets one line that says what such a conversion may lack. Each format has one converter. It runs on
bytes in memory, without plugins or guesses of another format. HTML, Word and EPUB become Markdown; a PDF keeps its pages'
lines.

``convert`` runs it in a separate process with limits on time and memory, so a malicious file can harm only that
process. Run as a program, this module reads a file from stdin and writes its text to stdout.
"""

import logging
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import IO, BinaryIO
from zipfile import ZipFile

from ..files import POINTER, read_utf8
from ..naming import first_line
from ..processes import python
from .converters import ENCODED, LACKS, LIMIT, MARKS, PAGE, Refusal, is_encoded, pages_of, to_markdown
from .folder import read_folder

BREAKS = re.compile("[\u00ad\u2060\ufeff]|(?<![\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u1a20-\u1aaf])\u200b")
"""Invisible places for a line's end, or against one. Thai, Lao, Burmese and Khmer part words by U+200B, which stays there."""
PAGES = (".html", ".htm", ".xhtml")
"""Extensions of pages of the Web, which no first bytes tell from plain text."""
CONVERTED = (*PAGES, ".pdf", ".docx", ".epub")
"""Extensions of the formats that need the extra ``documents``."""
Lost = Callable[[str], None]
"""Takes the line that tells a loss."""
_FOREIGN = (
    (b"\x1f\x8b", "a gzip file: unpack it first"),
    (b"\xd0\xcf\x11\xe0", "an old Office file, or one with a password: save it as .docx without a password"),
    (b"{\\rtf", "a rich-text file: save it as .docx"),
    (b"\x89PNG", "an image: run OCR first, such as ocrmypdf"),
    (b"\xff\xd8\xff", "an image: run OCR first, such as ocrmypdf"),
    *((mark, "text in UTF-16: save it as UTF-8") for mark in MARKS),
    (POINTER, "a Git LFS pointer in place of the content: run git lfs pull"),
)
"""First bytes of formats that are not read, and what their owner is told."""
_OFFICE = (
    ("ppt/", "a presentation: save it as PDF"),
    ("xl/", "a spreadsheet: save it as PDF, or its sheets as .csv"),
    ("content.xml", "an OpenDocument file: save it as .docx or PDF"),
    ("index/", "an Apple iWork file: save it as PDF"),
)
"""Names of entries of zip archives that are not read, and what their owner is told."""


def is_converted(name: str, first: bytes) -> bool:
    """Whether a file is more than plain text, by its name or by its first 8 bytes."""
    starts = (b"%PDF-", b"PK\x03\x04", *(start for start, _ in _FOREIGN))
    return name.lower().endswith(CONVERTED) or first.startswith(starts)


def tell(line: str) -> None:
    """Warn of a loss."""
    warnings.warn(line, stacklevel=3)


def read_document(path: str | Path, *, lost: Lost = tell) -> str:
    """The text of a file, converted in a separate process if it is more than plain text, or of a folder's text files.
    Formats, ``lost`` and further errors are those of ``read_stream``, ``convert`` and ``read_folder``.

    Raises:
        FileNotFoundError: nothing is there.
        ValueError: what ``read_stream`` or ``read_folder`` refuses.
    """
    path = Path(path)
    if path.is_dir():
        return "".join(read_folder(path, note=lost))
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist")
    with path.open("rb") as stream:
        data = stream.read(LIMIT + 1)
    if is_converted(path.name, data[:8]):
        return convert(data, str(path), lost=lost)
    return read_stream(BytesIO(data), str(path), lost=lost)


def read_stream(stream: BinaryIO, name: str, *, lost: Lost = tell) -> str:
    """The text of a byte stream called ``name``: an upload, or stdin.

    The name's extension decides the format: .html, .htm and .xhtml (UTF-8, or the declared encoding), .pdf, .docx,
    .epub. For any other name the content decides: a PDF, a .docx, an .epub, or plain text (UTF-8; without a
    byte-order mark, and lines end with a newline).

    Converted text has no soft hyphens and no spaces at line ends, and never two blank lines in a row. A PDF page ends with
    a blank line, the next one begins with a form feed, and words hyphenated at the end of a line are joined.

    Args:
        lost: called with each loss; by default it warns.

    Raises:
        ValueError: in one line that begins with the name. The format contradicts the extension or is not supported, the
            file is too large, damaged, encrypted or not UTF-8, or it has no text, like a scanned PDF.
        ImportError: the format needs the extra ``documents``, which is not installed.
    """
    suffix = Path(name).suffix.lower()
    suffix = suffix if suffix in (*CONVERTED, ".txt", ".md") else ""
    data = stream.read(LIMIT + 1)
    if len(data) > LIMIT:
        raise ValueError(f"{name} is larger than {LIMIT} bytes")
    if not data:
        raise ValueError(f"{name} is empty")
    losses: list[str] = []
    try:
        text = _text(data, name, suffix, losses)
    except (Refusal, ImportError, MemoryError):
        raise
    except Exception as error:  # parsers of untrusted bytes raise whatever they stumble over
        raise ValueError(f"{name} is damaged{suffix and f', or no {suffix} file'}: {first_line(error)}") from error
    if not text.strip():
        raise ValueError(f"{name} has no text")
    for line in losses:
        lost(f"{name}: {line}")
    return text


def _text(data: bytes, name: str, suffix: str, losses: list[str]) -> str:
    """The text of a whole document, which may be blank. Lines about losses are added to ``losses``."""
    kind = _format(data, suffix)
    if kind and kind not in CONVERTED:
        raise Refusal(f"{name} is {kind}")
    if suffix and kind != (suffix if suffix in (".pdf", ".docx", ".epub") else ""):
        if not kind:
            raise Refusal(f"{name} is damaged, or no {suffix} file: it begins with {data[:8]!r}")
        raise Refusal(f"{name} is a {kind} file by its content: rename it to {Path(name).with_suffix(kind).name}")
    if (suffix or kind) in CONVERTED:
        return _convert(data, name, suffix or kind, losses)
    try:
        text = "".join(read_utf8(BytesIO(data)))
    except ValueError as error:
        raise Refusal(f"{name}: {error}") from error
    losses += [ENCODED] * is_encoded(text)
    return text


def _format(data: bytes, suffix: str) -> str:
    """The format of the bytes: '.pdf', '.docx', '.epub', words for a format that is not read, or '' for text."""
    if data.startswith(b"%PDF-") or (suffix == ".pdf" and b"%PDF-" in data[: 1 << 16]):
        return ".pdf"
    if suffix in PAGES and data.startswith(MARKS):
        return ""  # its mark is its encoding
    if data.startswith(b"PK\x03\x04"):
        with ZipFile(BytesIO(data)) as archive:
            names = [name.lower().replace("\\", "/") for name in archive.namelist()]
        if "meta-inf/container.xml" in names:
            return ".epub"
        if any(name.startswith("word/") for name in names):
            return ".docx"
        foreign = (words for part, words in _OFFICE if any(name.startswith(part) for name in names))
        return next(foreign, "a zip archive that holds neither a .docx nor an .epub")
    return next((words for first, words in _FOREIGN if data.startswith(first)), "")


def _convert(data: bytes, name: str, kind: str, losses: list[str]) -> str:
    """The text of a document in one of the formats ``CONVERTED``."""
    text = pages_of(data, name, losses) if kind == ".pdf" else to_markdown(data, name, kind)
    losses.append(LACKS)
    pages = BREAKS.sub("", text).split(PAGE)
    text = PAGE.join("\n".join(line.rstrip() for line in page.split("\n")) for page in pages)
    return re.sub(r"\n{3,}", "\n\n", text).strip("\n")


SECONDS = 300
"""Maximum processor time of a conversion in seconds; for uploads, which others wait for, see ``serving.state``."""
BYTES = 4 << 30
"""Address space of a conversion, at most."""
TEXT = 64 << 20
"""Bytes of the text, at most."""
MISSING = 4
"""Exit status where a library is missing, or cannot be imported."""


class Unwanted(Exception):
    """Nobody wants the text any more."""


class Late(ValueError):
    """The limit on time was reached."""


def convert(
    data: bytes, name: str, *, seconds: int = SECONDS, memory: int = BYTES, text: int = TEXT,
    unwanted: Callable[[], bool] = lambda: False, lost: Callable[[str], None] = lambda line: None,
) -> str:  # fmt: skip
    """The text of a file's bytes.

    Args:
        seconds, memory, text: limits; the wall-clock limit is twice the processor's. unwanted: called twice a
            second.
        lost: called with each loss, one line each.

    Raises:
        ValueError: an unknown format, a damaged file, no text, or too much memory. ``Late``: it took too long.
        ImportError: a library is missing or broken; names it. The message may hold paths of this machine.
        Unwanted: ``unwanted`` returned True; the process has ended.
    """
    command = python(__name__, re.sub("[\0\r\n]", " ", name), *map(str, (seconds, memory, text)))
    pipe, end = subprocess.PIPE, time.monotonic() + 2 * seconds
    # In a session of its own: Ctrl-C is for this process to judge.
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True) as child:
        # Not by `communicate`, which before Python 3.13 forgets after a timeout what it has not sent yet.
        threading.Thread(target=_feed, args=(child.stdin, data), daemon=True).start()
        child.stdin = None
        try:
            while True:
                try:
                    said, errors = child.communicate(timeout=0.5)
                    break
                except subprocess.TimeoutExpired:
                    pass
                if unwanted():
                    raise Unwanted
                if time.monotonic() > end:
                    raise Late(f"{name}: its conversion took more than {2 * seconds} s")
        except BaseException:  # Ctrl-C too
            child.kill()
            child.communicate()
            raise
    lines = errors.decode("utf-8", "replace").strip().splitlines()
    if child.returncode == 1:
        raise ValueError(lines[-1])
    if child.returncode == MISSING:
        module, _, words = lines[-1].partition(" ")
        raise ImportError(words, name=module)
    if child.returncode:
        late = -child.returncode in (signal.SIGKILL, signal.SIGXCPU)
        raise (Late if late else ValueError)(f"{name}: its conversion took more than {seconds} s or {memory >> 20} MiB")
    for line in lines:
        lost(line)
    return said.decode("utf-8")


def _feed(stdin: IO[bytes] | None, data: bytes) -> None:
    """Give a process its input, as far as it takes it."""
    assert stdin is not None
    with suppress(BrokenPipeError), stdin:
        stdin.write(data)


def main() -> int:
    """Convert stdin; 1 or ``MISSING`` after an error said in one line."""
    name, (seconds, memory, max_bytes) = sys.argv[1], map(int, sys.argv[2:])
    try:
        import resource

        for kind, most in ((resource.RLIMIT_CPU, seconds), (resource.RLIMIT_AS, memory)):
            with suppress(ValueError):  # the user's own is lower, and stays
                resource.setrlimit(kind, (most, most))
    except ImportError:  # not on Windows: the time limit of the parent remains
        pass
    logging.disable()
    warnings.simplefilter("ignore")
    losses: list[str] = []
    try:
        text = read_stream(sys.stdin.buffer, name, lost=losses.append)
    except MemoryError:
        return 3
    except ImportError as error:
        print(error.name, first_line(error), file=sys.stderr)
        return MISSING
    except (ValueError, OSError) as error:
        print(first_line(error), file=sys.stderr)
        return 1
    said = text.encode("utf-8", "replace")
    if len(said) > max_bytes:
        print(f"{name}: its text has {len(said)} bytes, above the limit of {max_bytes}", file=sys.stderr)
        return 1
    sys.stdout.buffer.write(said)
    for line in losses:
        print(" ".join(line.split()), file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
