"""Needle-in-a-haystack prompts of InfiniteBench: R.PassKey and R.Number, in its wording.

Source: github.com/OpenBMB/InfiniteBench, data/construct_synthetic_dataset.py (haystack, needle, digits),
src/prompt.py (the prompts; those with an answer prefix, as for YaRN-Mistral), src/compute_scores.py (scoring).
Differences: the length is any number of tokens, the depth any fraction, and the haystack may be real text.
"""

from __future__ import annotations

import math
import random
import re
from dataclasses import dataclass, replace

from ..text.untrusted import encode
from .haystack import TooShort, count, cut, starts
from .synthetic import WORDS

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


def _task(what: str, find: str, repeats: int) -> NeedleTask:
    return NeedleTask(
        f"There is an important info hidden inside a lot of irrelevant text. {find} "
        "I will quiz you about the important information there.",
        f"The {what} is {{key}}. Remember it. {{key}} is the {what}.\n",
        f"What is the {what}?",
        f"The {what} is",
        repeats,
    )


TASKS = {
    "R.PassKey": _task("pass key", "Find it and memorize them.", 0),
    "R.Number": _task("sequence of digits", "Find it.", 5),
}
TASKS["paraphrase"] = replace(
    TASKS["R.PassKey"],
    needle="The ticket costs {key} dollars. Remember it. {key} dollars for the ticket.\n",
    question="What is the price of admission?",
    prefix="The price of admission is",
)
"""The pass key, but no content word of the question stands in the needle."""


WORDINGS = (
    TASKS["R.PassKey"],
    *(
        NeedleTask(instruction, f"{needle}\n", question, prefix, 0)
        for instruction, needle, question, prefix in WORDS["needles"]
    ),
)
"""The pass key's wording, and nine more ways to say and to ask for digits. None is a wording of training samples."""
ENDINGS = {"infinitebench": "\n\n{question}\n\n{prefix}", "open": "\n\n{question}"}
"""Text after the document: InfiniteBench's blank lines; or the question without the answer's first words, as people ask."""


def gives_first_words(form: str) -> bool:
    """Whether an ending's text has the answer's first words."""
    return "{prefix}" in form


ALIASES = {"passkey": "R.PassKey", "number_string": "R.Number"}


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
    """A prompt of at most, and within 1% of, `n_tokens` tokens with one needle at the line or sentence start nearest
    to `depth`. Digits and piece of haystack depend on task and seed alone; the same in every process.

    Args:
        task: 'R.PassKey' or 'R.Number' (InfiniteBench's 'passkey' and 'number_string' too).
        tokenizer: a fast tokenizer.
        n_tokens: wanted length of the plain prompt in tokens.
        depth: 0 is the beginning of the haystack, 1 its end.
        haystack: real text, of which a random piece is taken; None repeats InfiniteBench's five sentences.
        ending: one of `ENDINGS`.

    Raises:
        ValueError: an unknown task or ending, a depth outside [0, 1], or an `n_tokens` that the fixed parts do not fit.
    """
    task = ALIASES.get(task, task)
    if task not in TASKS:
        raise ValueError(f"task={task!r} must be one of {', '.join([*TASKS, *ALIASES])}")
    if ending not in ENDINGS:
        raise ValueError(f"ending={ending!r} must be one of {', '.join(ENDINGS)}")
    if not 0 <= depth <= 1:
        raise ValueError(f"depth={depth} must be within [0, 1]")
    words, form = TASKS[task], ENDINGS[ending]
    rng = random.Random(f"{task}|{seed}")
    key = _digits(rng, words.repeats)
    fixed = count(tokenizer, _build(words, form, key, "", 0.0).prompt)
    if fixed >= n_tokens:
        said = f"n_tokens={n_tokens} must be above {fixed}, the tokens of instruction, needle and question"
        raise TooShort(said, fixed + 1)
    wanted = n_tokens - fixed + 32
    if haystack is None:
        line = count(tokenizer, NOISE * 8) / 8
        body = NOISE * (math.ceil(wanted / line * 1.02) + 1)
    else:
        body = cut(haystack, tokenizer, wanted, rng)
    while key in body:  # also never a part of a longer number
        key = _digits(rng, words.repeats)
    return _fit(words, form, key, body, tokenizer, n_tokens, n_tokens - fixed, depth)


def _digits(rng: random.Random, repeats: int) -> str:
    keys = [str(rng.randint(0, 9)) for _ in range(5)]
    for _ in range(repeats):
        at = rng.randrange(len(keys))
        keys.insert(at, keys[at])
    return "".join(keys)


def _build(words: NeedleTask, form: str, key: str, body: str, depth: float) -> Needle:
    """The prompt with the needle in `body`, not yet counted."""
    body = body.rstrip() + "\n" if body.strip() else ""
    at = min((*starts(body), len(body)), key=lambda place: abs(place - depth * len(body)))
    head, tail = body[:at].rstrip(" "), body[at:]
    if head and not head.endswith("\n"):
        head += "\n"
    document = f"{words.instruction}\n\n{head}{words.needle.format(key=key)}{tail}".strip("\n")
    prompt = document + form.format(question=words.question, prefix=words.prefix)
    depth = at / len(body) if body else depth
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
