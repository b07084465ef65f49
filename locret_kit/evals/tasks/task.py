"""Task: a numbered family of examples, their source, and a metric. This module also has the hidden-digits tasks:
InfiniteBench's R.PassKey and R.Number, the grid of depth by length, and several questions about one document.

All of these share a prefix: the document is read before any question is known, and `measure.SharedBeginning` reads the
shared prefix once.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ...samples.haystack import ENDINGS, NOISE, WORDINGS, TooShort, count, cut, gives_first_words, hidden, make_needle
from ...text.template import has_template, render_prompt
from ...text.tokens import stream_ids
from ...text.untrusted import Span, defused
from ..metrics import Answer, Extra

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NEEDS_REFERENCE = ("fidelity", "agreement")
"""Kinds whose reference is what full attention writes."""


@dataclass(frozen=True)
class Example:
    """A task's example by number: the request, then, once built, the prompt and the expected answer. Every process
    builds the same example."""

    task: Task
    tokenizer: PreTrainedTokenizerBase
    length: int
    """Tokens the prompt shall have (synthetic tasks), or at most have (documents); special tokens included."""
    sample: int
    """Number of the example, from 0."""
    seed: int = 0
    chat: str = "auto"
    """'always' and 'never' use the tokenizer's chat template or not; 'auto' leaves it to the task."""
    ending: str = "infinitebench"
    """End of a hidden-digits prompt: one of `samples.haystack.ENDINGS`. Of a prompt through the chat template it says only
    whether the answer's first words are there ('open': no)."""

    prompt: str = ""
    answer: Answer = ""
    special: bool = True
    """Whether the tokenizer adds its special tokens (a BOS); a rendered chat template brings its own."""
    depth: float | None = None
    """Place of the one needle, as a fraction of the haystack."""
    cut: int = 0
    """Tokens that were cut out of the document."""
    continuation: str = ""
    """The text whose likelihood is measured (kind 'nll')."""
    extra: Extra = field(default_factory=dict)
    text: Span | None = None
    """Half-open character range of the text in the prompt, between instruction and question. None if the task does not
    give it."""
    document: int | None = None
    """Number of the document that it asks about; None where its text is its own, or a haystack that others share."""
    ids: array[int] = field(default_factory=lambda: array("i"))
    """Token ids of the prompt (int32)."""
    error: Exception | None = None
    """The reason why it cannot be made."""

    def wants_chat(self, default: bool) -> bool:
        """Whether the prompt goes through the chat template."""
        wanted = default if self.chat == "auto" else self.chat == "always"
        return wanted and has_template(self.tokenizer)

    def made(self) -> Example:
        """The example with its prompt and its tokens, or with the reason why it cannot be made."""
        try:
            example = self.task.make(self)
            ids = stream_ids(self.tokenizer, [example.prompt], special=example.special)
            if not ids:
                raise ValueError("the prompt holds no tokens")
            return replace(example, ids=ids)
        except Exception as error:
            return replace(self, error=error)


@dataclass(frozen=True)
class Task:
    """A numbered family of examples.

    Kind 'answer' generates and scores against the reference, 'fidelity' against full attention's answer. Kind
    'agreement' is given full attention's answer, token by token, and counts the tokens that it would have chosen too.
    Kind 'nll' measures the likelihood of a continuation while decoding, 'nll_prefill' that of the prompt's second half
    while it is read.
    """

    name: str
    make: Callable[[Example], Example]
    metric: str
    """A name in `metrics.METRICS`; of no use to agreement and the likelihood kinds."""
    max_new_tokens: int = 64
    haystack: str = "-"
    kind: str = "answer"
    size: int | None = None
    """Number of examples; None for tasks that make as many as are asked for."""
    text_hash: str = ""
    """Hash of the haystack's text, see `engine.Row.text_hash`."""
    begins_alike: bool = False
    """Whether many of its prompts have a long beginning in common."""
    answers: Sequence[Answer] = field(default=(), compare=False)
    """Expected answers by number, of a file of questions, whose answers may change under the same name."""


def wrap(request: Example, text: str, prefix: str = "", *, chat: bool) -> tuple[str, bool]:
    """``(prompt, special)``: the text with the answer's first words after it, through the chat template with ``chat``."""
    if not chat:
        return f"{text} {prefix}" if prefix else text, True
    before, after = render_prompt(request.tokenizer, "")
    return before + defused(request.tokenizer, text) + after.removeprefix("\n\n") + prefix, False


def span_of(prompt: str, text: str) -> Span | None:
    """Half-open character range of the first occurrence of the text in the prompt. None if there is none, because a
    template has broken control tokens in it."""
    start = prompt.find(text)
    return None if start < 0 else (start, start + len(text))


def ending_of(request: Example, chat: bool) -> str:
    """The name of a hidden-digits prompt's end in rows: one of `samples.haystack.ENDINGS`, 'chat' or 'open chat'."""
    if not chat:
        return request.ending
    return "chat" if gives_first_words(ENDINGS[request.ending]) else "open chat"


def count_ids(tokenizer: PreTrainedTokenizerBase, prompt: str, special: bool) -> int:
    """Tokens of a prompt, special tokens included."""
    return len(stream_ids(tokenizer, [prompt], special=special))


def spread_depth(sample: int) -> float:
    """A depth in (0, 1) for each number: halves, quarters, eighths, ... (van der Corput's sequence).

    Any first few are spread evenly, and a depth does not depend on how many there will be.
    """
    depth, step, n = 0.0, 0.5, sample + 1
    while n:
        depth, step, n = depth + step * (n & 1), step / 2, n >> 1
    return depth


GRID_DEPTHS = 11
"""Rows of the grid: depths 0, 0.1, ..., 1."""


def asked_depth(task: str, sample: int) -> float:
    """The depth at which a task is asked to hide its needle; the text's lines and tokens move it a little from there."""
    return sample % GRID_DEPTHS / (GRID_DEPTHS - 1) if task == "grid" else spread_depth(sample)


def needle_task(name: str, words: str, haystack: str, text: str | None) -> Task:
    """Digits hidden in the haystack.

    Args:
        words: 'R.PassKey' or 'R.Number'.
        text: the haystack; None repeats InfiniteBench's sentences.
    """

    def make(request: Example) -> Example:
        chat = request.wants_chat(False)
        added = count_ids(request.tokenizer, *wrap(request, "a", chat=chat))
        overhead = added - count_ids(request.tokenizer, "a", False)  # of the template, or of the special tokens
        room, depth = request.length - overhead, asked_depth(name, request.sample)
        seed = f"{haystack}:{request.length}:{request.sample}:{request.seed}"
        try:
            needle = make_needle(
                words, request.tokenizer, n_tokens=room, depth=depth, seed=seed, haystack=text, ending=request.ending
            )
        except TooShort as error:
            raise TooShort(request.length, error.least + overhead) from error
        prompt, special = needle.prompt, True
        if chat:
            prompt, special = wrap(request, f"{needle.document}\n\n{needle.question}", needle.prefix, chat=True)
        at, form = round(needle.depth, 4), {"ending": ending_of(request, chat)}
        span = span_of(prompt, needle.document.removeprefix(needle.instruction))
        return replace(request, prompt=prompt, answer=needle.answer, special=special, depth=at, extra=form, text=span)

    return Task(name, make, "first_number", max_new_tokens=12, haystack=haystack, begins_alike=text is None)


PER_DOCUMENT = 4
"""Examples of a document."""
DEPTHS = [(i + 0.5) / PER_DOCUMENT for i in range(PER_DOCUMENT)]
"""Depths of their digits."""


def questions_task(haystack: str, text: str | None) -> Task:
    """Digits hidden at four depths of the haystack, in four of the wordings. Each example asks for one of them.

    Args:
        text: the haystack; None repeats InfiniteBench's sentences.
    """

    def make(request: Example) -> Example:
        number, asked = divmod(request.sample, PER_DOCUMENT)
        chat = request.wants_chat(False)
        state = f"questions:{haystack}:{request.length}:{number}:{request.seed}"
        wordings = random.Random(state).sample(WORDINGS[1:], PER_DOCUMENT)

        def prompt_of(document: str, i: int) -> tuple[str, bool]:
            question, form = wordings[i].question, ENDINGS[request.ending]
            prefix = wordings[i].prefix if gives_first_words(form) else ""
            if chat:
                return wrap(request, f"{document}\n\n{question}", prefix, chat=True)
            return document + form.format(question=question, prefix=prefix), True

        def longest(document: str) -> int:
            return max(count_ids(request.tokenizer, *prompt_of(document, i)) for i in range(PER_DOCUMENT))

        def document_of(body: str, keys: list[str]) -> str:
            needles = [words.needle.format(key=key) for words, key in zip(wordings, keys, strict=True)]
            return hidden(body, needles, DEPTHS)[0].rstrip("\n")

        room = request.length - longest(document_of("", ["00000"] * PER_DOCUMENT))
        noise = count(request.tokenizer, NOISE * 8) / 8
        while True:
            if room < 1:
                raise ValueError(f"length={request.length} is too short for {PER_DOCUMENT} needles and a question")
            rng = random.Random(state)
            body = NOISE * max(1, int(room / noise)) if text is None else cut(text, request.tokenizer, room, rng)
            keys = _digits(rng, body)
            document = document_of(body, keys)
            over = longest(document) - request.length
            if over <= 0:
                break
            room -= over
        prompt, special = prompt_of(document, asked)
        form = {"ending": ending_of(request, chat)}
        return replace(
            request, prompt=prompt, answer=keys[asked], special=special, depth=DEPTHS[asked], extra=form,
            text=span_of(prompt, document), document=number,
        )  # fmt: skip

    return Task("questions", make, "first_number", max_new_tokens=12, haystack=haystack, begins_alike=True)


def _digits(rng: random.Random, body: str) -> list[str]:
    """Different numbers of five digits, none of them in the text."""
    digits: list[str] = []
    while len(digits) < PER_DOCUMENT:
        key = f"{rng.randrange(10**5):05}"
        if key not in body and key not in digits:
            digits.append(key)
    return digits
