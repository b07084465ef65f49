"""Self-study: a backbone writes a question and its answer about each of some passages of a text; samples hide the passages in
the text's other parts. It works for any model and text, without a data set."""

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from . import Sample, encode_chat
from .haystack import WORDS, count, cut, hidden, next_start
from .records import about

PASSAGE = 1200
"""Characters of a passage, about."""
ASKED = 3
"""Most passages that a sample asks about."""
_WRITTEN = re.compile(r"Question:\s*(?P<question>\S.*?)\s*\n+\s*Answer:\s*(?P<answer>\S.*?)\s*(?:\n|\Z)")
Write = Callable[[Sequence[tuple[str, str]]], list[str]]
"""Answers of a model to pairs of document and request, in order."""


@dataclass(frozen=True)
class Studied:
    """A passage with the question and the answer that a model wrote about it."""

    passage: str
    question: str
    answer: str


def study(text: str, passages: int, rng: random.Random, write: Write) -> list[Studied]:
    """Questions and answers of a model about random passages, at most ``passages`` of them. Passages without a usable
    question are left out: it has another form, or speaks of "the passage", which a long text does not show."""
    drawn = []
    for _ in range(passages):
        start = next_start(text, rng.randrange(max(1, len(text) - PASSAGE)))
        drawn.append(text[start : next_start(text, min(len(text) - 1, start + PASSAGE)) or None].strip()[: 2 * PASSAGE])
    drawn = [passage for passage in dict.fromkeys(drawn) if passage]
    written = write([(passage, WORDS["study"][0]) for passage in drawn])
    found = [(passage, _WRITTEN.search(words)) for passage, words in zip(drawn, written, strict=True)]
    usable = [(passage, match) for passage, match in found if match and "passage" not in match["question"].lower()]
    return [Studied(passage, **match.groupdict()) for passage, match in usable]


def study_sample(tokenizer, text: str, studied: Sequence[Studied], n_tokens: int, rng: random.Random) -> Sample:
    """A conversation about one to three passages that are hidden in a piece of the text, ``n_tokens`` tokens at most.

    Raises:
        ValueError: ``n_tokens`` is too small for a passage with its question.
    """
    chosen = rng.sample(studied, min(len(studied), rng.randint(1, ASKED)))
    depths = sorted(rng.random() for _ in chosen)
    asked = rng.sample(chosen, len(chosen))
    spare = 200 + n_tokens // 50
    while True:
        needs = sum(count(tokenizer, f"{one.passage}{one.question}{one.answer}") for one in chosen) + spare
        if needs <= n_tokens:
            break
        if len(chosen) == 1:
            raise ValueError(f"n_tokens={n_tokens} is too small: a passage and its question take {needs} tokens")
        gone = chosen.pop()
        asked, depths = [one for one in asked if one is not gone], depths[:-1]
    body = cut(text, tokenizer, max(1, n_tokens - needs), rng)
    document, _ = hidden(body, [f"{one.passage}\n" for one in chosen], depths)
    messages = about(f"{document.rstrip()}\n\n", [(one.question, one.answer) for one in asked])
    return encode_chat(tokenizer, messages, max_tokens=n_tokens)
