"""Tasks on plain text, with no labels: distance from full attention's output, reconstruction, and likelihood.

Sources: RoCo (section 5.1: summaries, context reconstruction, language modelling; the full cache's output is the
reference, but of a reconstruction it is the text itself); prompts as in EasyKV where it has them.
"""

from __future__ import annotations

import random
import re
from dataclasses import replace

from ...samples.haystack import next_start, starts, take
from ...text.untrusted import encode
from .task import Example, Task, count_ids, spread_depth, wrap

CONTINUATION = 128
"""Tokens whose likelihood 'perplexity' measures after the prompt."""
PASSAGE = 128
"""Tokens that 'reconstruction' asks to repeat."""
QUOTE = re.compile(r"(?:\S+\s+){11}\S+")
"""Words that stand in front of them, quoted as the answer's beginning."""
QUESTIONS = {
    "fidelity.summary": ("\n\nSummarize the above article in 3 sentences.", 96),
    "fidelity.reconstruct": ("\n\nRepeat the above article from its beginning, word for word.", 128),
    "fidelity.continue": ("", 96),
}
"""Words that follow the text, and tokens of the answer."""


def fidelity_task(name: str, haystack: str, text: str) -> Task:
    """A piece of text with a request; the reference is what full attention answers. Reconstruction also carries the
    piece's beginning, which is compared as well."""
    question, new_tokens = QUESTIONS[name]

    def make(request: Example) -> Example:
        chat = request.wants_chat(bool(question))
        title = "###\nArticle: " if question else ""

        def prompt_of(piece: str) -> tuple[str, bool]:
            return wrap(request, f"{title}{piece}{question}", chat=chat)

        room = request.length - count_ids(request.tokenizer, *prompt_of(""))
        piece = _piece(request, haystack, text, room)
        while count_ids(request.tokenizer, *prompt_of(piece)) > request.length:
            room -= 1
            piece = _piece(request, haystack, text, room)
        prompt, special = prompt_of(piece)
        reference = piece[: 8 * new_tokens] if name == "fidelity.reconstruct" else ""
        return replace(request, prompt=prompt, special=special, extra={"source": reference} if reference else {})

    return Task(name, make, "distance", new_tokens, haystack, kind="fidelity")


def reconstruction_task(name: str, haystack: str, text: str) -> Task:
    """RoCo's context reconstruction: the text is to be repeated, and what comes is compared with it.

    RoCo has articles of some hundred tokens repeated whole. So that a text of any length costs the same, a passage is asked
    for here, which begins after a quotation at an evenly spread depth; over the examples every part of the text counts.
    """

    def make(request: Example) -> Example:
        chat = request.wants_chat(True)

        def prompt_of(piece: str, quote: str) -> tuple[str, bool]:
            asked = "Repeat the above article word for word, beginning where this quotation stands in it."
            return wrap(request, f"###\nArticle: {piece}\n\n{asked}\n\n", quote, chat=chat)

        room = request.length - count_ids(request.tokenizer, *prompt_of("", ""))
        examples: dict[int, Example] = {}
        for _ in range(8):  # another piece may have another quotation, of another length
            piece = _piece(request, haystack, text, room)
            quote, passage, depth = _passage(request, piece)
            prompt, special = prompt_of(piece, quote)
            over = count_ids(request.tokenizer, prompt, special) - request.length
            examples[over] = replace(request, prompt=prompt, answer=passage, special=special, depth=depth)
            if -0.01 * request.length <= over <= 0:
                break
            room -= over
        if (best := max((over for over in examples if over <= 0), default=None)) is None:
            raise ValueError(f"length={request.length} cannot be met by a quotation of sample {request.sample}")
        return examples[best]

    return Task(name, make, "reconstruction", PASSAGE, haystack)


def _passage(request: Example, piece: str) -> tuple[str, str, float]:
    """``(quotation, the tokens after it, its depth)``: words that stand once in the piece, from the start of a line or
    sentence on, the nearest to the depth of the example.

    Raises:
        ValueError: the piece is too short for both.
    """
    offsets = encode(request.tokenizer, piece)[1]
    last = offsets[max(0, len(offsets) - 2 * PASSAGE)][0]
    wanted = spread_depth(request.sample) * last
    for at in sorted((start for start in starts(piece) if start <= last), key=lambda start: abs(start - wanted)):
        match = QUOTE.match(piece, at)
        if match and piece.count(match.group()) == 1:
            rest = piece[match.end() :]
            borders = encode(request.tokenizer, rest[: 16 * PASSAGE])[1]
            if len(borders) >= PASSAGE:
                return match.group(), rest[: borders[PASSAGE - 1][1]], round(at / max(1, last), 4)
    raise ValueError(f"length={request.length} is too short for a quotation and {PASSAGE} tokens after it")


def perplexity_task(name: str, haystack: str, text: str) -> Task:
    """'perplexity': the text's next tokens after a prompt, one at a time; 'perplexity_prefill': the prompt's own second
    half while it is read."""

    def make(request: Example) -> Example:
        specials = count_ids(request.tokenizer, "a", True) - count_ids(request.tokenizer, "a", False)
        room = request.length - specials
        behind = 0 if name == "perplexity_prefill" else CONTINUATION
        piece = _piece(request, haystack, text, room + behind)
        if not behind:
            return replace(request, prompt=piece)
        offsets = encode(request.tokenizer, piece)[1]
        border = offsets[min(room, len(offsets) - 1)][0]  # which both parts share
        return replace(request, prompt=piece[:border], continuation=piece[border:])

    kind = "nll_prefill" if name == "perplexity_prefill" else "nll"
    return Task(name, make, "nll", CONTINUATION, haystack, kind=kind)


def fidelity_of(task: Task) -> Task:
    """The same prompts, scored by their distance from full attention's output."""
    if task.kind == "fidelity":
        return task
    if task.kind != "answer":
        raise ValueError(f"task=fidelity:{task.name}: only tasks with written answers have a distance")
    return replace(task, name=f"fidelity:{task.name}", metric="distance", kind="fidelity")


def agreement_of(task: Task) -> Task:
    """The same prompts, scored by the tokens of full attention's output that would have been chosen too."""
    if task.kind not in ("answer", "fidelity"):
        raise ValueError(f"task=agreement:{task.name}: only tasks with written answers have one to agree with")
    return replace(task, name=f"agreement:{task.name}", metric="agreement", kind="agreement")


def _piece(request: Example, haystack: str, text: str, n_tokens: int) -> str:
    """A random piece of the text; its start depends on the request's numbers alone."""
    if n_tokens < 1:
        raise ValueError(f"length={request.length} is too short for this task")
    rng = random.Random(f"text:{haystack}:{request.sample}:{request.seed}")
    return take(text, next_start(text, rng.randrange(len(text))), request.tokenizer, n_tokens)
