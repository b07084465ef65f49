"""A conversation in a cache of fixed size, about a document or about nothing yet.

The document's slots are pinned, and the turns have slots of their own: when those are full, old turns are evicted as text
is. So the memory of a conversation does not grow with its turns.

The setting ``protect`` holds as in any prompt: 'system' for the whole conversation, 'markers' around the first message's
beginning and around the newest message.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Protocol

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..backbones.libraries import unwrapped
from ..cache.bounded import BoundedCache
from ..heads import RetainingHeads
from ..policies import Policy
from ..runtime.session import Answer, Sampling
from ..settings import RunSettings, read_protect
from ..text.template import around_turn, has_template, protected_spans, render_first, render_turn, spans_around
from ..text.tokens import IdStream, ids_after, token_texts
from ..text.untrusted import Span


class Source(Protocol):
    """A document, as a conversation sees it."""

    chat_template: bool

    @property
    def tokens(self) -> int: ...

    def prompt(self, question: str) -> array[int]: ...

    def protected(self, prompt: Sequence[int]) -> list[Span]: ...

    def open(self, prompt_length: int) -> BoundedCache: ...


@dataclass(frozen=True)
class Turn:
    """One question and its answer."""

    question: str
    answer: str
    start: int
    """Position of the turn's first token in the conversation."""
    answered: int
    """Position of the answer's first token."""
    end: int


@dataclass
class _State:
    """Everything that a turn changes."""

    ids: array[int]
    cache: BoundedCache | None
    turns: list[Turn]
    pinned: tuple[Span, ...] = ()
    """Positions that stay for good."""
    newest: tuple[Span, ...] = ()
    """Positions of the template's own tokens around the newest message, where they are protected: until the next one."""


class Chat:
    """A conversation. ``say`` gives an answer that is written while it is read; when it ends, or is left, it is a turn.

    Args:
        document: what it is about. history: slots of a key/value head that its turns have, beside the document's.
        settings, policy, heads: of a conversation without a document, as of ``BoundedCache``; so is ``system``, a system
            prompt.

    Attributes:
        turns: questions and answers so far.
        answer: the last answer that was begun; None before the first.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, document: Source | None = None, history: int = 1024,
        settings: RunSettings | int | None = None, policy: str | Policy | None = None, heads: RetainingHeads | None = None,
        system: str | None = None, max_new_tokens: int = 512, sampling: Sampling | None = None, seed: int = 0,
    ) -> None:  # fmt: skip
        if history < 1:
            raise ValueError(f"history={history} must be at least 1 slot")
        self.model, self.tokenizer, self.document, self.history = unwrapped(model), tokenizer, document, history
        self.max_new_tokens, self.sampling, self.seed = max_new_tokens, sampling or Sampling(), seed
        self._fresh, self.system = (settings, policy, heads), system
        self._now = _State(array("i"), None, [])
        self._before: _State | None = None
        self.answer: Answer | None = None

    @property
    def turns(self) -> list[Turn]:
        return self._now.turns

    @property
    def cache(self) -> BoundedCache | None:
        """The conversation's cache; None before the first turn."""
        return self._now.cache

    @property
    def ids(self) -> array[int]:
        """Token ids of the whole conversation, evicted ones too; zeros where a document's are not known."""
        return self._now.ids

    def say(self, question: str, progress: Callable[[int, int], None] | None = None) -> Generator[str, None, None]:
        """Pieces of the answer. A turn that an error or an interrupt ends before its first token leaves nothing behind; an
        answer that is left in the middle stays as far as it was written.

        Args:
            progress: called as ``progress(done, total)`` in tokens of the conversation, while the question is read.

        Raises:
            ValueError: an empty question. OutOfMemory: see ``Answer``.
        """
        if not question.strip():
            raise ValueError("the question is empty")
        before, answer = replace(self._now, cache=deepcopy(self._now.cache), turns=list(self._now.turns)), None
        text = ""
        try:
            asked = self._prompt(question)
            assert asked.cache is not None
            self.answer = answer = Answer(
                self.model, self.tokenizer, asked.ids, asked.cache, max_new_tokens=self.max_new_tokens,
                sampling=self.sampling, seed=self.seed + len(self.turns), progress=progress,
            )  # fmt: skip
            for piece in answer:
                text += piece
                yield piece
        finally:
            if answer is not None:
                answer.leave()  # its cache is the conversation's from now on
            if answer is not None and answer.tokens and not answer.cache.unfinished:
                self._before, self._now = before, self._ended(asked, question, text, answer)
            else:
                self._now = before

    def _prompt(self, question: str) -> _State:
        """The conversation up to the next answer, and the cache that reads what is new of it."""
        now, document = self._now, self.document
        if now.cache is not None:
            return self._next_prompt(question, now.cache)
        if document is not None:
            ids = document.prompt(question)
            cache, spans = document.open(len(ids)), document.protected(ids)
        else:
            stream = IdStream(self.tokenizer, special=not has_template(self.tokenizer))
            ids = stream.finish(render_first(self.tokenizer, question, self.system))
            settings, policy, heads = self._fresh
            cache = BoundedCache(settings, policy, heads, prompt_length=len(ids))
            spans = protected_spans(self.tokenizer, ids, cache.settings.protect, self.system)
        if spans:
            cache.pin_all(spans)
        newest = tuple(span for span in spans if span[1] == len(ids))
        return _State(ids, cache, now.turns, tuple(set(spans).difference(newest)), newest)

    def _next_prompt(self, question: str, cache: BoundedCache) -> _State:
        """``_prompt`` in a later turn: the markers around the last message are let go, unless they are pinned too."""
        now, chat = self._now, self.document is None or self.document.chat_template
        new = ids_after(self.tokenizer, render_turn(self.tokenizer, question, chat=chat))
        newest: tuple[Span, ...] = ()
        if chat and "markers" in read_protect(cache.settings.protect):
            head, tail = (list(ids_after(self.tokenizer, text)) for text in around_turn(self.tokenizer))
            newest = tuple((len(now.ids) + a, len(now.ids) + b) for a, b in spans_around(new, head, tail) if a < b)
        if cache.context.outgrown(len(now.ids) + len(new)):
            cache = self._anew(len(now.ids) + len(new))
            cache.pin_all((*now.pinned, *newest))
        for span in now.newest:
            cache.unpin(*span)
        if now.newest or newest:
            cache.pin_all((*now.pinned, *newest))
        return _State(now.ids + new, cache, now.turns, now.pinned, newest)

    def _anew(self, tokens: int) -> BoundedCache:
        """A cache for a conversation of so many tokens, which is read from its beginning on, or from the document's end."""
        if self.document is not None:
            return self._with_history(self.document.open(tokens), self.document.tokens)
        settings, policy, heads = self._fresh
        cache = BoundedCache(settings, policy, heads, prompt_length=tokens)
        cache.bind(self.model)
        return cache

    def _ended(self, asked: _State, question: str, text: str, answer: Answer) -> _State:
        """The conversation after an answer."""
        now, cache, pinned = self._now, answer.cache, asked.pinned
        start = len(now.ids)
        if now.cache is None and self.document is not None:
            start = self.document.tokens
            cache = self._with_history(cache, start)
            pinned = (*pinned, (0, start))
        ids = array("i", answer.ids) + array("i", answer.tokens)
        return _State(
            ids, cache, [*now.turns, Turn(question, text, start, len(answer.ids), len(ids))], pinned, asked.newest
        )

    def _with_history(self, cache: BoundedCache, start: int) -> BoundedCache:
        """A copy with slots for the turns, whose first ``start`` positions are pinned. Stabilizers beyond the turns' slots, for
        which the document leaves no room, are fewer."""
        budget, max_stabilizers = cache.settings.budget + self.history, max(0, self.history - 1)
        grown = cache.with_budget(budget)
        try:
            grown.pin(0, start)
        except ValueError:
            if cache.settings.stabilizers <= max_stabilizers:
                raise
            grown = cache.with_budget(budget, stabilizers=max_stabilizers)
            grown.pin(0, start)
        return grown

    def undo(self) -> Turn:
        """Forget the last turn; only one, until the next.

        Raises:
            ValueError: there is none that can be forgotten.
        """
        before, last = self._earlier(), self.turns[-1]
        self._now, self._before = before, None
        return last

    def _earlier(self) -> _State:
        """The conversation before the last turn."""
        if self._before is None:
            raise ValueError("there is no turn to undo" if not self.turns else "only the last turn can be undone")
        return self._before

    def retry(self, progress: Callable[[int, int], None] | None = None) -> Generator[str, None, None]:
        """Another answer to the last question, with another seed: at temperature 0 the same. One that ends before its first token
        leaves the old answer in place. Raises ValueError as ``undo``."""
        self._earlier()
        return self._again(progress)

    def _again(self, progress: Callable[[int, int], None] | None) -> Generator[str, None, None]:
        old, question = self._now, self.undo().question
        self.seed += 1
        try:
            yield from self.say(question, progress)
        finally:
            if len(self.turns) < len(old.turns):
                self._before, self._now = self._now, old

    def pin(self, text: str | None = None) -> tuple[int, int]:
        """Never evict a text of the conversation, the last question by default; its positions ``(start, end)``. What of it
        was evicted already stays gone.

        Raises:
            ValueError: it does not occur after the document, or there is no room for it.
        """
        if self.cache is None or not self.turns:
            raise ValueError("nothing was said yet that could be pinned")
        if text is None:
            start, end = self.turns[-1].start, self.turns[-1].answered
        else:
            start, end = self._find(text)
        self.cache.pin(start, end)
        self._now.pinned += ((start, end),)
        before = self._before
        if before is not None and before.cache is not None and start < len(before.ids):  # where `undo` goes back to
            part = start, min(end, len(before.ids))
            with suppress(ValueError):  # more of it may be held there, and have no room
                before.cache.pin(*part)
                before.pinned += (part,)
        return start, end

    def _find(self, text: str) -> tuple[int, int]:
        """Positions of the last occurrence of a text in the conversation."""
        first = self.document.tokens if self.document is not None else 0
        texts = token_texts(self.tokenizer, self.ids[first:])
        at = "".join(texts).rfind(text) if text else -1
        if at < 0:
            raise ValueError(f"{text[:40]!r} does not occur in the conversation")
        ends = list(accumulate(map(len, texts)))  # of each token, in characters
        start = bisect_left(ends, at)
        start += at > 0 and ends[start] == at
        return first + start, first + bisect_left(ends, at + len(text)) + 1
