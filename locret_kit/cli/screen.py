"""Screens of a chat: a terminal, or pipes line by line.

Answers go to stdout and everything else to stderr. In a terminal Ctrl-C sets a flag, which is looked at between two pieces of
work: no forward is left in the middle.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from typing import TextIO

from ..runtime.kept_text import DIM, PLAIN
from .line_editor import line_session, silent_keys
from .terminal import pace, progress, to_stdout

CONTROLS = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
"""Characters with which a text could command a terminal."""
TWICE_S = 1.0
"""Seconds between the two Ctrl-C that leave."""


class Stopped(Exception):
    """Ctrl-C, between two pieces of work."""


class Lines:
    """A text that comes in pieces, broken between words where a line would be longer than ``columns``; None breaks none. A word
    that is longer itself is shown as it comes."""

    def __init__(self, columns: int | None) -> None:
        self._columns, self._column, self._word, self._long = columns, 0, "", False

    def feed(self, piece: str) -> str:
        """The text that may be shown after a piece: all but the word at its end, as long as it may fit into a line."""
        if self._columns is None:
            self._column = 0 if piece.endswith("\n") else self._column + len(piece)
            return piece
        from prompt_toolkit.utils import get_cwidth

        shown = ""
        for character in piece:
            width = get_cwidth(character)
            if not character.isspace() and width < 2:  # wide ones, as in Chinese, are words of their own
                self._word += character
                if self._long or get_cwidth(self._word) > self._columns:
                    shown += self._flush()
                    self._long = True
                continue
            if self._word:
                shown += self._flush()
            self._long = False
            if character == "\t":
                width = 8 - self._column % 8
            if character == "\n":
                self._column = 0
            elif self._column + width > self._columns:
                if character.isspace():
                    continue
                shown, self._column = shown + "\n", width
            else:
                self._column += width
            shown += character
        return shown

    def _flush(self) -> str:
        """The word, on a line of its own where it does not fit; a long one that goes on breaks no more."""
        from prompt_toolkit.utils import get_cwidth

        word, self._word, width = self._word, "", get_cwidth(self._word)
        fits = self._columns is None or self._column + width <= self._columns
        breaks = self._column and not self._long and not fits
        self._column = width if breaks else self._column + width
        return "\n" * bool(breaks) + word

    def end(self) -> str:
        """The last word, and the end of a line that has begun."""
        return (self._flush() if self._word else "") + "\n" * bool(self._column)


class Pipes:
    """One message per line of stdin, joined with the next where it ends with a backslash. No colours, no prompts."""

    status = 0
    """Exit status: 1 after an error."""

    def messages(self) -> Iterator[str]:
        """Messages until the end of input; blank ones are left out."""
        earlier = ""
        for number, line in enumerate(sys.stdin.buffer, 1):
            try:
                text = line.decode().removeprefix("\ufeff" * (number == 1)).rstrip("\r\n")
            except UnicodeDecodeError as error:
                self.complain(f"line {number} of stdin is not UTF-8: byte {error.start}")
                continue
            if text.endswith("\\"):
                earlier += text[:-1] + "\n"
                continue
            message, earlier = earlier + text, ""
            if message.strip():
                yield message
        if earlier.strip():
            yield earlier

    def working(self) -> AbstractContextManager[None]:
        """A block in which Ctrl-C stops what is done."""
        return nullcontext()

    def check(self) -> None:
        """Raise Stopped after Ctrl-C."""

    def progress(self, what: str, *, patience_s: float = 0) -> Callable[[int, int], None]:
        """Progress of reading a text, as a line on stderr after so many seconds. Checks for Ctrl-C."""
        show, began = progress(what), time.monotonic()

        def step(done: int, total: int) -> None:
            if time.monotonic() - began >= patience_s:
                show(done, total)
            self.check()

        return step

    def stream(self, pieces: Generator[str, None, None]) -> None:
        """Write an answer while it comes, and end its line."""
        lines = Lines(shutil.get_terminal_size().columns if sys.stdout.isatty() else None)
        try:
            with closing(pieces):
                for piece in pieces:
                    to_stdout(lines.feed(self.shown(piece)))
                    self.check()
        finally:
            to_stdout(lines.end())

    def page(self, text: str) -> None:
        """Show a text that may be long."""
        to_stdout(text + "\n")

    def colored(self, stream: TextIO) -> bool:
        """Whether bright and dim text may be written there."""
        return False

    def shown(self, text: str) -> str:
        """A text as it may be written to stdout: none can command a terminal."""
        return text.translate(CONTROLS) if sys.stdout.isatty() else text

    def greet(self, text: str) -> None:
        """Say something to a person alone."""

    def note(self, text: str) -> None:
        """Say something that is no answer."""
        print(text.translate(CONTROLS), file=sys.stderr, flush=True)

    def complain(self, text: str) -> None:
        """Say an error."""
        self.status = 1
        print(f"locret-chat: {text.translate(CONTROLS)}", file=sys.stderr, flush=True)


class Terminal(Pipes):
    """A line editor with history, multi-line paste and completion.

    Args:
        completions: words that begin a line, and whether a path follows them.
        history_file: where messages are kept for the next time; None keeps them in memory.

    Raises:
        OSError: the file of the history cannot be written.
    """

    def __init__(self, completions: dict[str, bool], history_file: str | None = None) -> None:
        self._pressed = False
        self._progressing = False
        self._session = line_session(completions, history_file)

    def messages(self) -> Iterator[str]:
        signal.signal(signal.SIGINT, self._press)
        from prompt_toolkit.formatted_text import FormattedText

        begin = FormattedText([("bold" if self.colored(sys.stdout) else "", "> ")])
        stopped = float("-inf")
        while True:
            try:
                if self._pressed:  # just before the line editor was there
                    raise KeyboardInterrupt
                message = self._session.prompt(begin, prompt_continuation="  ")
            except EOFError:
                return
            except KeyboardInterrupt:
                self._pressed = False
                if time.monotonic() - stopped < TWICE_S:
                    return
                stopped = time.monotonic()
                self.note("Ctrl-C again, or Ctrl-D, leaves")
                continue
            if message.strip():
                yield message

    @contextmanager
    def working(self) -> Iterator[None]:
        self._pressed = False
        signal.signal(signal.SIGINT, self._press)
        try:
            with silent_keys():
                yield
        except KeyboardInterrupt:
            raise Stopped from None
        finally:
            self._pressed = False

    def check(self) -> None:
        if self._pressed:
            raise Stopped

    def progress(self, what: str, *, patience_s: float = 0) -> Callable[[int, int], None]:
        words, last = pace(what), 0.0

        def step(done: int, total: int) -> None:
            nonlocal last
            self.check()
            line, now = words(done, total), time.monotonic()
            if not last:
                last = now - 1 + patience_s
            elif now - last > 0.2 and done < total:
                last = now
                self._erase()
                print(line[: shutil.get_terminal_size().columns - 1], end="", file=sys.stderr, flush=True)
                self._progressing = True
            elif done >= total:
                self._erase()

        return step

    def _erase(self) -> None:
        """Take the progress line away."""
        if self._progressing:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
            self._progressing = False

    def _press(self, *_: object) -> None:
        """Show that Ctrl-C was seen: a piece of work may take seconds. A second one does not wait for it."""
        if self._pressed:
            raise KeyboardInterrupt
        self._pressed = True
        os.write(2, b" ^C")  # no stream: one may be in the middle of writing

    def page(self, text: str) -> None:
        pager = shlex.split(os.environ.get("PAGER", "")) or ["less"]
        if not sys.stdout.isatty() or not shutil.which(pager[0]):
            super().page(text)
            return
        # As git does: no pager for what fits, colours as they are, the text stays on the screen.
        environment = {"LESS": "FRXPq goes back to the conversation$", **os.environ}
        subprocess.run(pager, input=text + "\n", text=True, encoding="utf-8", env=environment, check=False)

    def colored(self, stream: TextIO) -> bool:
        return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"

    def greet(self, text: str) -> None:
        self.note(text)

    def complain(self, text: str) -> None:
        self._erase()
        lines = Lines(shutil.get_terminal_size().columns)
        print(lines.feed(text.translate(CONTROLS)) + lines.end(), end="", file=sys.stderr, flush=True)

    def note(self, text: str) -> None:
        begin, end = (DIM, PLAIN) if self.colored(sys.stderr) else ("", "")
        print(begin, end="", file=sys.stderr)
        self.complain(text)
        print(end, end="", file=sys.stderr, flush=True)
