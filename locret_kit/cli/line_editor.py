"""Line editor of a conversation in a terminal: history, completion, keys."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import Completer
    from prompt_toolkit.key_binding import KeyBindings


def line_session(completions: dict[str, bool], history_file: str | None) -> PromptSession[str]:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import FileHistory, InMemoryHistory
    from prompt_toolkit.output import create_output

    if history_file is not None:
        path = Path(history_file).expanduser()
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))  # what is said there is its owner's
        history_file = str(path)
    return PromptSession(
        history=InMemoryHistory() if history_file is None else FileHistory(history_file),
        multiline=True, key_bindings=_keys(), complete_while_typing=False, enable_suspend=True,
        completer=_completer(completions),
        output=create_output(always_prefer_tty=True), reserve_space_for_menu=4,
    )  # fmt: skip


def _completer(completions: dict[str, bool]) -> Completer:
    """Commands, and paths after some of them."""
    from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
    from prompt_toolkit.document import Document

    class Commands(Completer):
        def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterator[Completion]:
            name, blank, path = document.text_before_cursor.partition(" ")
            if completions.get(name) and blank:
                yield from PathCompleter(expanduser=True).get_completions(Document(path), complete_event)
            elif name.startswith("/") and not blank:
                yield from (Completion(word, -len(name)) for word in completions if word.startswith(name))

    return Commands()


def _keys() -> KeyBindings:
    """Enter sends; Alt-Enter, or Enter after a backslash at the end, begins another line."""
    from prompt_toolkit.filters import has_focus
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    keys = KeyBindings()
    here = has_focus("DEFAULT_BUFFER")

    @keys.add("enter", filter=here)
    def send(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.is_cursor_at_the_end and buffer.text.endswith("\\"):
            buffer.delete_before_cursor()
            buffer.newline(copy_margin=False)
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter", filter=here)
    def another_line(event: KeyPressEvent) -> None:
        event.current_buffer.newline(copy_margin=False)

    return keys


@contextmanager
def silent_keys() -> Iterator[None]:
    """A block in which keys wait for the next prompt, and do not show between the words of an answer."""
    try:
        import termios
    except ImportError:  # not on Windows
        yield
        return
    keyboard = sys.stdin.fileno()
    before = termios.tcgetattr(keyboard)
    now = termios.tcgetattr(keyboard)
    now[0] &= ~termios.ICRNL
    now[3] &= ~(termios.ECHO | termios.ICANON)
    try:
        termios.tcsetattr(keyboard, termios.TCSADRAIN, now)
        yield
    finally:
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)
