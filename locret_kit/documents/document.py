"""A long text that is read once and asked many things.

The text is read up to the last boundary before which no question can change an eviction. What follows stays as tokens and
is read with each question, in a copy of the cache. So an answer equals that of a fresh run over the whole prompt.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..backbones.identity import tokenizer_identity
from ..cache.bounded import BoundedCache, CannotFork
from ..cache.file import check_there
from ..cache.options import CacheOptions
from ..cache.saved import CacheFile
from ..heads import RetainingHeads, loaded
from ..naming import prefixed_errors, valid_unicode
from ..policies import Policy
from ..runtime.drivers import driver_of
from ..runtime.evidence import EvidenceSearch as EvidenceSearch
from ..runtime.session import Answer, Sampling, prefill
from ..runtime.thoughts import MAX_THOUGHT, Thought
from ..settings import RunSettings
from ..text.template import Objects, protected_spans
from ..text.tokens import hash_ids
from ..text.untrusted import Span
from .conversation import Chat
from .document_text import DocumentText
from .prefix_cache import PrefixCache
from .text_record import IDS, TextRecord, stated, stored_text

Progress = Callable[[int, int], None]
Reader = Callable[["PreTrainedModel", "array[int]", BoundedCache, Progress | None], object]


class Document:
    """A text in a cache of fixed size. Create one with ``read`` or ``load``.

    Several threads may ask at once, because each answer has a copy of the cache. The model is attached while an answer
    is generated. To share a model between threads, attach it beforehand or let the answers do it.

    Attributes:
        text: the text's tokens. cache: the tokens read so far, up to the last safe boundary.
        tokens: number of tokens, including the chat template's before the text.
        title: a title for people.
        names: names of backbone, heads and adapter, as the file has them; see ``save``.
        reads: how many times ``ask`` had to read the text again; see ``ask``.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        text: DocumentText,
        cache: BoundedCache,
        *,
        title: str = "",
        share: float | None = None,
    ) -> None:
        self.model, self.tokenizer, self.cache = model, text.tokenizer, cache
        self.chat_template, self.title, self.share = text.chat, title, share
        self.text = text
        self.names: dict[str, str] = {}
        self._reader: Reader = prefill
        self._tail_loaded = False
        self._file: tuple[Path, str] | None = None
        self.reads = 0

    # ---- reading ---------------------------------------------------------------------------------------------------

    @classmethod
    def read(
        cls,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        text: str | Path | Iterable[str] | DocumentText,
        settings: RunSettings | int | float | None = None,
        policy: str | Policy | None = None,
        heads: RetainingHeads | str | Path | None = None,
        *,
        chat: bool = True,
        title: str = "",
        progress: Progress | None = None,
        reader: Reader | None = None,
        ahead: bool = False,
        **given: object,
    ) -> Document:
        """Read a text: ``Document.read(model, tokenizer, Path("book.txt"), 512, heads="user/heads")``.

        Args:
            text: the text, pieces of it, or the ``Path`` of a UTF-8, ``.pdf``, ``.docx``, ``.epub`` or ``.html`` file.
            settings: the budget (slots as an int, or a share of the text's tokens as a float), or ``RunSettings``.
            policy: a policy's name or expression. Default: that of ``heads``, or locret.
            heads: retaining heads, or their folder, file or Hub repository; None for policies without training.
            **given: fields of ``RunSettings``, such as ``budget=512, chunk=256``, in place of ``settings``.
            chat: whether questions go through the chat template.
            title: a title for people. Default: the file's name.
            progress: called as ``progress(done, total)`` in tokens.
            reader: function that reads tokens into a cache, by default ``prefill``; a server reads among other work.
            ahead: whether the last tokens are read too, so that ``prepare`` has nothing to do and needs no second cache.

        Raises:
            ValueError: no text, the name of a file as text, a setting out of bounds, a slow tokenizer.
            OSError: the file cannot be read.
        """
        refuse_name(text)
        title = title or (text.name if isinstance(text, Path) else "")
        whole = text if isinstance(text, DocumentText) else DocumentText.of(tokenizer, text, chat)
        heads = loaded(heads)
        options = CacheOptions.of(settings, policy, heads, given)
        resolved = options.settings.resolved(options.published, whole.tokens)
        run = replace(options.settings, budget=resolved.budget)
        empty = BoundedCache(run, policy, heads, prompt_length=whole.tokens + resolved.local_len + 1)
        empty.bind(model)
        document = cls(model, whole, empty, title=title, share=resolved.share)
        # What follows the text is pinned with each question.
        empty.pin_all(span for span in document.protected(document.prompt("?")) if span[1] <= document.tokens)
        document._reader, document._tail_loaded = reader or prefill, ahead
        document._go_on(whole, progress)
        return document

    def append(self, text: str | Path | Iterable[str], progress: Progress | None = None) -> None:
        """Add text at the end, a file's after ``DocumentText.parting``. After an error or an interrupt the document is unchanged.

        Raises:
            CannotFork: the longer document must be read from the beginning, but the text is not in the file.
            ValueError: no text, or the name of a file as text. OSError: the file cannot be read.
        """
        refuse_name(text)
        longer = self.text.copy()
        if isinstance(text, Path):
            longer.feed(longer.parting(text))
        if not longer.feed(text):
            raise ValueError("the text that is appended has no words")
        self._go_on(longer, progress)
        self.share = None  # its budget stays, and is another share of a longer text

    def _go_on(self, text: DocumentText, progress: Progress | None) -> None:
        """Read the new tokens of ``text``, up to the last safe boundary or beyond (``prepare``)."""
        text.stream.settle()
        cache = self._fork(text.tokens + self.cache.schedule.local_len + 1, self.cache.schedule.local_len)
        ids = text.settled
        end = cache.schedule.safe(len(ids))
        if self._tail_loaded:
            end = max(end, text.before_questions(cache.schedule.local_len))
        if end > cache.get_seq_length():
            self._reader(self.model, ids[:end], cache, progress)
        self.text, self.cache = text, cache

    def _fork(self, prompt_length: int, local_len: int, *, evidence: bool = False) -> BoundedCache:
        """A cache for a prompt of n tokens. It is empty if the text must be read again."""

        def make_cache(tokens: int) -> BoundedCache:
            run, policy = replace(self.cache.run, local_len=local_len), self.cache.policy
            policy = policy.watched() if evidence else policy
            cache = BoundedCache(run, policy, self.cache.heads, prompt_length=tokens)
            cache.bind(self.model)
            cache.pin_all(self.cache.pins)
            return cache

        prefix = PrefixCache(None if self.text.unknown else make_cache, self.cache)
        return prefix.fork(prompt_length, local_len=local_len, evidence=evidence)

    # ---- asking ----------------------------------------------------------------------------------------------------

    @property
    def tokens(self) -> int:
        """Number of tokens read, with the chat template's before the text."""
        return self.text.tokens

    @property
    def span(self) -> tuple[int, int]:
        """Tokens ``[start, end)`` of the text alone, without the chat template's before it."""
        return self.text.start, self.tokens

    @property
    def ids(self) -> array[int]:
        """Token ids of the text; zeros for those that are not known."""
        return self.text.ids

    @property
    def has_text(self) -> bool:
        """Whether all token ids are known. They are not in a file saved without its text."""
        return not self.text.unknown

    def prompt(self, question: str) -> array[int]:
        """Token ids of the whole prompt; zeros for those that are not known.

        Raises:
            ValueError: the chat template's text before the document depends on the question.
        """
        return self.text.prompt(question)

    def conversation(self, messages: Objects) -> array[int]:
        """Token ids of the chat template's prompt of a conversation about the document; zeros for unknown ids.

        Raises:
            ValueError: the chat template's text before the document depends on the conversation.
        """
        return self.text.conversation(messages)

    def protected(self, prompt: Sequence[int]) -> list[Span]:
        """Token spans of a prompt that the setting ``protect`` names, except the first tokens."""
        return protected_spans(self.tokenizer, prompt, self.cache.settings.protect) if self.chat_template else []

    def ask(
        self,
        question: str,
        *,
        max_new_tokens: int = 64,
        sampling: Sampling | None = None,
        seed: int | None = None,
        graph: bool | None = None,
        progress: Progress | None = None,
        max_thought_tokens: int = MAX_THOUGHT,
        evidence: bool = False,
    ) -> Answer:
        """The answer to a question: ``for piece in document.ask("Who?"): print(piece, end="")``. ``str`` gives all of it.

        The document does not change. The answer equals that of a fresh run over text and question; up to rounding after
        ``prepare``, and with ``kv_bits`` where the buffer's size depends on the prompt's length (``full``, one-shot).

        Some prompts must be read from the beginning: a ``pyramid`` policy on a short text, a LongRoPE model beyond its
        first window. Then the text is read again for this question, and ``reads`` counts it. In a document loaded
        without its text, a question shorter than ``local_len`` protects only its own tokens.

        Args:
            max_new_tokens: limit of the answer in tokens.
            sampling: ``Sampling(temperature=..., top_p=...)``. Default: the most probable token.
            seed: seed of sampling. Default: from the settings.
            graph: whether a CUDA graph decodes. Default: where it is possible.
            progress: called as ``progress(done, total)`` in tokens, while the question is read.
            max_thought_tokens: limit of the thought, in addition to ``max_new_tokens``.
            evidence: whether ``answer.evidence`` has the passages that it was read from. It needs the document's text.

        Raises:
            ValueError: an empty question, or a repetition penalty without the text.
            CannotFork: the text must be read again, but is not in the file.
        """
        if not question.strip():
            raise ValueError("the question is empty")
        self._check_sampling(sampling)
        ids = self.prompt(question)
        cache = self.fork_for(len(ids), evidence=evidence)
        cache.pin_all(self.protected(ids))
        return Answer(
            self.model, self.tokenizer, ids, cache, max_new_tokens=max_new_tokens, sampling=sampling,
            seed=self.cache.settings.seed if seed is None else seed, graph=graph, progress=progress,
            thought=Thought.after(self.tokenizer, ids, max_tokens=max_thought_tokens),
            search=self.search(ids) if evidence else None,
        )  # fmt: skip

    def search(self, prompt: Sequence[int]) -> EvidenceSearch:
        """A search for the passages of the text that an answer to a prompt was read from; it finds none without the text."""
        return EvidenceSearch(self.tokenizer, prompt, self.span if self.has_text else (0, 0))

    def fork_for(self, prompt_length: int, *, evidence: bool = False) -> BoundedCache:
        """A copy of the cache for a prompt of ``prompt_length`` tokens (document and question), ready to read the rest."""
        local_len = self.cache.schedule.local_len
        if self.text.unknown:  # evictions before the tail must come after what was read
            local_len = min(local_len, prompt_length - self.cache.get_seq_length() - 1)
        cache = self._fork(prompt_length, local_len, evidence=evidence)
        self.reads += cache.get_seq_length() < self.cache.get_seq_length()
        return cache

    def prepare(self) -> None:
        """Read the end of the text before any question, so that a question reads few tokens besides its own, and warm
        up. After an error or an interrupt the document is unchanged.

        Answers then equal those of a fresh run up to rounding, not bit for bit: the same tokens are multiplied in other
        pieces, and a tie between two slots may fall the other way. No effect if the text is not in the file.
        """
        if self.text.unknown:
            return
        local_len = self.cache.schedule.local_len
        end = max(0, self.text.before_questions(local_len))
        with suppress(CannotFork):
            if end > self.cache.get_seq_length():
                cache = self.cache.fork(end + local_len + 1, local_len=local_len)
                self._reader(self.model, self.text.settled[:end], cache, None)
                self.cache = cache
        self._tail_loaded = True
        driver_of(self.model, self.cache)  # on a CPU it prepares the compiled call and its weights

    def _check_sampling(self, sampling: Sampling | None) -> None:
        if self.text.unknown and sampling is not None and (penalty := sampling.repetition_penalty) != 1.0:
            raise ValueError(f"repetition_penalty={penalty} needs the text, which is not in the file")

    def chat(self, history: int = 1024, **generation: Any) -> Chat:
        """A conversation about the document with ``history`` slots for its turns. No passage is read again: that would leave
        later turns nothing else of the text.

        Raises:
            ValueError: a repetition penalty, without the text in the file.
        """
        self._check_sampling(generation.get("sampling"))
        document = self
        if self.cache.policy.reread is not None:
            document = copy(self)
            document.cache = self.cache.with_budget(self.cache.schedule.budget, rereads=False)
        return Chat(self.model, self.tokenizer, document=document, history=history, **generation)

    # ---- files -----------------------------------------------------------------------------------------------------

    def save(
        self, path: str | Path, *, text: bool = True, names: dict[str, str] | None = None, replace: bool = True
    ) -> None:
        """Write the document to one ``.safetensors`` file.

        Args:
            text: False omits the token ids; tokens after the last safe boundary are then stored as rows.
            names: names of backbone, heads and adapter, for people and commands. Default: those of the file that was loaded
                or saved last.
            replace: whether an existing file may be replaced.

        Raises:
            ValueError: without its text, a document whose policy rereads passages, or whose last token depends on the
                question.
            OSError: the file cannot be written, or it has changed since it was loaded; the existing file is intact.
        """
        self.names = self.names if names is None else names
        file = self.as_file(text=text)
        target = Path(path).resolve()
        expected = self._file[1] if self._file is not None and self._file[0] == target else None
        self._file = target, file.write(target, partial(check_there, target, expected, replace))

    def as_file(self, *, text: bool = True) -> CacheFile:
        """The document in the form of a file. Raises the errors of ``save``."""
        document = self if self.text.bare or (text and self.has_text) else self._without_text()
        stream = document.text.stream
        record = TextRecord(
            title=valid_unicode(self.title), tokens=self.tokens, text=document.has_text, open=stream.text,
            sha256=hash_ids(self.ids) if self.has_text else None,
            done=stream.done, chat=self.chat_template, before=self.text.before, share=self.share,
            tokenizer=tokenizer_identity(self.tokenizer),
            names={what: valid_unicode(name) for what, name in self.names.items()},
        )  # fmt: skip
        more = {IDS: torch.tensor(stream.ids, dtype=torch.int32, device="cpu")} if record.text else {}
        return CacheFile.of(document.cache, document=asdict(record), apart=more)

    def _without_text(self) -> Document:
        """A copy of the document with every token read and no token ids."""
        ids, text = forgotten(self.text, self.cache.policy)
        cache = self._fork(len(ids) + self.cache.schedule.local_len + 1, self.cache.schedule.local_len)
        if len(ids) > cache.get_seq_length():
            prefill(self.model, ids, cache, None)
        return Document(self.model, text, cache, title=self.title, share=self.share)

    @classmethod
    def load(
        cls,
        path: str | Path | CacheFile,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        heads: RetainingHeads | str | Path | None = None,
        policy: str | Policy | None = None,
        *,
        force: bool = False,
    ) -> Document:
        """Load a document from a file, or from a file's content.

        Args:
            heads: the heads that read the document. policy, force: see ``load_cache``.

        Raises:
            OSError: no such file. ValueError: it is damaged or holds no document; or the first difference from
                ``model``, ``tokenizer`` or ``heads``.
        """
        file = path if isinstance(path, CacheFile) else CacheFile.read(path)
        about = stated(file)
        with prefixed_errors(file.path, ValueError):
            text = stored_text(about, file.apart, tokenizer)
        cache = file.restore(model, heads, policy, force=force)
        seen = cache.get_seq_length()
        text.unknown = 0 if about.text else seen
        with prefixed_errors(file.path, ValueError):
            if about.text and (hash_ids(text.ids) != about.sha256 or seen > len(text.settled)):
                raise ValueError("document: its token ids do not match their hash")
            if text.tokens != about.tokens:
                raise ValueError(f"document: tokens={about.tokens} must be {text.tokens}")
        document = cls(model, text, cache, title=about.title, share=about.share)
        document.names = about.names
        document._file = Path(file.path).resolve(), file.digest
        return document


def forgotten(text: DocumentText, policy: Policy) -> tuple[array[int], DocumentText]:
    """``DocumentText.forgotten``. Raises ValueError where it raises it, and for a policy that needs the text again."""
    if policy.reread is not None:
        raise ValueError(
            f"policy={policy.name!r} reads passages of the text again: it cannot be saved without its text"
        )
    return text.forgotten()


def refuse_name(text: object) -> None:
    """Raise ValueError if a text is the name of a file, which was meant to be read."""
    if isinstance(text, str) and os.path.isfile(text):
        raise ValueError(f"text={text!r} is the name of a file: give Path({text!r})")
