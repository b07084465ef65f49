"""Uploads as text, converted in a process of its own: what a file does to a parser ends there, by limits on time and memory.

``python -m locret_kit.serving.convert NAME`` reads a file from stdin and writes its text to stdout.
"""

from __future__ import annotations

import subprocess
import sys

from ..naming import first_line

SECONDS = 300
"""Processor time of a conversion, at most."""
BYTES = 4 << 30
"""Address space of a conversion, at most."""


def convert(data: bytes, name: str, *, seconds: int = SECONDS, memory: int = BYTES) -> str:
    """The text of a file's bytes.

    Raises:
        ValueError: a format that is not known, a damaged file, one without text, or a limit that was reached.
    """
    command = [sys.executable, "-m", __name__, name, str(seconds), str(memory)]
    try:
        done = subprocess.run(command, input=data, capture_output=True, timeout=2 * seconds)
    except subprocess.TimeoutExpired:
        raise ValueError(f"{name}: its conversion took more than {2 * seconds} s") from None
    if done.returncode == 1:
        raise ValueError(done.stderr.decode("utf-8", "replace").strip().splitlines()[-1])
    if done.returncode:
        raise ValueError(f"{name}: its conversion took more than {seconds} s or {memory >> 20} MiB")
    return done.stdout.decode("utf-8")


def main() -> int:
    """Convert stdin; 1 after an error said in one line."""
    name, seconds, memory = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    except ImportError:  # not on Windows: the time limit of the parent remains
        pass
    from ..samples.reader import read_stream

    try:
        text = read_stream(sys.stdin.buffer, name)
    except MemoryError:
        return 3
    except (ValueError, OSError, ImportError) as error:
        print(first_line(error), file=sys.stderr)
        return 1
    sys.stdout.buffer.write(text.encode("utf-8", "replace"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
