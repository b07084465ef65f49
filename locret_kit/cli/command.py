"""Entry point of a command: one-line errors, exit statuses, Ctrl-C, closed streams."""

from __future__ import annotations

import functools
import io
import logging
import os
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, requires
from typing import ParamSpec

from .. import threads
from ..backbones import newer
from ..config.command_line import read
from ..config.machine import Backbone, Plugin
from ..config.schema import Command, T, UsageError
from ..hub import OneRetryLine
from ..naming import first_line, install_line

P = ParamSpec("P")
_RETRIES = OneRetryLine()


def open_streams() -> None:
    """The three streams, whatever the caller left of them: one that was closed reads and writes nothing, and what stdout's
    encoding lacks is escaped, as stderr does it, rather than an error after minutes of work."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 (open until the process ends)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def install_hint(error: ImportError) -> str:
    """A hint how to install a missing module that one of the package's extras brings; '' for others."""
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
    """Decorate a ``main`` that raises what its user can mend: ValueError, OSError, ImportError and ``also``.

    Its status is then its own, 1 after an error or a closed stdout, 130 after Ctrl-C, each said in one line on stderr that
    begins with ``name``. ``usage`` is the status after words that are no options, and ``stopped`` what Ctrl-C says, '' to say
    nothing. Any other exception is a bug and shows its traceback. Where a library may have failed that is newer than the
    tested one, a line names a release that works.
    """
    mendable: tuple[type[Exception], ...] = (ValueError, OSError, ImportError, *also)

    def say(words: object) -> None:
        print(f"{name}: {words}", file=sys.stderr)

    def say_newer() -> None:
        for line in newer():
            say(line)

    def decorate(main: Callable[P, int]) -> Callable[P, int]:
        @functools.wraps(main)
        def guarded(*args: P.args, **kwargs: P.kwargs) -> int:
            open_streams()
            threads.choose()
            logging.getLogger(OneRetryLine.LOGGER).addFilter(_RETRIES)
            try:
                status = main(*args, **kwargs)
                sys.stdout.flush()  # here, since a pipe that is closed at exit prints a traceback
                return status
            except BrokenPipeError:
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                say("stdout was closed before the output ended")
                return 1
            except mendable as error:
                say(first_line(error) + (install_hint(error) if isinstance(error, ImportError) else ""))
                if not isinstance(error, ValueError | OSError):  # as a library raises them that is not as we know it
                    say_newer()
                return usage if isinstance(error, UsageError) else 1
            except Exception:
                say_newer()
                raise
            except KeyboardInterrupt:
                if stopped:
                    print(f"\n{name}: {stopped}", file=sys.stderr)
                return 130

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
        if isinstance(args, Plugin):
            args.load_plugin()
        if isinstance(args, Backbone) and args.list_policies:
            from ..policies.grammar import describe_policies

            print("\n".join(describe_policies()))
            return 0
        return run(args)

    return main
