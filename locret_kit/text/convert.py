"""Files as text, converted in a process of its own: what a file does to a parser ends there, by limits on time and memory.

As a program it reads a file from stdin and writes its text to stdout.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import IO

from ..naming import first_line
from ..processes import python

SECONDS = 300
"""Processor time of a conversion, at most; of an upload, for which others wait, see ``serving.state``."""
BYTES = 4 << 30
"""Address space of a conversion, at most."""
TEXT = 64 << 20
"""Bytes of the text, at most."""
LACKS = 4
"""Exit status where a library is missing, or cannot be imported."""


class Unwanted(Exception):
    """Nobody wants the text any more."""


class Late(ValueError):
    """The limit on time was reached."""


def convert(
    data: bytes, name: str, *, seconds: int = SECONDS, memory: int = BYTES, text: int = TEXT,
    unwanted: Callable[[], bool] = lambda: False, lost: Callable[[str], None] = lambda line: None,
) -> str:  # fmt: skip
    """The text of a file's bytes.

    Args:
        seconds, memory, text: limits; the clock's is twice the processor's. unwanted: asked twice a second.
        lost: told of what the file holds and its text does not, line by line.

    Raises:
        ValueError: a format that is not known, a damaged file, one without text, or too much memory; ``Late`` where it took
            too long.
        ImportError: a library is missing or broken, and is named. Its words may hold paths of this machine.
        Unwanted: ``unwanted`` said so; the process has ended.
    """
    command = python(__name__, name.replace("\0", ""), *map(str, (seconds, memory, text)))
    pipe, end = subprocess.PIPE, time.monotonic() + 2 * seconds
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe) as child:
        # Not by `communicate`, which before Python 3.13 forgets after a timeout what it has not sent yet.
        threading.Thread(target=_feed, args=(child.stdin, data), daemon=True).start()
        child.stdin = None
        try:
            while True:
                try:
                    said, errors = child.communicate(timeout=0.5)
                    break
                except subprocess.TimeoutExpired:
                    pass
                if unwanted():
                    raise Unwanted
                if time.monotonic() > end:
                    raise Late(f"{name}: its conversion took more than {2 * seconds} s")
        except BaseException:  # Ctrl-C too
            child.kill()
            child.communicate()
            raise
    lines = errors.decode("utf-8", "replace").strip().splitlines()
    if child.returncode == 1:
        raise ValueError(lines[-1])
    if child.returncode == LACKS:
        module, _, words = lines[-1].partition(" ")
        raise ImportError(words, name=module)
    if child.returncode:
        late = -child.returncode in (signal.SIGKILL, signal.SIGXCPU)
        raise (Late if late else ValueError)(f"{name}: its conversion took more than {seconds} s or {memory >> 20} MiB")
    for line in lines:
        lost(line)
    return said.decode("utf-8")


def _feed(stdin: IO[bytes] | None, data: bytes) -> None:
    """Give a process its input, as far as it takes it."""
    assert stdin is not None
    with suppress(BrokenPipeError), stdin:
        stdin.write(data)


def main() -> int:
    """Convert stdin; 1 or ``LACKS`` after an error said in one line."""
    name, (seconds, memory, max_bytes) = sys.argv[1], map(int, sys.argv[2:])
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    except ImportError:  # not on Windows: the time limit of the parent remains
        pass
    from .reader import read_stream

    losses: list[str] = []
    try:
        text = read_stream(sys.stdin.buffer, name, lost=losses.append)
    except MemoryError:
        return 3
    except ImportError as error:
        print(error.name, first_line(error), file=sys.stderr)
        return LACKS
    except (ValueError, OSError) as error:
        print(first_line(error), file=sys.stderr)
        return 1
    said = text.encode("utf-8", "replace")
    if len(said) > max_bytes:
        print(f"{name}: its text has {len(said)} bytes, at most {max_bytes} are taken", file=sys.stderr)
        return 1
    sys.stdout.buffer.write(said)
    for line in losses:
        print(" ".join(line.split()), file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
