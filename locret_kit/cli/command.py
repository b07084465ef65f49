"""Entry point of a command: one-line errors, exit statuses, Ctrl-C, closed streams. No torch.

It also has functions that commands share: text input, output of answers and progress, checks of output files.
"""

from __future__ import annotations

import io
import logging
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from functools import partial, wraps
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, ParamSpec

from ..backbones import newer
from ..cache.file import holds_tensors
from ..config.infer_options import Backbone, Plugin
from ..config.schema import Command, T, UsageError, read
from ..files import read_utf8
from ..hub import OneRetryLine
from ..naming import first_line, install_line, prefixed_errors
from ..planning import duration
from ..processes import choose_threads
from ..text.converters import ENCODED, LIMIT, is_encoded
from ..text.folder import read_folder
from ..text.reader import convert, is_converted

if TYPE_CHECKING:
    from ..runtime.session import Answer

P = ParamSpec("P")
_RETRIES = OneRetryLine()
CONTROLS = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
"""Control characters, which could command a terminal."""


def open_streams() -> None:
    """Open the three standard streams. One that the caller closed reads and writes nothing. Characters that stdout's
    encoding lacks are escaped, as on stderr, instead of failing after minutes of work."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 (open until the process ends)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def drop_output() -> None:
    """Drop what stdout does not take, be it a pipe that is closed or a disk that is full: at exit it would be a traceback."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def install_hint(error: ImportError) -> str:
    """The install command for a missing module of one of the package's extras; '' for others."""
    missing = (error.name or "").split(".")[0]
    with suppress(PackageNotFoundError):  # run from a checkout
        for requirement in requires("locret-kit") or []:
            match = re.match(r"([\w-]+)[^;]*; extra == .(\w+)", requirement)
            if match and match[1].replace("-", "_") == missing:
                return f": {install_line(match[2])}"
    return ""


def command(
    name: str, *, stopped: str = "stopped", also: tuple[type[Exception], ...] = (), usage: int = 1
) -> Callable[[Callable[P, int]], Callable[P, int]]:
    """Decorate a ``main`` that raises errors for the user: ValueError, OSError, ImportError and ``also``.

    The exit status is main's own, 1 after an error or a closed stdout, 130 after Ctrl-C. Each error is one line on
    stderr that begins with ``name``. ``usage`` is the status after unknown options. ``stopped`` is the message after
    Ctrl-C; '' prints none. Any other exception is a bug and shows its traceback. If a library newer than the tested
    one may be the cause, a line names a release that works.
    """
    mendable: tuple[type[Exception], ...] = (ValueError, OSError, ImportError, *also)

    def say(*lines: str) -> None:
        for line in lines:
            note(f"{name}: {line}")

    def decorate(main: Callable[P, int]) -> Callable[P, int]:
        @wraps(main)
        def guarded(*args: P.args, **kwargs: P.kwargs) -> int:
            open_streams()
            choose_threads()
            logging.getLogger(OneRetryLine.LOGGER).addFilter(_RETRIES)
            try:
                status = main(*args, **kwargs)
                sys.stdout.flush()
                return status
            except BrokenPipeError:
                say("stdout was closed before the output ended")
                return 1
            except mendable as error:
                say(first_line(error) + (install_hint(error) if isinstance(error, ImportError) else ""))
                if not isinstance(error, ValueError | OSError):  # as a library raises them that is not as we know it
                    say(*newer())
                return usage if isinstance(error, UsageError) else 1
            except Exception:
                say(*newer())
                raise
            except KeyboardInterrupt:
                if stopped:
                    note(f"\n{name}: {stopped}")
                return 130
            finally:
                drop_output()

        return guarded

    return decorate


def entry(
    options: Command[T], run: Callable[[T], int], *, stopped: str = "stopped", also: tuple[type[Exception], ...] = (),
    usage: int = 2,
) -> Callable[..., int]:  # fmt: skip
    """The ``main`` of a command, which reads its options, loads the plugin that they name, and runs them.

    Exit status 0 after ``--help`` and its like, else that of ``run``, or as ``command`` says.
    """

    @command(options.name, stopped=stopped, also=also, usage=usage)
    def main(argv: list[str] | None = None) -> int:
        args = read(options, sys.argv[1:] if argv is None else argv)
        if args is None:
            return 0
        load_plugin(args)
        if isinstance(args, Backbone) and args.list_policies:
            from ..policies.grammar import describe_policies

            print("\n".join(describe_policies()))
            return 0
        return run(args)

    return main


def load_plugin(args: object) -> None:
    """Register the policies of a plugin that options name. Raises ValueError: it is not there, or fails."""
    if isinstance(args, Plugin) and args.plugin is not None:
        from ..policies import registry

        registry.load_plugin(args.plugin)


to_stdout = partial(print, end="", flush=True)


def note(line: object) -> None:
    """Say something that is no answer, on stderr; a name in it may hold control characters."""
    print(str(line).translate(CONTROLS), file=sys.stderr, flush=True)


def warn(line: str) -> None:
    """Warn in one line."""
    note(f"warning: {line}")


def text_of(file: str | None, include: Sequence[str] = ()) -> Iterator[str]:
    """Pieces of the text of a file, of a folder's files that match ``include``, or of stdin if it is None or -. The input
    is checked before this returns: files completely, a pipe at its beginning. Input that is no text by its name or first
    bytes, such as a PDF on stdin, is converted as a whole in a separate process.

    Raises:
        ValueError: unreadable, not UTF-8, or blank. ImportError: a format that needs the extra ``documents``.
    """
    source, name = ("stdin", "stdin") if file in (None, "-") else (f"file={file!r}", str(file))
    if source != "stdin" and Path(name).is_dir():
        with prefixed_errors(source, OSError):
            return iter([*read_folder(name, include, warn)])
    if include:
        raise ValueError(f"include={include[0]!r} chooses files of a folder, and {source} is none")
    with ExitStack() as opened:
        try:
            stream = typed_or_piped("text") if source == "stdin" else opened.enter_context(Path(name).open("rb"))
            first = stream.read(1 << 16)
            if holds_tensors(first):
                raise ValueError(
                    f"{source} holds tensors, not text: if locret-read wrote it, ask about it with locret-ask"
                )
            if is_converted(name, first):
                return iter([convert(first + stream.read(LIMIT), name, lost=warn)])
            blocks = _blocks(stream, first, source, opened.pop_all())
            return iter([*blocks]) if stream.seekable() or not first else blocks
        except OSError as error:
            hint = ": download it first, and name the file" if "://" in name else ""
            raise ValueError(f"{source} cannot be read: {error.strerror}{hint}") from error


def typed_or_piped(what: str) -> BinaryIO:
    """stdin; of a terminal all that is typed, up to one Ctrl-D. Another look at its end would wait for a second one."""
    if not sys.stdin.isatty():
        return sys.stdin.buffer
    note(f"reading the {what} from the terminal; end it with Ctrl-D")
    return io.BytesIO(sys.stdin.buffer.read())


def _blocks(stream: BinaryIO, first: bytes, source: str, opened: ExitStack) -> Iterator[str]:
    """The text of a stream that is open; it is closed at the end."""
    blank, encoded = True, False
    with opened, prefixed_errors(source, ValueError, OSError):
        for block in read_utf8(stream, first=first):
            blank = blank and not block.strip()
            if not encoded and (encoded := is_encoded(block)):
                warn(f"{source}: {ENCODED}")
            yield block
    if blank:
        raise ValueError(f"{source} has no text: name another file, or pipe a text with < FILE")


def title_of(file: str | None) -> str:
    """A text's title: its file's or folder's name, a link's own; '' from stdin, or from a pipe of a shell's ``<(...)``."""
    place = Path("-" if file is None else file)
    if file in (None, "-") or (place.exists() and not place.resolve().exists()):
        return ""
    return os.path.basename(os.path.abspath(place))


def check_target(path: Path, option: str, *, replace: bool = True, source: str | None = None) -> None:
    """Raise ValueError where no file can be put, before the text is read: minutes later would be too late. Nor may one be
    there, unless ``replace``, and never the one that is read, ``source``."""
    said = f"{option}={str(path)!r}"
    if path.exists() and not path.is_file():
        raise ValueError(f"{said} is {'a folder' if path.is_dir() else 'no regular file'}: name a file")
    if path.exists() and not replace:
        raise ValueError(f"{said} already exists: name another file, or remove it first")
    if source is not None and path.resolve() == Path(source).resolve():
        raise ValueError(f"{said} is the input file: name another")
    folder = path.resolve().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ValueError(f"{said}: its folder is missing or cannot be written")


def progress(what: str = "prefill", full: float = 0) -> Callable[[int, int], None]:
    """A line on stderr that says how far the reading of a text is: ``progress(done, total)`` in tokens. The first say no rate: a
    part may have been there before. ``full``: tokens after which a cache is full; before, the time that is left is not known."""
    began, first, last = 0.0, 0, time.monotonic()

    def show(done: int, total: int) -> None:
        nonlocal began, first, last
        now, terminal = time.monotonic(), sys.stderr.isatty()
        if not first or first < full <= done:
            began, first = now, done
        if done < total and now - last < (0.5 if terminal else 10):
            return
        last, line = now, f"{what} {done}/{total} tokens"
        if done > first and now > began:
            rate = (done - first) / (now - began)
            line += f", {rate:.0f} tok/s" + f", {duration((total - done) / rate)} left" * (first >= full)
        if terminal:  # a line that is wrapped would stay
            line = f"{line}   "[: shutil.get_terminal_size().columns - 1]
        print(line, file=sys.stderr, end="\r" if terminal and done < total else "\n", flush=True)

    return show


def write_answer(answer: Answer, question: str | None = None, *, first: bool = True, quiet: bool = False) -> None:
    """Write an answer to stdout while it is made, below its question where one is given, and its evidence below it."""
    if question is not None:
        to_stdout("" if first else "\n", f"question: {question}\n", sep="")
    for piece in collapse(answer, quiet=quiet):
        to_stdout(piece)
    to_stdout("\n", *(f"{line}\n" for line in evidence_lines(answer)), sep="")


def evidence_lines(answer: Answer) -> list[str]:
    """A heading and a line for each passage of an answer's evidence; none without evidence."""
    shown = [f"  {passage}".translate(CONTROLS) for passage in answer.evidence]
    return ["evidence:", *shown] if shown else []


def collapse(pieces: Iterable[str], *, quiet: bool = False) -> Iterator[str]:
    """Pieces of an answer without its thought, and for a terminal without control characters, which it may quote from a text.
    stderr gets one dim line with the thought's length, and a terminal shows it in progress."""
    from ..runtime.session import ThoughtPiece

    words, dim, plain = "", *(("\r\033[2m", "\033[0m") if (terminal := sys.stderr.isatty()) else ("", ""))

    def line(end: str) -> None:
        if not quiet:
            print(f"{dim}thought: {len(words.split())} words{plain}", end=end, file=sys.stderr, flush=True)

    for piece in pieces:
        if isinstance(piece, ThoughtPiece):
            words += piece
            if terminal:
                line("")
            continue
        if words:
            line("\n")
            words = ""
        yield piece.translate(CONTROLS) if sys.stdout.isatty() else piece
    if words:
        line("\n")


def record_of(answer: Answer) -> dict[str, object]:
    """An answer, read to its end, as a record of JSON."""
    record: dict[str, object] = {"answer": str(answer), "finish_reason": answer.finish_reason}
    record |= {"evidence": [asdict(passage) for passage in shown]} if (shown := answer.evidence) else {}
    return record | ({"thought": answer.thought_text} if answer.thought_text else {})
