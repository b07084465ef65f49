"""Words for messages: the nearest valid name, prefixes of errors, install commands, and sizes in bytes (parsed and
formatted)."""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches


def nearest(word: str, known: Iterable[str]) -> str:
    """`` Did you mean 'x'?`` for the closest known name, or an empty string."""
    close = get_close_matches(word, list(known), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def check_name(what: str, word: str, known: Iterable[str], listed: str = "") -> None:
    """Raise ValueError for a name that is not known; suggests the nearest. ``listed`` says where the names are, if they are too
    many for a line."""
    if word not in known:
        raise ValueError(f"{what}={word!r} is unknown.{nearest(word, known)} {listed or 'Known: ' + ', '.join(known)}")


def split_outside(text: str, mark: str) -> list[str]:
    """The pieces between marks that stand outside of parentheses, brackets and quotes that a piece begins with, stripped; empty
    ones are left out.

    >>> split_outside("sinks(n=4) + window(0.5)", "+")
    ['sinks(n=4)', 'window(0.5)']
    """
    pieces, depth, quote = [""], 0, ""
    for at, letter in enumerate(text):
        if quote or (letter in "\"'" and not pieces[-1].strip() and letter in text[at + 1 :]):
            quote = "" if letter == quote else quote or letter
        depth += 0 if quote else (letter in "([") - (letter in ")]")
        if depth == 0 and not quote and (letter == mark or (mark == " " and letter.isspace())):
            pieces.append("")
        else:
            pieces[-1] += letter
    return [piece for part in pieces if (piece := part.strip())]


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type's name where it has none; of the system's errors file and reason, of
    pydantic's the first field and reason."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename is not None else error.strerror
    if hasattr(error, "errors") and hasattr(error, "title"):
        first = error.errors()[0]
        where, value = ".".join(map(str, first["loc"])) or error.title, first["input"]
        named = f"{where}={value!r}" if isinstance(value, str | int | float) else where
        return f"{named}: {first_line(ValueError(first['msg'].removeprefix('Value error, ')))}"
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def valid_unicode(text: str) -> str:
    """A name as a text: its bytes that are no UTF-8, which Python reads as halves of surrogate pairs, are escapes."""
    return text.encode("utf-8", "backslashreplace").decode()


def last_part(name: str) -> str:
    """The last part of a repository's name or of a path, which may be ``.``, as a text."""
    return valid_unicode(os.path.basename(os.path.abspath(name)))


def install_line(extra: str) -> str:
    """The command to install one of the package's extras. With ``-e`` a clone's environment continues to run the
    clone."""
    return f"in the clone, pip install -e '.[{extra}]'"


@contextmanager
def prefixed_errors(what: str, *kinds: type[Exception]) -> Iterator[None]:
    """Turn errors of these kinds into a ValueError of one line that begins with ``what``."""
    try:
        yield
    except kinds as error:
        raise ValueError(f"{what}: {first_line(error)}") from error


UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def parse_bytes(text: str, field: str) -> int:
    """``24GiB``, ``24GB`` (decimal) or plain bytes, as an integer.

    Raises:
        ValueError: not a positive number with a known unit; names the ``field``.
    """
    number = text.strip().rstrip("KMGTiB")
    unit = text.strip()[len(number) :]
    try:
        size = float(number) * UNITS[unit]
    except (KeyError, ValueError):
        raise ValueError(
            f"{field}={text} is not a size such as 24GiB or 24GB; units: {', '.join(filter(None, UNITS))}"
        ) from None
    if unit == "" and 0 < size < 2**20:
        raise ValueError(f"{field}={text} is {text.strip()} bytes; with a unit: {field}={text.strip()}GiB?")
    if not 0 < size < float("inf"):
        raise ValueError(f"{field}={text} must be above 0")
    return int(size)


def show(size: int) -> str:
    """Bytes as a person reads them."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**29 else f"{size / 2**20:.1f} MiB"
