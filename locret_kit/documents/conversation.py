"""A conversation in a cache of fixed size, with or without a document.

The document's slots are pinned, and the turns have their own slots. When those are full, old turns are evicted like
text. So the memory of a conversation does not grow with its turns.

The setting ``protect`` works as in any prompt: 'system' for the whole conversation, 'markers' for the start of the
first message and around the newest message.

Thoughts are evicted like other tokens, pinned, or dropped. If they are dropped, each turn is answered from the chat
template's prompt of the whole conversation, as a fresh run would be. The prefix that later prompts share is read into a
second cache, up to the last boundary with the same evictions. While an answer is written this costs the rows of one
more cache.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Protocol, get_args

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..backbones.wrapped import unwrapped
from ..cache.bounded import BoundedCache
from ..cache.options import CacheOptions
from ..heads import RetainingHeads
from ..naming import check_name, prefixed_errors
from ..policies import Policy
from ..policies.grammar import read_once
from ..runtime.evidence import EvidenceSearch
from ..runtime.session import Answer, Sampling, prefill
from ..runtime.thoughts import MAX_THOUGHT, Thought
from ..settings import RunSettings, Thoughts, read_protect
from ..text.template import (
    Objects,
    around_turn,
    has_template,
    protected_spans,
    render_first,
    render_messages,
    render_turn,
    spans_around,
)
from ..text.tokens import IdStream, ids_after
from ..text.untrusted import Span
from .prefix_cache import PrefixCache, pin_thoughts


class Source(Protocol):
    """The interface of a document that a conversation uses."""

    chat_template: bool

    @property
    def tokens(self) -> int: ...

    def prompt(self, question: str) -> array[int]: ...

    def conversation(self, messages: Objects) -> array[int]: ...

    def protected(self, prompt: Sequence[int]) -> list[Span]: ...

    def fork_for(self, prompt_length: int, *, evidence: bool = False) -> BoundedCache: ...

    def search(self, prompt: Sequence[int]) -> EvidenceSearch: ...


@dataclass(frozen=True)
class Turn:
    """One question and its answer."""

    question: str
    answer: str
    """Answer without its thought."""
    start: int
    """Position of the turn's first token in the conversation."""
    answered: int
    """Position of the answer's first token."""
    end: int
    thought: str = ""


@dataclass
class _State:
    """The state that a turn changes."""

    ids: array[int]
    cache: BoundedCache | None
    turns: list[Turn]
    pinned: tuple[Span, ...] = ()
    """Positions that stay pinned."""
    newest: tuple[Span, ...] = ()
    """Positions of the template's own tokens around the newest message, if they are protected. They are released at the
    next message."""
    thoughts: tuple[Span, ...] = ()
    """Positions of pinned thoughts, oldest first."""


class Chat:
    """A conversation: ``for piece in chat.say("Who came in?"): print(piece, end="")``. When the answer ends or is
    abandoned, question and answer become a turn. ``document.chat()`` makes one about a document.

    Args:
        document: the subject, or None. history: slots per key/value head for the turns, besides the document's.
        settings, policy, heads: as in ``BoundedCache``, for a conversation without a document. No passage is read again, which
            would leave later turns nothing else, unless thoughts are dropped.
        system: system prompt, for a conversation without a document.
        max_new_tokens: limit of an answer in tokens. sampling: ``Sampling(...)``; default: the most probable token.
        seed: seed of sampling in the first turn; each turn adds one.
        thoughts: handling of a model's thoughts: 'evicted' like other tokens, 'pinned' (never evicted, until there is no
            room), or 'dropped' when the turn ends, which needs a chat template.
        max_thought_tokens: limit per thought, besides ``max_new_tokens``. Then the end mark of the thought is inserted.
        evidence: whether ``answer.evidence`` has passages of the document, see ``Document.ask``.

    Attributes:
        turns: questions and answers so far.
        answer: the newest answer; None before the first.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, document: Source | None = None,
        history: int = 1024, settings: RunSettings | int | None = None, policy: str | Policy | None = None,
        heads: RetainingHeads | None = None,
        system: str | None = None, max_new_tokens: int = 512, sampling: Sampling | None = None, seed: int = 0,
        thoughts: Thoughts = "evicted", max_thought_tokens: int = MAX_THOUGHT, evidence: bool = False,
    ) -> None:  # fmt: skip
        if history < 1:
            raise ValueError(f"history={history} must be at least 1 slot")
        check_name("thoughts", thoughts, get_args(Thoughts))
        plain = not has_template(tokenizer) or (document is not None and not document.chat_template)
        if thoughts == "dropped" and plain:
            raise ValueError("thoughts='dropped' needs a chat template, which removes them")
        self.thoughts, self.max_thought_tokens = thoughts, max_thought_tokens
        self.model, self.tokenizer, self.document, self.history = unwrapped(model), tokenizer, document, history
        self.max_new_tokens, self.sampling, self.seed = max_new_tokens, sampling or Sampling(), seed
        self.system = system
        self.evidence = evidence
        if document is None and thoughts != "dropped":  # a turn of dropped thoughts is a run of its own, over all turns
            policy = read_once(CacheOptions.of(settings, policy, heads, {}).policy)
        self._make_cache = lambda tokens: BoundedCache(settings, policy, heads, prompt_length=tokens)
        self._now = _State(array("i"), None, [])
        self._before: _State | None = None
        self.answer: Answer | None = None

    @property
    def turns(self) -> list[Turn]:
        """Questions and answers so far, oldest first."""
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
        # Where thoughts are dropped, each turn has copies of its own.
        cache = self._now.cache if self.thoughts == "dropped" else deepcopy(self._now.cache)
        before, answer = replace(self._now, cache=cache, turns=list(self._now.turns)), None
        try:
            asked = self._prompt(question)
            assert asked.cache is not None
            cache = asked.cache
            if self.thoughts == "dropped":
                cache = self._answer_cache(asked, self._shared(question, asked))
            thought = Thought.after(self.tokenizer, asked.ids, max_tokens=self.max_thought_tokens)
            begun = self.turns or self.document is None  # a document's first answer has no slots for turns yet
            if self.thoughts == "pinned" and thought is not None and begun:
                begin, most = len(asked.ids), self.max_thought_tokens
                asked.thoughts = pin_thoughts(cache, begin, [(0, most)], asked.thoughts)
                with prefixed_errors(f"a thought of max_thought_tokens={most} cannot be pinned", ValueError):
                    cache.pin(begin, begin + most)
            self.answer = answer = Answer(
                self.model, self.tokenizer, asked.ids, cache, max_new_tokens=self.max_new_tokens, sampling=self.sampling,
                seed=self.seed + len(self.turns), progress=progress, thought=thought,
                search=self.document.search(asked.ids) if self.evidence and self.document is not None else None,
            )  # fmt: skip
            yield from answer
        finally:
            if answer is not None:
                answer.leave()  # its cache is the conversation's from now on
            if answer is not None and answer.tokens and not answer.cache.state.unfinished:
                self._before, self._now = before, self._commit(asked, question, answer)
            else:
                self._now = before

    def _prompt(self, question: str) -> _State:
        """The conversation up to the next answer, and the cache that reads its new tokens."""
        now, document = self._now, self.document
        if self.thoughts == "dropped" and now.turns:
            return self._whole_prompt(question)
        if now.cache is not None:
            return self._next_prompt(question, now.cache)
        if document is not None:
            ids = document.prompt(question)
            cache, spans = document.fork_for(len(ids), evidence=self.evidence), document.protected(ids)
        else:
            stream = IdStream(self.tokenizer, special=not has_template(self.tokenizer))
            ids = stream.finish(render_first(self.tokenizer, question, self.system))
            cache = self._make_cache(len(ids))
            spans = protected_spans(self.tokenizer, ids, cache.settings.protect, self.system)
        cache.pin_all(spans)
        newest = tuple(span for span in spans if span[1] == len(ids))
        return _State(ids, cache, now.turns, tuple(set(spans).difference(newest)), newest)

    def _next_prompt(self, question: str, cache: BoundedCache) -> _State:
        """``_prompt`` in a later turn: the markers around the last message are let go, unless they are pinned too."""
        now, chat = self._now, self.document is None or self.document.chat_template
        new = ids_after(self.tokenizer, render_turn(self.tokenizer, question, chat=chat))
        newest = self._markers(len(now.ids), new) if chat and "markers" in read_protect(cache.settings.protect) else ()
        # Layers that lose their state between pieces of a text read all of it again, and hold none of a document.
        if cache.context.outgrown(len(now.ids) + len(new)) or not cache.context.description.in_pieces:
            cache = self._rebuild(len(now.ids) + len(new))
        for span in now.newest:
            cache.unpin(*span)
        if now.newest or newest:
            cache.pin_all((*now.pinned, *newest))
        return _State(now.ids + new, cache, now.turns, now.pinned, newest, now.thoughts)

    def _markers(self, start: int, new: Sequence[int]) -> tuple[Span, ...]:
        """Positions of the template's own tokens around the newest message, whose tokens are ``new``, from position
        ``start`` on."""
        head, tail = (list(ids_after(self.tokenizer, text)) for text in around_turn(self.tokenizer))
        return tuple((start + a, start + b) for a, b in spans_around(new, head, tail) if a < b)

    def _conversation(self, *more: tuple[str, str | None]) -> array[int]:
        """Token ids of the template's prompt of the whole conversation: of its turns, and of more questions and answers."""
        said = [(turn.question, turn.answer) for turn in self.turns] + list(more)
        messages = [{"role": "system", "content": self.system}] if self.system and self.document is None else []
        for question, answer in said:
            messages.append({"role": "user", "content": question})
            messages += [{"role": "assistant", "content": answer}] if answer is not None else []
        if self.document is not None:
            return self.document.conversation(messages)
        stream = IdStream(self.tokenizer, special=not has_template(self.tokenizer))
        return stream.finish(render_messages(self.tokenizer, messages)[1])

    def _shared(self, question: str, asked: _State) -> int:
        """Number of prompt tokens shared with the next turn's prompt. Markers that will be released do not count."""
        later = common(asked.ids, self._conversation((question, "x"), ("?", None)))
        return min((later, *(start for start, _ in asked.newest)))

    def _whole_prompt(self, question: str) -> _State:
        """``_prompt`` in a later turn where thoughts are dropped: the template's prompt of the whole conversation, and a cache
        that has read its beginning, and stays."""
        now, ids = self._now, self._conversation((question, None))
        prefix = PrefixCache(self._rebuild, now.cache, now.ids)
        cache = prefix.fork(len(ids)) if prefix.begins(ids) else self._rebuild(len(ids))
        start, newest = common(now.ids, ids), tuple[Span, ...]()
        if "markers" in read_protect(cache.settings.protect):
            newest = self._markers(start, ids[start:])
        return _State(ids, cache, now.turns, now.pinned, newest)

    def _answer_cache(self, asked: _State, shared: int) -> BoundedCache:
        """A copy, that is answered in, of the cache that stays, which first reads what later turns share."""
        cache, first = asked.cache, not self.turns
        assert cache is not None
        cache.bind(self.model)
        if first and self.document is not None:  # answered as the document's questions are; the turns have no room yet
            asked.cache = None
            return cache
        for span in asked.newest if first else ():
            cache.unpin(*span)
        if (end := cache.schedule.safe(shared)) > cache.get_seq_length():
            prefill(self.model, asked.ids[:end], cache)
        copy = cache.fork(len(asked.ids))
        copy.pin_all((*asked.pinned, *asked.newest))
        return copy

    def _rebuild(self, tokens: int) -> BoundedCache:
        """A cache for a conversation of n tokens, to be read from its beginning or from the end of the document."""
        if self.document is not None:
            cache = self.document.fork_for(tokens, evidence=self.evidence)
            try:
                cache = self._with_history(cache, self.document.tokens)
            except ValueError:  # its end, which is not read yet, has no room to be pinned
                cache = self._with_history(cache, max(1, cache.get_seq_length()))
        else:
            cache = self._make_cache(tokens)
            cache.bind(self.model)
        cache.pin_all(self._now.pinned)
        return cache

    def _commit(self, asked: _State, question: str, answer: Answer) -> _State:
        """The conversation after an answer."""
        now, cache, pinned = self._now, answer.cache, asked.pinned
        start, said, thought, thoughts = len(now.ids), str(answer), answer.thought_text, asked.thoughts
        if self.thoughts == "dropped":
            more = question, said
            ids = self._conversation(more, ("a", None))
            ids = ids[: common(ids, self._conversation(more, ("b", None)))]
            turn = Turn(question, said, common(now.ids, ids), common(asked.ids, ids), len(ids), thought)
            return _State(ids, asked.cache, [*now.turns, turn], pinned)
        if now.cache is None and self.document is not None:
            start = self.document.tokens
            if cache.context.description.in_pieces:
                cache = self._with_history(cache, start)
                pinned = (*pinned, (0, start))
        if self.thoughts == "pinned" and answer.thought is not None:
            begin = len(answer.ids)
            earlier = [span for span in thoughts if span[0] != begin]
            thoughts = pin_thoughts(cache, begin, answer.thought.spans, earlier)
        ids = array("i", answer.ids) + array("i", answer.tokens)
        turn = Turn(question, said, start, len(answer.ids), len(ids), thought)
        return _State(ids, cache, [*now.turns, turn], pinned, asked.newest, thoughts)

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
        if self._before is None:
            raise ValueError("there is no turn to undo" if not self.turns else "only the last turn can be undone")
        last = self.turns[-1]
        self._now, self._before = self._before, None
        return last

    def retry(self, progress: Callable[[int, int], None] | None = None) -> Generator[str, None, None]:
        """New answer to the last question, with another seed: at temperature 0 the same. If it ends before its first token,
        the old answer stays. Raises ValueError if the last turn cannot be forgotten."""
        old, question = self._now, self.undo().question
        self.seed += 1
        try:
            yield from self.say(question, progress)
        finally:
            if len(self.turns) < len(old.turns):
                self._before, self._now = self._now, old

    def pin(self) -> tuple[int, int]:
        """Never evict the last question; its positions ``(start, end)``. What of it was evicted already stays gone.

        Raises:
            ValueError: nothing was asked, or there is no room for it.
        """
        if self.cache is None or not self.turns:
            raise ValueError("the conversation has no text to pin yet")
        start, end = self.turns[-1].start, self.turns[-1].answered
        self.cache.pin(start, end)
        self._now.pinned += ((start, end),)
        before = self._before
        if before is not None and before.cache is not None and start < len(before.ids):  # where `undo` goes back to
            part = start, min(end, len(before.ids))
            with suppress(ValueError):  # more of it may be held there, and have no room
                before.cache.pin(*part)
                before.pinned += (part,)
        return start, end


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the shared prefix in tokens."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
