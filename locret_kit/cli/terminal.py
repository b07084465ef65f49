"""Helpers of commands in a terminal: text in, text and progress out, files that can be written."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from ..config.schema import refuse
from ..files import read_utf8
from ..naming import blaming

if TYPE_CHECKING:
    from ..config.infer_options import Generation
    from ..runtime.session import Answer, Sampling

to_stdout = partial(print, end="", flush=True)


def to_stderr(line: str) -> None:
    """Warn in one line."""
    print(f"warning: {line}", file=sys.stderr, flush=True)


def text_of(file: str | None) -> Iterator[str]:
    """Pieces of the text of a file, or of stdin where it is None or -, which is looked at before this returns: a file as a
    whole, a pipe at its beginning. What is no text by its name or first bytes, such as a PDF from stdin, is converted whole, in a
    process of its own.

    Raises:
        ValueError: it cannot be read, is not UTF-8, or is blank. ImportError: a format that needs the extra ``documents``.
    """
    source, name = ("stdin", "stdin") if file in (None, "-") else (f"file={file!r}", str(file))
    if source == "stdin" and sys.stdin.isatty():
        print("reading the text from the terminal; end it with Ctrl-D", file=sys.stderr)
    with ExitStack() as opened:
        try:
            stream = sys.stdin.buffer if source == "stdin" else opened.enter_context(Path(name).open("rb"))
            first = stream.read(1 << 16)
            if first[4:9] == b"\0\0\0\0{":  # the header of a safetensors file
                raise ValueError(
                    f"{source} is no text but tensors: if locret-read wrote it, locret-ask answers about it"
                )
            from ..text.reader import CONVERTED, LIMIT, convert, may_be_text

            if name.lower().endswith(CONVERTED) or not may_be_text(first):
                return iter([convert(first + stream.read(LIMIT), name, lost=to_stderr)])
            blank = not first.strip()
            if stream.seekable():
                begun = stream.tell() - len(first)
                with blaming(source, ValueError):  # to the end of the file
                    blank = all([not block.strip() for block in read_utf8(stream, first=first)])
                stream.seek(begun)
                first = b""
            if blank and not first:
                raise ValueError(f"{source} holds no text: name a file that does, or give it with < FILE")
        except OSError as error:
            raise ValueError(f"{source} cannot be read: {error.strerror}{_way_out(name)}") from error
        return _blocks(stream, first, source, opened.pop_all())


def _way_out(name: str) -> str:
    """Words for what is no file but may have a text; '' for others."""
    if Path(name).is_dir():
        return ": name a file, or join several, as in cat FILES | locret-infer"
    return ": download it first, and name the file" if "://" in name else ""


def _blocks(stream: BinaryIO, first: bytes, source: str, opened: ExitStack) -> Iterator[str]:
    """The text of a stream that is open; it is closed at the end."""
    from ..text.losses import ENCODED, is_encoded

    blank, encoded = True, False
    with opened:
        try:
            with blaming(source, ValueError):
                for block in read_utf8(stream, first=first):
                    blank = blank and not block.strip()
                    if not encoded and (encoded := is_encoded(block)):
                        to_stderr(f"{source}: {ENCODED}")
                    yield block
        except OSError as error:
            raise ValueError(f"{source} cannot be read: {error.strerror}") from error
    if blank:
        raise ValueError(f"{source} holds no text: name a file that does, or give it with < FILE")


def words_of(option: str, file: str) -> str:
    """The text of a small file that an option names, or of stdin where it is -. Raises ValueError where it is none."""
    source = "stdin" if file == "-" else f"{option}={file!r}"
    try:
        with (
            nullcontext(sys.stdin.buffer) if file == "-" else Path(file).open("rb") as stream,
            blaming(source, ValueError),
        ):
            return "".join(read_utf8(stream))
    except OSError as error:
        raise ValueError(f"{source} cannot be read: {error.strerror}") from error


def check_saved(file: str | Path) -> None:
    """Raise ValueError or OSError where a file is not there or is no saved cache, without torch: it takes seconds."""
    from ..cache.file import read_record

    read_record(Path(file))


def title_of(file: str | None) -> str:
    """A text's title: its file's name; '' from stdin."""
    return "" if file in (None, "-") else Path(str(file)).name


def check_target(path: Path, option: str, *, replace: bool = True, source: str | None = None) -> None:
    """Raise ValueError where no file can be put, before the text is read: minutes later would be too late. Nor may one be
    there, unless ``replace``, and never the one that is read, ``source``."""
    said = f"{option}={str(path)!r}"
    if path.exists() and not path.is_file():
        raise ValueError(f"{said} is {'a folder' if path.is_dir() else 'no regular file'}: name a file")
    if path.exists() and not replace:
        raise ValueError(f"{said} is there already: name another file, or remove it first")
    if source is not None and path.resolve() == Path(source).resolve():
        raise ValueError(f"{said} is the file that is read: name another")
    folder = path.resolve().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ValueError(f"{said}: its folder is missing or cannot be written")


def progress(what: str = "prefill") -> Callable[[int, int], None]:
    """A line on stderr that says how far the reading of a text is: ``progress(done, total)`` in tokens. The first say no rate: a
    part may have been there before."""
    began, first, last = 0.0, 0, time.monotonic()

    def show(done: int, total: int) -> None:
        nonlocal began, first, last
        now, terminal = time.monotonic(), sys.stderr.isatty()
        if not first:
            began, first = now, done
        if done < total and now - last < (0.5 if terminal else 10):
            return
        last, line = now, f"{what} {done}/{total} tokens"
        if done > first and now > began:
            rate = (done - first) / (now - began)
            line += f", {rate:.0f} tok/s, {(total - done) / rate:.0f} s left"
        if terminal:  # a line that is wrapped would stay
            line = f"{line}   "[: shutil.get_terminal_size().columns - 1]
        print(line, file=sys.stderr, end="\r" if terminal and done < total else "\n", flush=True)

    return show


def check_sampling(args: Generation) -> Sampling:
    """Options of sampling. Raises ValueError for what is out of bounds, and for options that could not act."""
    from ..runtime.session import Sampling

    sampling = Sampling(args.temperature, args.top_k, args.top_p, args.repetition_penalty)
    if args.temperature == 0:
        refuse(args, ("top_k", "top_p"), "at temperature 0, which is greedy")
    return sampling


def check_question(question: str) -> None:
    """Raise ValueError for a question without words, or with bytes of another encoding, as the shell gave them."""
    if not question.strip():
        raise ValueError("the question is empty")
    try:
        question.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"the question is not UTF-8: character {error.start}") from error


def json_line(value: object) -> str:
    """A value as JSON; in escapes where stdout's encoding lacks a character, since those of ``open_streams`` are no JSON."""
    line = json.dumps(value, ensure_ascii=False)
    try:
        line.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        return json.dumps(value)
    return line


def write_answer(answer: Answer, question: str | None = None, *, first: bool = True) -> None:
    """Write an answer to stdout while it is made, below its question where one is given."""
    if question is not None:
        to_stdout("" if first else "\n", f"question: {question}\n", sep="")
    for piece in answer:
        to_stdout(piece)
    to_stdout("\n")


def plain(value: object) -> str:
    """A value in one line, and nothing in it that a terminal would obey."""
    return "".join(c if c.isprintable() else "\ufffd" for c in " ".join(str(value).split()))
