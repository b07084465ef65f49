"""InfiniteBench's R.PassKey and R.Number, the grid of depth by length, and several questions about one document.

Each of those goes on from the same cache: the document is read before any question is known. `measure.SharedBeginning` reads
what the prompts of a document have in common once. So this is a session: read once, asked often.
"""

from __future__ import annotations

import random
from dataclasses import replace

from ...samples.haystack import ENDINGS, NOISE, WORDINGS, TooShort, count, cut, gives_first_words, make_needle, starts
from ...samples.haystack import NeedleTask as Wording
from .task import Example, Task, asked_depth, count_ids, ending_of, span_of, too_short, wrap


def needle_task(name: str, words: str, haystack: str, text: str | None) -> Task:
    """Digits hidden in the haystack.

    Args:
        words: 'R.PassKey' or 'R.Number'.
        text: the haystack; None repeats InfiniteBench's sentences.
    """

    def make(request: Example) -> Example:
        chat = request.wants_chat(False)
        added = count_ids(request.tokenizer, *wrap(request, "a", "b", chat=chat))
        overhead = added - count_ids(request.tokenizer, "a b", False)  # of the template, or of the special tokens
        try:
            needle = make_needle(
                words,
                request.tokenizer,
                n_tokens=request.length - overhead,
                depth=asked_depth(name, request.sample),
                seed=f"{haystack}:{request.length}:{request.sample}:{request.seed}",
                haystack=text,
                ending=request.ending,
            )
        except TooShort as error:
            raise too_short(request.length, error.least + overhead) from error
        depth = round(needle.depth, 4)
        form = {"ending": ending_of(request, chat)}
        prompt, special = needle.prompt, True
        if chat:
            prompt, special = wrap(request, f"{needle.document}\n\n{needle.question}", needle.prefix, chat=True)
        span = span_of(prompt, needle.document.removeprefix(needle.instruction))
        return replace(
            request, prompt=prompt, answer=needle.answer, special=special, depth=depth, extra=form, text=span
        )

    return Task(name, make, "first_number", max_new_tokens=12, haystack=haystack, begins_alike=text is None)


QUESTIONS = 4
"""Examples of a document."""


def questions_task(haystack: str, text: str | None) -> Task:
    """Digits hidden at four depths of the haystack, said in four of the wordings; each is asked for in an example of its own.

    Args:
        text: the haystack; None repeats InfiniteBench's sentences.
    """

    def make(request: Example) -> Example:
        number, asked = divmod(request.sample, QUESTIONS)
        chat = request.wants_chat(False)
        state = f"questions:{haystack}:{request.length}:{number}:{request.seed}"
        wordings = random.Random(state).sample(WORDINGS[1:], QUESTIONS)

        def prompt_of(document: str, i: int) -> tuple[str, bool]:
            question, form = wordings[i].question, ENDINGS[request.ending]
            prefix = wordings[i].prefix if gives_first_words(form) else ""
            if chat:
                return wrap(request, f"{document}\n\n{question}", prefix, chat=True)
            return document + form.format(question=question, prefix=prefix), True

        def longest(document: str) -> int:
            return max(count_ids(request.tokenizer, *prompt_of(document, i)) for i in range(QUESTIONS))

        room = request.length - longest(_document("", wordings, ["00000"] * QUESTIONS))
        if room < 1:
            raise ValueError(f"length={request.length} is too short for {QUESTIONS} needles and a question")
        noise = count(request.tokenizer, NOISE * 8) / 8
        while True:
            rng = random.Random(state)
            body = NOISE * max(1, int(room / noise)) if text is None else cut(text, request.tokenizer, room, rng)
            keys = _digits(rng, body)
            document = _document(body, wordings, keys)
            over = longest(document) - request.length
            if over <= 0:
                break
            room -= over
        prompt, special = prompt_of(document, asked)
        form = {"ending": ending_of(request, chat)}
        return replace(
            request, prompt=prompt, answer=keys[asked], special=special, depth=_depth(asked), extra=form,
            text=span_of(prompt, document), document=number,
        )  # fmt: skip

    return Task("questions", make, "first_number", max_new_tokens=12, haystack=haystack, begins_alike=True)


def _depth(i: int) -> float:
    return (i + 0.5) / QUESTIONS


def _digits(rng: random.Random, body: str) -> list[str]:
    """Different numbers of five digits, none of them in the text."""
    digits: list[str] = []
    while len(digits) < QUESTIONS:
        key = f"{rng.randrange(10**5):05}"
        if key not in body and key not in digits:
            digits.append(key)
    return digits


def _document(body: str, wordings: list[Wording], keys: list[str]) -> str:
    """The text with every needle at the line or sentence start nearest to its depth."""
    body = body.rstrip() + "\n" if body.strip() else ""
    places = [*starts(body), len(body)]
    depths = [_depth(i) for i in range(QUESTIONS)]
    offsets = [min(places, key=lambda place: abs(place - depth * len(body))) for depth in depths]
    for i, at in reversed(list(enumerate(offsets))):
        head, tail = body[:at].rstrip(" "), body[at:]
        head += "\n" if head and not head.endswith("\n") else ""
        body = head + wordings[i].needle.format(key=keys[i]) + tail
    return body.rstrip("\n")
