"""What every command does at its edges: its words, one line for an error, an exit status, Ctrl-C, a reader that has left."""

from __future__ import annotations

import argparse
import functools
import io
import os
import re
import sys
from collections.abc import Callable, Iterable
from typing import NoReturn, ParamSpec

from .. import threads
from ..naming import first_line, nearest

P = ParamSpec("P")


class Flags(argparse.ArgumentParser):
    """A parser whose errors are one line like all others, with the nearest flag that there is. Exit status 2."""

    def error(self, message: str) -> NoReturn:
        unknown = re.search(r"unrecognized arguments: (--[\w-]+)", message)
        flags = (flag for action in self._actions for flag in action.option_strings)
        near = nearest(unknown[1], flags) if unknown else ""
        self.exit(2, f"{self.prog}: {message}.{near} (--help lists what there is)\n")


def pairs_of(argv: Iterable[str], example: str) -> dict[str, str]:
    """``{key: text}`` of ``key=value`` arguments, in their order.

    Raises:
        ValueError: an argument of another form (``example`` is one that is right), or a key that is given twice.
    """
    given: dict[str, str] = {}
    for argument in argv:
        key, equals, text = argument.partition("=")
        if not equals or not key:
            raise ValueError(f"argument {argument!r} must be key=value, such as {example}")
        if key in given:
            raise ValueError(f"{key} is given twice: {key}={given[key]} and {argument}")
        given[key] = text
    return given


def open_streams() -> None:
    """The three streams, whatever the caller left of them: one that was closed reads and writes nothing, and what stdout's
    encoding lacks is escaped, as stderr does it, rather than an error after minutes of work."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 (open until the process ends)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def command(
    name: str, *, stopped: str = "stopped", also: tuple[type[Exception], ...] = ()
) -> Callable[[Callable[P, int]], Callable[P, int]]:
    """Decorate a ``main`` that raises what its user can mend: ValueError, OSError, ImportError and ``also``.

    Its status is then its own, 1 after an error or a closed stdout, 130 after Ctrl-C, each said in one line on stderr that
    begins with ``name``; ``stopped`` is what Ctrl-C says, '' to say nothing. Any other exception is a bug and shows its
    traceback.
    """
    mendable: tuple[type[Exception], ...] = (ValueError, OSError, ImportError, *also)

    def say(words: object) -> None:
        print(f"{name}: {words}", file=sys.stderr)

    def decorate(main: Callable[P, int]) -> Callable[P, int]:
        @functools.wraps(main)
        def guarded(*args: P.args, **kwargs: P.kwargs) -> int:
            open_streams()
            threads.choose()
            try:
                status = main(*args, **kwargs)
                sys.stdout.flush()  # here, since a pipe that is closed at exit prints a traceback
                return status
            except BrokenPipeError:
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                say("stdout was closed before the output ended")
                return 1
            except mendable as error:
                say(first_line(error))
                return 1
            except KeyboardInterrupt:
                if stopped:
                    print(f"\n{name}: {stopped}", file=sys.stderr)
                return 130

        return guarded

    return decorate
