"""A real terminal for tests: a program inside of tmux, keys sent to it, and what its screen shows."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from uuid import uuid4

WAIT_S = 180
"""Seconds after which a screen is given up; only a failure takes them."""


class Tmux:
    """A window of 80 columns in which ``words`` run, with ``env`` beside this process's environment."""

    def __init__(self, words: Sequence[str], *, env: dict[str, str], columns: int = 80, rows: int = 50) -> None:
        if not shutil.which("tmux"):
            raise RuntimeError("these tests need tmux: apt-get install tmux, or brew install tmux")
        self._server = f"locret-{os.getpid()}-{uuid4().hex[:8]}"
        run = f"trap : INT; {shlex.join(words)}; echo status $?; exec sleep 600"
        outside = {name: value for name, value in os.environ.items() if not name.startswith("TMUX")}
        self._env = {**outside, **env}
        size = ["-x", str(columns), "-y", str(rows)]
        self._tmux("-f", os.devnull, "new-session", "-d", "-s", "test", *size, f"sh -c {shlex.quote(run)}")

    def _tmux(self, *words: str, given: str | None = None) -> str:
        done = subprocess.run(
            ["tmux", "-L", self._server, *words], env=self._env, input=given, text=True, capture_output=True, check=True
        )
        return done.stdout

    def keys(self, *names: str) -> None:
        """Press keys, by tmux's names."""
        self._tmux("send-keys", "-t", "test", *names)

    def type(self, text: str) -> None:
        """Type a text."""
        self.keys("-l", text)

    def paste(self, text: str) -> None:
        """Paste a text as a terminal does: in brackets, if the program asked for them."""
        self._tmux("load-buffer", "-", given=text)
        self._tmux("paste-buffer", "-p", "-t", "test")

    @property
    def screen(self) -> str:
        """What the window shows and showed, without blanks at the ends of lines and below."""
        return self._tmux("capture-pane", "-p", "-J", "-S", "-", "-t", "test").rstrip()

    def until(self, shows: str | Callable[[str], bool]) -> str:
        """The screen, as soon as it shows a text or fulfils a condition."""
        end = time.monotonic() + WAIT_S
        while time.monotonic() < end:
            screen = self.screen
            if shows in screen if isinstance(shows, str) else shows(screen):
                return screen
            time.sleep(0.05)
        raise AssertionError(f"the screen does not show {shows!r}:\n{self.screen}")

    def __enter__(self) -> Tmux:
        return self

    def __exit__(self, *exc: object) -> None:
        subprocess.run(["tmux", "-L", self._server, "kill-server"], env=self._env, capture_output=True, check=False)
