"""InfiniteBench's R.PassKey and R.Number, and the grid of depth by length, around `samples.needles`."""

from __future__ import annotations

from dataclasses import replace

from ...samples.haystack import TooShort
from ...samples.needles import make_needle
from .task import Example, Task, asked_depth, count_ids, ending_of, span_of, too_short, wrap


def needle_task(name: str, words: str, haystack: str, text: str | None) -> Task:
    """Digits hidden in the haystack.

    Args:
        words: 'R.PassKey' or 'R.Number'.
        text: the haystack; None repeats InfiniteBench's sentences.
    """

    def make(request: Example) -> Example:
        chat = request.wants_chat(False)
        overhead = _overhead(request, chat)
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


def _overhead(request: Example, chat: bool) -> int:
    """Tokens that the template, or the tokenizer's special tokens, add to a prompt's own."""
    prompt, special = wrap(request, "a", "b", chat=chat)
    return count_ids(request.tokenizer, prompt, special) - count_ids(request.tokenizer, "a b", False)
