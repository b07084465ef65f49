"""Real text for haystacks, and random pieces of it of a wanted number of tokens."""

from __future__ import annotations

import gzip
import os
import random
import re
import zlib
from pathlib import Path

from ..text.untrusted import encode
from .records import SUFFIXES, read_records

JARGON = (
    Path(__file__).resolve().parents[2] / "data" / "jargon.txt.gz",
    Path("/usr/share/doc/jargon-text/jargon.txt.gz"),
)
"""Places of the Jargon File 4.4.7: in the repository, and where Debian's package has the same bytes."""
TEXTS = (".txt", ".txt.gz", ".md")
"""Endings of files of text."""
_START = re.compile(r"(?<=\n)(?=[ \t]*\S)|(?<=[.!?] )(?=\S)")
_SAMPLE_CHARS = 2000


class TooShort(ValueError):
    """A prompt cannot be made in the tokens that are asked for.

    Args:
        message: what is said. least: tokens that the shortest prompt has.
    """

    def __init__(self, message: str, least: int) -> None:
        super().__init__(message)
        self.least = least


def load_text(source: str | Path) -> str:
    """Text to hide things in.

    Args:
        source: 'pydoc', the language topics of the running Python (0.5 MB of technical prose); 'jargon', the Jargon
            File (1.7 MB, in the repository's data folder; a wheel does not have it), or the path in the variable
            LOCRET_JARGON; or the path of a .txt, .txt.gz or .md file, or of a .jsonl file whose records have an `input`
            (L-Eval), which are joined with blank lines. Of a folder the records; where it has none, all its text files, by name.

    Raises:
        FileNotFoundError: nothing is there; the message says what to install for 'jargon'.
        ValueError: an unknown kind of file, one that is not UTF-8 or a damaged gzip file, a record without `input`, or no
            text at all.
    """
    if source == "pydoc":
        text = _pydoc()
    elif source == "jargon":
        text = _read(_jargon())
    else:
        path = Path(source)
        if not path.exists():
            raise FileNotFoundError(f"source={source} must be 'pydoc', 'jargon' or an existing file or folder")
        text = _folder(path) if path.is_dir() else _inputs(path) if path.suffix == ".jsonl" else _read(path)
    if not text.strip():
        raise ValueError(f"source={source} has no text")
    return text


def cut(text: str, tokenizer, n_tokens: int, rng: random.Random) -> str:
    """A random contiguous piece of `n_tokens` tokens (within 1%), from the start of a line or sentence on.

    Goes on at the beginning where the text ends. Where it starts depends on `rng` (one draw) and the text alone.

    Raises:
        ValueError: if the text is empty or `n_tokens` is below 1.
    """
    if not text.strip():
        raise ValueError("text must not be empty")
    return take(text, next_start(text, rng.randrange(len(text))), tokenizer, n_tokens)


def take(text: str, start: int, tokenizer, n_tokens: int) -> str:
    """The piece of `n_tokens` tokens (within 1%) from character `start` on; goes on at the beginning.

    Costs about 1.2 times the tokenising of the piece, however long the text is.
    """
    if n_tokens < 1:
        raise ValueError(f"n_tokens={n_tokens} must be at least 1")
    probe = ring(text, start, min(_SAMPLE_CHARS, 8 * n_tokens))
    size = int(n_tokens * len(probe) / max(1, count(tokenizer, probe)) * 1.1) + 32
    while True:
        piece = ring(text, start, size)
        offsets = encode(tokenizer, piece)[1]
        if len(offsets) > n_tokens:
            break
        size = int(size * 1.25) + 32
    k = n_tokens
    if n_tokens < 400:  # a cut word may tokenise otherwise: below 400 tokens that can be more than 1%
        for _ in range(8):
            off = count(tokenizer, piece[: offsets[k - 1][1]]) - n_tokens
            if off == 0:
                break
            k = min(len(offsets), max(1, k - off))
    return piece[: offsets[k - 1][1]]


def count(tokenizer, text: str) -> int:
    """Number of tokens of a text, special tokens not added."""
    return len(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def starts(text: str) -> list[int]:
    """Character positions at which a line or a sentence starts, in order; the first is 0."""
    return sorted({0, *(match.start() for match in _START.finditer(text))})


def next_start(text: str, at: int) -> int:
    """The first start of a line or sentence from character `at` on; 0 if there is none."""
    match = _START.search(text, at)
    return match.start() if match else 0


def ring(text: str, start: int, size: int) -> str:
    """`size` characters from `start` on; the text goes on at its beginning, on a line of its own."""
    parts, have = [text[start : start + size]], min(size, len(text) - start)
    while have < size:
        part = ("" if parts[-1].endswith("\n") else "\n") + text[: size - have]
        parts.append(part)
        have += len(part)
    return "".join(parts)


def _jargon() -> Path:
    named = os.environ.get("LOCRET_JARGON")
    places = (Path(named),) if named else JARGON
    for path in places:
        if path.is_file():
            return path
    raise FileNotFoundError(
        f"the Jargon File is not at {' or '.join(map(str, places))}: in the clone, pip install -e . (its data/ has the file), "
        "apt-get install jargon-text, or name a copy in LOCRET_JARGON"
    )


def _pydoc() -> str:
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise FileNotFoundError("this Python was built without pydoc_data; use another source of text") from error
    return "\n\n".join(re.sub(r"\n{3,}", "\n\n", topics[name].strip()) for name in sorted(topics)) + "\n"


def _folder(path: Path) -> str:
    """The records below a folder; where there are none, its text files."""
    files = sorted(path.rglob("*"))
    texts = [file for file in files if file.name.endswith(TEXTS)]
    if not texts or any(file.suffix in SUFFIXES for file in files):
        return _inputs(path)
    return "\n\n".join(_read(file).strip() for file in texts)


def _read(path: Path) -> str:
    if not path.name.endswith(TEXTS):
        raise ValueError(f"source={path} must end in .txt, .txt.gz, .md or .jsonl")
    data = path.read_bytes()
    try:
        return (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8")
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"source={path} is no whole gzip file: {error}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"source={path} must be UTF-8: byte {error.start} is not") from error


def _inputs(path: Path) -> str:
    parts = []
    for number, record in enumerate(read_records(path)):
        if not isinstance(record.get("input"), str):
            raise ValueError(f"source={path}, record {number}: must have a string `input`, has {sorted(record)}")
        parts.append(record["input"].strip())
    return "\n\n".join(parts)
