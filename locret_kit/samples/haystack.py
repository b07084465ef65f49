"""Haystacks: real text, random pieces of it of a wanted number of tokens, and needles that are hidden in it.

The needles are InfiniteBench's R.PassKey and R.Number, in its wording.
Source: github.com/OpenBMB/InfiniteBench, data/construct_synthetic_dataset.py (haystack, needle, digits),
src/prompt.py (the prompts; those with an answer prefix, as for YaRN-Mistral), src/compute_scores.py (scoring).
Differences: the length is any number of tokens, the depth any fraction, and the haystack may be real text.
"""

import gzip
import math
import os
import random
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import resources
from io import BytesIO
from pathlib import Path
from typing import Any

import yaml

from ..backbones.index import INSTALLED
from ..files import read_utf8
from ..naming import check_name, prefixed_errors
from ..text.tokens import encode
from .records import SUFFIXES, files_below, read_records

JARGON = (INSTALLED / "data" / "jargon.txt.gz", Path("/usr/share/doc/jargon-text/jargon.txt.gz"))
"""Places of the Jargon File 4.4.7: in the repository, and where Debian's package has the same bytes."""
TEXTS = (".txt", ".txt.gz", ".md")
"""Endings of files of text."""
WORDS: dict[str, Any] = yaml.safe_load(
    resources.files(__package__).joinpath("wording.yaml").read_text(encoding="utf-8")
)
"""The wording of samples by kind; comments in the file explain each. Keys that begin with "held" are for validation
only."""
_START = re.compile(r"(?<=\n)(?=[ \t]*\S)|(?<=[.!?] )(?=\S)")
_SAMPLE_CHARS = 2000


class TooShort(ValueError):
    """A prompt cannot be built within the requested ``length`` in tokens: the shortest possible one has ``least``."""

    def __init__(self, length: int, least: int) -> None:
        super().__init__(f"length={length} must be at least {least} for the task's shortest prompt")
        self.least = least


def load_text(source: str | Path) -> str:
    """Load a haystack: text to hide needles in.

    Args:
        source: 'pydoc': the language topics of the running Python (0.5 MB of technical prose). 'jargon': the Jargon
            File (1.7 MB, in the repository's data folder but not in a wheel), or the path in LOCRET_JARGON. A file:
            .txt, .txt.gz, .md, or .jsonl whose records have an `input` (L-Eval), joined with blank lines. A folder:
            its records, or without any all its text files, by name.

    Raises:
        FileNotFoundError: no such source; for 'jargon', says what to install.
        ValueError: an unknown kind of file, invalid UTF-8, a damaged gzip file, a record without `input`, or no
            text.
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
    """A random contiguous piece of `n_tokens` tokens (within 1%) that starts at a line or sentence. After the end of
    the text it continues at the beginning. The start depends only on `rng` (one draw) and the text, which is not empty.
    """
    return take(text, next_start(text, rng.randrange(len(text))), tokenizer, n_tokens)


def take(text: str, start: int, tokenizer, n_tokens: int) -> str:
    """The piece of `n_tokens` tokens (within 1%) from character `start` on; goes on at the beginning.

    Costs about 1.2 times the tokenising of the piece, however long the text is.
    """
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
    advice = "pip install -e . (its data/ has the file), apt-get install jargon-text, or name a copy in LOCRET_JARGON"
    raise FileNotFoundError(f"the Jargon File is not at {' or '.join(map(str, places))}: in the clone, {advice}")


def _pydoc() -> str:
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise FileNotFoundError("this Python was built without pydoc_data; use another source of text") from error
    return "\n\n".join(re.sub(r"\n{3,}", "\n\n", topics[name].strip()) for name in sorted(topics)) + "\n"


def _folder(path: Path) -> str:
    """The records below a folder; where there are none, its text files."""
    texts = files_below(path, TEXTS)
    if not texts or files_below(path, SUFFIXES):
        return _inputs(path)
    return "\n\n".join(_read(file).strip() for file in texts)


def _read(path: Path) -> str:
    if not path.name.endswith(TEXTS):
        raise ValueError(f"source={path} must end in .txt, .txt.gz, .md or .jsonl")
    data = path.read_bytes()
    with prefixed_errors(f"source={path} is no whole gzip file", gzip.BadGzipFile, EOFError, zlib.error):
        data = gzip.decompress(data) if path.suffix == ".gz" else data
    with prefixed_errors(f"source={path}", ValueError):
        return "".join(read_utf8(BytesIO(data)))


def _inputs(path: Path) -> str:
    parts = []
    for number, record in enumerate(read_records(path)):
        if not isinstance(record.get("input"), str):
            raise ValueError(f"source={path}, record {number}: must have a string `input`, has {sorted(record)}")
        parts.append(record["input"].strip())
    return "\n\n".join(parts)


NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"


@dataclass(frozen=True)
class NeedleTask:
    """The wording of one task."""

    instruction: str
    needle: str
    """Sentence with {key}."""
    question: str
    prefix: str
    """First words of the answer; part of the plain prompt."""
    repeats: int
    """Digits, of five random ones, that are said twice in a row: 5 for R.Number, which so has 10 digits."""


def _task(instruction: str, needle: str, question: str, prefix: str, repeats: int = 0) -> NeedleTask:
    return NeedleTask(instruction, f"{needle}\n", question, prefix, repeats)


TASKS = {name: _task(*words) for name, *words in WORDS["tasks"]}
"""The pass key, the number, and the pass key in other words, none of the question's content words among them."""
WORDINGS = (TASKS["R.PassKey"], *(_task(*words) for words in WORDS["needles"]))
"""The pass key's wording, and nine more ways to say and to ask for digits. None is a wording of training samples."""
ENDINGS = {"infinitebench": "\n\n{question}\n\n{prefix}", "open": "\n\n{question}"}
"""Text after the document: InfiniteBench's blank lines; or the question without the answer's first words, as people ask."""


def gives_first_words(form: str) -> bool:
    """Whether an ending's text has the answer's first words."""
    return "{prefix}" in form


@dataclass(frozen=True)
class Needle:
    """One prompt: document, question and the answer's first words, joined as `ENDINGS` says."""

    prompt: str
    answer: str
    """The digits."""
    n_tokens: int
    """Length of `prompt` in tokens, special tokens not counted."""
    depth: float
    """Place of the needle: characters of haystack before it, as a fraction in [0, 1]."""
    document: str
    """Instruction, blank line, and haystack with needle."""
    instruction: str
    """Words in front of the haystack."""
    question: str
    prefix: str
    """The answer's first words; a chat prompt is made of `document` and `question` alone."""


def make_needle(
    task: str,
    tokenizer,
    *,
    n_tokens: int,
    depth: float,
    seed: int | str,
    haystack: str | None = None,
    ending: str = "infinitebench",
) -> Needle:
    """A prompt of `n_tokens` tokens or at most 1% fewer, with one needle at the line or sentence start nearest to
    `depth`. Digits and haystack piece depend only on task and seed, in every process.

    Args:
        task: a name in `TASKS`.
        tokenizer: a fast tokenizer.
        n_tokens: length of the plain prompt in tokens.
        depth: 0 is the beginning of the haystack, 1 its end.
        haystack: real text to take a random piece from; None repeats InfiniteBench's five sentences.
        ending: one of `ENDINGS`.

    Raises:
        ValueError: an unknown task, or an `n_tokens` too small for the fixed parts.
    """
    check_name("task", task, TASKS)
    words, form = TASKS[task], ENDINGS[ending]
    rng = random.Random(f"{task}|{seed}")
    key = _digits(rng, words.repeats)
    fixed = count(tokenizer, _build(words, form, key, "", 0.0).prompt)
    if fixed >= n_tokens:
        raise TooShort(n_tokens, fixed + 1)
    wanted = n_tokens - fixed + 32
    if haystack is None:
        line = count(tokenizer, NOISE * 8) / 8
        body = NOISE * (math.ceil(wanted / line * 1.02) + 1)
    else:
        body = cut(haystack, tokenizer, wanted, rng)
    while key in body:  # also never a part of a longer number
        key = _digits(rng, words.repeats)
    return _fit(words, form, key, body, tokenizer, n_tokens, n_tokens - fixed, depth)


def hidden(body: str, needles: Sequence[str], depths: Sequence[float]) -> tuple[str, list[float]]:
    """The text with every needle at the line or sentence start nearest to its depth, ascending; and the depths that they have."""
    text = body = body.rstrip() + "\n" if body.strip() else ""
    places = [*starts(body), len(body)]
    offsets = [min(places, key=lambda place: abs(place - depth * len(body))) for depth in depths]
    for at, needle in reversed(list(zip(offsets, needles, strict=True))):
        head, tail = text[:at].rstrip(" "), text[at:]
        head += "\n" if head and not head.endswith("\n") else ""
        text = head + needle + tail
    return text, [at / len(body) for at in offsets] if body else [*depths]


def _digits(rng: random.Random, repeats: int) -> str:
    keys = [str(rng.randint(0, 9)) for _ in range(5)]
    for _ in range(repeats):
        at = rng.randrange(len(keys))
        keys.insert(at, keys[at])
    return "".join(keys)


def _build(words: NeedleTask, form: str, key: str, body: str, depth: float) -> Needle:
    """The prompt with the needle in `body`, not yet counted."""
    text, (depth,) = hidden(body, [words.needle.format(key=key)], [depth])
    document = f"{words.instruction}\n\n{text}".strip("\n")
    prompt = document + form.format(question=words.question, prefix=words.prefix)
    prefix = words.prefix if gives_first_words(form) else ""
    return Needle(prompt, key, 0, depth, document, words.instruction, words.question, prefix)


def _fit(
    words: NeedleTask, form: str, key: str, body: str, tokenizer, n_tokens: int, room: int, depth: float
) -> Needle:
    """The prompt with as much of `body` as `n_tokens` allows: whole lines, else whole words, else whole tokens."""
    offsets = encode(tokenizer, body)[1]
    least, best = math.ceil(0.99 * n_tokens), None
    for trim in (r"\n[^\n]*$", r"\s\S*$", None):
        k = room
        for _ in range(6):
            k = max(1, min(k, len(offsets)))
            piece = body[: offsets[k - 1][1]]
            needle = _build(words, form, key, re.sub(trim, "", piece) if trim else piece, depth)
            size = count(tokenizer, needle.prompt)
            if size <= n_tokens and (best is None or size > best.n_tokens):
                best = replace(needle, n_tokens=size)
            if best is not None and best.n_tokens >= least:
                return best
            if size <= n_tokens and trim and size + 32 > n_tokens:
                break  # a larger piece loses the same words again: trim less
            k += n_tokens - size
    if best is None or best.n_tokens < least - 1:
        raise ValueError(f"n_tokens={n_tokens} is too small to be met within 1%: found {best and best.n_tokens}")
    return best
