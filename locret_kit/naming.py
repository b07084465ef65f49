"""Words of error messages: the nearest valid name, what an error says first, and how an extra is installed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches


def nearest(word: str, known: Iterable[str]) -> str:
    """`` Did you mean 'x'?`` for the closest known name, or an empty string."""
    close = get_close_matches(word, list(known), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type's name where it has none; of the system's errors file and reason."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename is not None else error.strerror
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def install_line(extra: str) -> str:
    """How one of the package's extras is installed. With ``-e`` a clone's environment goes on running the clone."""
    return f"in the clone, pip install -e '.[{extra}]'"


@contextmanager
def blaming(what: str, *kinds: type[Exception]) -> Iterator[None]:
    """Turn errors of these kinds into a ValueError of one line that begins with ``what``."""
    try:
        yield
    except kinds as error:
        raise ValueError(f"{what}: {first_line(error)}") from error
