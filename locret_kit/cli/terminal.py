"""What commands share in a terminal: text in, text and progress out, files that can be written."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path

to_stdout = partial(print, end="", flush=True)


def text_of(file: str | None) -> Iterator[str]:
    """Pieces of the text of a file, or of stdin where it is None or -.

    Raises:
        ValueError: it cannot be read, is not UTF-8, or is blank.
    """
    from ..files import read_utf8
    from ..samples.reader import CONVERTED, read_document

    if file is not None and file.lower().endswith(CONVERTED):
        yield read_document(file)
        return
    source, blank = "stdin" if file in (None, "-") else f"file={file!r}", True
    if source == "stdin" and sys.stdin.isatty():
        print("reading the text from the terminal; end it with Ctrl-D", file=sys.stderr)
    try:
        with nullcontext(sys.stdin.buffer) if source == "stdin" else Path(str(file)).open("rb") as stream:
            for block in read_utf8(stream):
                blank = blank and not block.strip()
                yield block
    except OSError as error:
        raise ValueError(f"{source} cannot be read: {error.strerror}") from error
    if blank:
        raise ValueError(f"{source} holds no text: name a file that does, or give it with < FILE")


def check_target(path: Path, option: str) -> None:
    """Raise ValueError where no file can be put, before the text is read: minutes later would be too late."""
    said = f"{option}={str(path)!r}"
    if path.exists() and not path.is_file():
        raise ValueError(f"{said} is {'a folder' if path.is_dir() else 'no regular file'}: name a file")
    folder = path.resolve().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ValueError(f"{said}: its folder is missing or cannot be written")


def progress(what: str = "prefill") -> Callable[[int, int], None]:
    """A line on stderr that says how far the reading of a text is: ``progress(done, total)`` in tokens."""
    began = last = time.perf_counter()

    def show(done: int, total: int) -> None:
        nonlocal last
        now = time.perf_counter()
        terminal = sys.stderr.isatty()
        if done < total and now - last < (0.5 if terminal else 10):
            return
        last = now
        rate = done / (now - began)
        end = "\r" if terminal and done < total else "\n"
        left = (total - done) / rate
        print(
            f"{what} {done}/{total} tokens, {rate:.0f} tok/s, {left:.0f} s left   ",
            file=sys.stderr,
            end=end,
            flush=True,
        )

    return show
