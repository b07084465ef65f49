"""Messages in and words out of a chat: a line editor in a terminal, or lines of stdin. Answers go to stdout, all else to stderr.

In a terminal Ctrl-C sets a flag, which is looked at between two pieces of work: no forward is left in the middle.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from .terminal import progress, to_stdout

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession

CONTROLS = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
"""Characters with which a text could command a terminal."""
PATIENCE_S = 2
"""Seconds of reading a message after which its progress is shown."""


class Stopped(Exception):
    """Ctrl-C, between two pieces of work."""


class Screen:
    """A terminal, where stdin is one, else pipes: no prompts, and no greetings.

    Args:
        history_file: where messages of a terminal are kept for the next time; None keeps them in memory.

    Raises:
        OSError: the file of the history cannot be written.
    """

    status = 0
    """Exit status: 1 after an error in pipes."""

    def __init__(self, history_file: str | None = None) -> None:
        self._pressed = False
        self._editor: PromptSession[str] | None = None
        if sys.stdin.isatty() and (sys.stdout.isatty() or sys.stderr.isatty()):
            self._editor = line_editor(history_file)
            signal.signal(signal.SIGINT, self._press)

    def _press(self, *_: object) -> None:
        """Note Ctrl-C. A second one does not wait for a piece of work."""
        if self._pressed:
            raise KeyboardInterrupt
        self._pressed = True

    def messages(self) -> Iterator[str]:
        """Messages until the end of input: lines, each joined with the next where it ends with a backslash, none blank."""
        earlier = ""
        for line in self._lines() if self._editor is None else self._typed(self._editor):
            if line.endswith("\\"):
                earlier += line[:-1] + "\n"
                continue
            message, earlier = earlier + line, ""
            if message.strip():
                yield message
        if earlier.strip():
            yield earlier

    def _typed(self, editor: PromptSession[str]) -> Iterator[str]:
        while True:
            try:
                self._pressed = False
                yield editor.prompt("> ", prompt_continuation="  ")
            except EOFError:
                return
            except KeyboardInterrupt:
                self.note("Ctrl-D leaves")

    def _lines(self) -> Iterator[str]:
        for number, line in enumerate(sys.stdin.buffer, 1):
            try:
                yield line.decode().removeprefix("\ufeff" * (number == 1)).rstrip("\r\n")
            except UnicodeDecodeError as error:
                self.complain(f"line {number} of stdin is not UTF-8: byte {error.start}")

    @contextmanager
    def working(self) -> Iterator[None]:
        """A block in which Ctrl-C raises Stopped, in a terminal."""
        self._pressed = False
        try:
            yield
        except KeyboardInterrupt:
            if self._editor is None:
                raise
            raise Stopped from None

    def _check(self) -> None:
        if self._pressed:
            raise Stopped

    def progress(self, patience_s: float = 0) -> Callable[[int, int], None]:
        """Progress of reading a text, as a line on stderr after so many seconds. Checks for Ctrl-C."""
        show, began = progress("read"), time.monotonic()

        def step(done: int, total: int) -> None:
            if time.monotonic() - began >= patience_s:
                show(done, total)
            if self._pressed:
                self.note("")  # ends the line
            self._check()

        return step

    def stream(self, pieces: Generator[str, None, None]) -> None:
        """Write an answer while it comes, and end its line."""
        last = "\n"
        try:
            with closing(pieces):
                for piece in pieces:
                    to_stdout(piece.translate(CONTROLS) if sys.stdout.isatty() else piece)
                    last = piece[-1:] or last
                    self._check()
        finally:
            to_stdout("" if last == "\n" else "\n")

    def greet(self, text: str) -> None:
        """Say something to a person alone."""
        if self._editor is not None:
            self.note(text)

    def note(self, text: str) -> None:
        """Say something that is no answer."""
        print(text.translate(CONTROLS), file=sys.stderr, flush=True)

    def complain(self, text: str) -> None:
        """Say an error."""
        self.status = int(self._editor is None)
        self.note(text if self._editor is not None else f"locret-chat: {text}")


def line_editor(history_file: str | None) -> PromptSession[str]:
    """A line editor with history. Enter sends, Alt-Enter begins another line, and so does a pasted end of a line."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import FileHistory, History, InMemoryHistory
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
    from prompt_toolkit.output import create_output

    keys = KeyBindings()

    @keys.add("escape", "enter")
    def another_line(event: KeyPressEvent) -> None:
        event.current_buffer.newline(copy_margin=False)

    history: History = InMemoryHistory()
    if history_file is not None:
        path = Path(history_file).expanduser()
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))  # what is said there is its owner's
        history = FileHistory(str(path))
    output = create_output(always_prefer_tty=True)
    return PromptSession(history=history, key_bindings=keys, enable_suspend=True, output=output)
