"""Files of ``locret-infer --batch``: prompts, one a line, and answers that an earlier run left. No torch."""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

from ..config.infer_options import InferOptions, Name
from ..config.schema import refuse
from ..files import locked, parse_json, write_text
from .terminal import check_target

IDLE = ("file", "question", "question_file", "report", "graph")
"""Options of one text."""


@dataclass(frozen=True)
class BatchFiles:
    """Files that were looked at."""

    source: IO[bytes]
    """The prompts, which are read again when their turn comes."""
    target: Path
    names: list[Name]
    """Ids of all prompts."""
    done: set[str]
    """Keys of those that have an answer."""


@contextmanager
def open_batch(args: InferOptions) -> Iterator[BatchFiles]:
    """The files, for this process alone. Raises ValueError or OSError with a one-line message."""
    target = check_files(args)
    busy = f"out={args.out!r} is being written by another process"
    with open_prompts(str(args.batch)) as source, locked(target.with_name(f".{target.name}.lock"), busy):
        names = [name for name, _ in lines_of(source)]
        check_names(str(args.batch), names)
        yield BatchFiles(source, target, names, keep_answers(target))


def check_files(args: InferOptions) -> Path:
    """The file of the answers. Raises ValueError for files that cannot be, and for options of one text."""
    refuse(args, IDLE, "with --batch, whose lines say what is asked")
    refuse(args, ("gpu_memory",), "with --batch: a cache for each of --batch-size prompts is not planned yet")
    if not args.out:
        raise ValueError("--batch needs a file for the answers: give -o answers.jsonl")
    target = Path(args.out)
    check_target(target, "out", source=str(args.batch))
    return target


@contextmanager
def open_prompts(batch: str) -> Iterator[IO[bytes]]:
    """A file of prompts, or a temporary copy of what a pipe gives, which can be read but once.

    Raises:
        ValueError: it cannot be read, or is neither.
    """

    def at_once(path: str, flags: int) -> int:
        """Opened without waiting for a writer: a pipe that has none is empty."""
        return os.open(path, flags | os.O_NONBLOCK)

    with ExitStack() as stack:
        try:
            source: IO[bytes] = stack.enter_context(open(batch, "rb", opener=at_once))
            kind = os.fstat(source.fileno()).st_mode
            if stat.S_ISFIFO(kind):
                os.set_blocking(source.fileno(), True)
                copy = stack.enter_context(TemporaryFile())
                shutil.copyfileobj(source, copy)
                source = copy
            elif not stat.S_ISREG(kind):
                raise ValueError(f"batch={batch!r} must be a file or a pipe")
        except OSError as error:
            raise ValueError(f"batch={batch!r} cannot be read: {error.strerror}") from error
        yield source


def lines_of(source: IO[bytes]) -> Iterator[tuple[Name, object]]:
    """Each prompt's id and its line's value, or the ValueError that says why there is none. Blank lines are left out."""
    source.seek(0)
    for number, line in enumerate(source, 1):
        if not line.strip():
            continue
        try:
            data = parse_json(line, f"line {number}")
            json.dumps(data, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            data = ValueError(f"line {number} holds half of a character (a surrogate)")
        except ValueError as error:
            data = error
        name = data.get("id") if isinstance(data, dict) else None
        yield (name if isinstance(name, str) or type(name) is int else number), data


def check_names(batch: str, names: list[Name]) -> None:
    """Raise ValueError where there are no prompts, or two have one id."""
    if not names:
        raise ValueError(f"batch={batch!r} holds no prompts")
    seen: set[str] = set()
    for name in names:
        if key_of(name) in seen:
            raise ValueError(
                f"batch={batch!r}: id {key_of(name)} is there twice (a prompt without one has its line's number)"
            )
        seen.add(key_of(name))


@contextmanager
def open_answers(target: Path) -> Iterator[IO[str]]:
    """The file of the answers, to add to. Raises OSError that names it, as where the disk is full."""
    try:
        with open(target, "a", encoding="utf-8") as file:
            yield file
    except OSError as error:
        raise OSError(f"cannot write {target}: {error.strerror}") from error


def key_of(name: object) -> str:
    """An id as JSON writes it: 1 and "1" are two."""
    return json.dumps(name, ensure_ascii=False)


def keep_answers(target: Path) -> set[str]:
    """Ids that have an answer in the file. Of a run that was cut short, a last line without its end is dropped, and so are
    errors, whose prompts are run again.

    Raises:
        ValueError: the file holds something else than answers.
    """
    if not target.exists():
        return set()
    whole = target.read_bytes()
    kept, done = [], set()
    for number, line in enumerate(whole.splitlines(keepends=True), 1):
        if not line.endswith(b"\n"):
            break
        record = parse_json(line, f"out={str(target)!r}: line {number}")
        if not isinstance(record, dict) or "id" not in record or not {"answer", "error"} & record.keys():
            raise ValueError(f"out={str(target)!r}: line {number} is no answer of a batch: name another file")
        if "error" not in record:
            kept.append(line)
            done.add(key_of(record["id"]))
    if b"".join(kept) != whole:
        write_text(target.resolve(), b"".join(kept).decode())
    return done
