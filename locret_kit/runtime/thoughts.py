"""The thought in an answer, recognised by its tokens: its text, its place, and a bound on its length."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import regex
from transformers import PreTrainedTokenizerBase

from ..answers.forms import FINAL, AnswerForm, answer_form
from ..answers.reader import Event, Reader
from ..text.tokens import TextStream

MAX_THOUGHT = 2048
"""Tokens of an answer's thought, at most, in commands."""
ANSWER = f"<|start|>assistant{FINAL}"
"""Tokens after the end of a thought in a channel of its own."""


class Thought:
    """The thought of one answer, while its tokens are chosen.

    Args:
        opened: whether the prompt has begun it. apart: whether the answer's own bound leaves its tokens out.
        max_tokens: of the thought. At this number its end mark closes it. None for no bound.

    Attributes:
        events: pieces of thought and text that were not taken yet. cut: whether the thought was closed at its bound.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, *, opened: bool, max_tokens: int | None = None, apart: bool = True
    ) -> None:
        self.form = answer_form(tokenizer)
        self.max_tokens, self.apart, self.cut, self.events = max_tokens, apart, False, list[Event]()
        self._reader = Reader(self.form, thinks=opened)
        shown = frozenset(token for mark, token in tokenizer.get_added_vocab().items() if mark in self.form.marks)
        self._stream, self._ends = TextStream(tokenizer, shown=shown), [0]
        self._end = tokenizer(end_mark(self.form, tokenizer), add_special_tokens=False).input_ids
        self._closing = list[int]()

    @classmethod
    def after(
        cls, tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], *, max_tokens: int | None
    ) -> Thought | None:
        """The thought of an answer to a prompt; None where the model marks none."""
        form = answer_form(tokenizer)
        opened = form.thinks and form.opened(str(tokenizer.decode([token for token in prompt[-64:] if token >= 0])))
        return cls(tokenizer, opened=opened, max_tokens=max_tokens) if form.thinks else None

    @property
    def within(self) -> bool:
        """Whether the newest token is thought."""
        return self._reader.thinks

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Half-open spans of the answer's tokens that are thought, marks included."""
        found = [(bisect_left(self._ends, a), bisect_left(self._ends, b)) for a, b in self._reader.thoughts]
        return [*found[:-1], (found[-1][0], len(self._ends) - 1)] if self.within else found  # text may be held back

    @property
    def tokens(self) -> int:
        """Number of tokens that are thought."""
        return sum(end - start for start, end in self.spans)

    def forced(self) -> int | None:
        """The next token, where the thought has all of its own and is being closed."""
        if not self._closing and self.within and self.max_tokens is not None and self.tokens >= self.max_tokens:
            self._closing, self.cut = [*self._end], True
        return self._closing.pop(0) if self._closing else None

    def counted(self) -> int:
        """Tokens that the answer's bound counts. A thought that begins again beyond its own bound is counted."""
        most = self.tokens if self.max_tokens is None else self.max_tokens + len(self._end)
        return len(self._ends) - 1 - (min(self.tokens, most) if self.apart else 0)

    def take(self, token: int) -> None:
        """Note the newest token."""
        piece = self._stream.add(token)
        self._ends.append(self._ends[-1] + len(piece))
        self.events += self._reader.feed(piece)

    def end(self) -> None:
        """The answer has ended."""
        self.events += [*self._reader.feed(self._stream.end()), *self._reader.end()]


def end_mark(form: AnswerForm, tokenizer: PreTrainedTokenizerBase) -> str:
    """The text that ends a thought: of several the one that the model has a token for."""
    literals = [regex.sub(r"\\(.)", r"\1", one) for one in regex.split(r"(?<!\\)\|", form.close)]
    words = [*tokenizer.get_added_vocab(), *literals]
    mark = next((word for word in words if regex.fullmatch(form.close, word)), "")
    return mark + ANSWER * form.anywhere
