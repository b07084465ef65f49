"""A long text that is read once and asked many things.

The text is read up to the last boundary before which no question can change an eviction. What follows stays as tokens and
is read with each question, in a copy of the cache. So an answer equals that of a fresh run over the whole prompt.
"""

from __future__ import annotations

import hashlib
import re
from array import array
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
from annotated_types import Interval

from ..backbones.identity import first_difference, tokenizer_identity
from ..backbones.intercept import attached
from ..cache.bounded import BoundedCache
from ..cache.file import Record, read, read_record
from ..cache.fork import CannotFork
from ..cache.saved import Saved, restore, save_cache
from ..heads import RetainingHeads, loaded
from ..naming import blaming
from ..runtime.session import Answer, Sampling, prefill, ready
from ..runtime.tokens import IdStream
from ..settings import INT32_MAX, RunSettings, Share, StoreSettings
from ..text.spans import Span
from ..text.template import has_template, protected_spans, render_prompt
from ..validation import check, made, shown
from .conversation import Chat

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..policies.policy import Policy

Progress = Callable[[int, int], None]
Reader = Callable[[Any, "array[int]", BoundedCache, Progress | None], None]
Count = Annotated[int, Interval(ge=0, le=INT32_MAX)]
IDS = "document.ids"
"""Name of the tensor of token ids."""
UNKNOWN = 1 << 24
"""Tokens whose ids are not in the file, at most: each question counts them."""


@dataclass(frozen=True, kw_only=True)
class TextRecord:
    """What a saved document says about its text.

    Raises:
        ValueError: a field of another type or out of its bound; it is named.
    """

    title: str
    tokens: Count
    sha256: str | None
    """Of the token ids, as little-endian 32-bit integers; None where they are not known."""
    text: bool
    """Whether the ids are in the file."""
    open: str
    """The end of the text, whose tokens hang on what follows, after ``done`` characters of context."""
    done: Count
    chat: bool
    """Whether questions go through the chat template."""
    before: str
    """The chat template's text before the document."""
    share: Share | None
    """The budget as a share of the document, where it was given so."""
    tokenizer: dict[str, object]
    names: dict[str, str]
    """What the backbone and the heads were called. Names help to find them; content decides whether they are the same."""

    def __post_init__(self) -> None:
        check(self)
        if self.done > len(self.open):
            raise ValueError(f"done={self.done} must be at most {len(self.open)}, the length of open")
        if not re.fullmatch("[0-9a-f]{64}" if self.text else "[0-9a-f]{64}|None", str(self.sha256)):
            raise ValueError(f"sha256={shown(self.sha256)} must be 64 hexadecimal digits")
        if not self.text and self.tokens > UNKNOWN:
            raise ValueError(f"tokens={self.tokens} must be at most {UNKNOWN} without the text")


class Document:
    """A text in a cache of fixed size. Make one with ``read`` or ``load``.

    Several threads may ask at once, each answer has a copy of the cache. The model is attached while an answer is written;
    threads share a model that is attached beforehand, or by their answers.

    Attributes:
        cache: what was read, up to the last safe boundary.
        tokens: tokens of the text, the chat template's before it included.
        title: a name for people.
        reads: how many times ``ask`` had to read the text anew; see ``ask``.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, cache: BoundedCache, stream: IdStream, *,
        chat: bool, before: str, title: str = "", share: float | None = None, unknown: int = 0,
    ) -> None:  # fmt: skip
        self.model, self.tokenizer, self.cache = model, tokenizer, cache
        self.chat_template, self.title, self.share = chat, title, share
        self._stream, self._before = stream, before
        self._reader: Reader = read_alone
        self._unknown = unknown  # tokens whose ids are not known: a file without its text
        self._ahead = False
        self.reads = 0

    # ---- reading ---------------------------------------------------------------------------------------------------

    @classmethod
    def read(
        cls,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        text: str | Path | Iterable[str],
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
        """Read a text.

        Args:
            text: the text, pieces of it, or the ``Path`` of a file, see ``text.reader``.
            settings, policy, heads, given: as of ``BoundedCache``. A budget that is a share is one of the document's tokens.
            chat: questions go through the chat template.
            progress: called as ``progress(done, total)`` in tokens.
            reader: reads tokens into a cache, as ``read_alone`` does; a server reads among other work.
            ahead: as after ``prepare``, without its second cache.

        Raises:
            ValueError: no text, a setting out of bounds, a slow tokenizer.
            OSError: the file cannot be read.
        """
        if isinstance(text, Path):
            title = title or text.name
        before = render_prompt(tokenizer, "", "", chat=chat)[0]
        stream = _stream(tokenizer, chat)
        stream.feed(before)
        blank = True
        for piece in _pieces(text):
            blank = blank and not piece.strip()
            stream.feed(piece)
        if blank:
            raise ValueError("the document holds no text")
        if not isinstance(settings, RunSettings):
            settings = RunSettings.of(given if settings is None else {"budget": settings, **given})
        elif given:
            raise ValueError(f"{', '.join(given)}: given twice, within settings and by name")
        heads = loaded(heads)
        published = heads.config.inference if heads is not None else {}
        resolved = settings.resolved(published, len(stream.finish()))
        settings = replace(settings, budget=resolved.budget)
        empty = BoundedCache(settings, policy, heads, prompt_length=len(stream.finish()) + resolved.local_len + 1)
        empty.bind(model)
        document = cls(model, tokenizer, empty, stream, chat=chat, before=before, title=title, share=resolved.share)
        for start, end in document.protected(document.prompt("?")):
            if end <= document.tokens:  # what follows the text is pinned with each question
                empty.pin(start, end)
        document._reader, document._ahead = reader or read_alone, ahead
        document._go_on(stream, progress)
        return document

    def append(self, text: str | Path | Iterable[str], progress: Progress | None = None) -> None:
        """Add text at the end. After an error or an interrupt the document is as it was.

        Raises:
            CannotFork: the text is not in the file, and the longer document is read otherwise from its beginning on.
            ValueError, OSError: as ``read``.
        """
        stream = copy(self._stream)
        stream.ids = array("i", stream.ids)
        for piece in _pieces(text):
            stream.feed(piece)
        self._go_on(stream, progress)

    def _go_on(self, stream: IdStream, progress: Progress | None) -> None:
        """Read what ``stream`` has more, up to the last safe boundary."""
        stream.settle()
        total = self._unknown + len(stream.finish())
        cache = self._fork(total + self.cache.schedule.local_len + 1, self.cache.schedule.local_len)
        ids = self._with_unknown(stream.ids)
        end = self._end(stream, cache.schedule.local_len, cache.schedule.safe(len(ids)))
        if end > cache.get_seq_length():
            self._reader(self.model, ids[:end], cache, progress)
        self._stream, self.cache = stream, cache

    def _end(self, stream: IdStream, local_len: int, safe: int) -> int:
        """Tokens of a text to read: to the last safe boundary, or ahead of it to where no question evicts anything."""
        after = render_prompt(self.tokenizer, "", "?", chat=self.chat_template)[1]
        least = (
            len(stream.finish(after)) - local_len - 2
        )  # some tokenizers join a question's first letters to what precedes
        return max(safe, self._unknown + min(least, len(stream.ids))) if self._ahead else safe

    def _with_unknown(self, ids: array[int]) -> array[int]:
        """Ids with zeros in the place of those that are not known, which the cache has read."""
        return array("i", bytes(4 * self._unknown)) + ids

    def _fork(self, prompt_length: int, local_len: int) -> BoundedCache:
        """The cache for a prompt of so many tokens; an empty one where the text has to be read anew."""
        run = replace(self.cache.run, local_len=local_len)
        try:
            if not self.cache.get_seq_length():
                raise CannotFork("nothing is read yet")
            return self.cache.fork(prompt_length, local_len=local_len)
        except CannotFork:
            if self._unknown:
                raise
            run = replace(run, chunk=None, stabilizers=None, local_len=None) if run.one_shot else run
            cache = BoundedCache(run, self.cache.policy, self.cache.heads, prompt_length=prompt_length)
            cache.bind(self.model)
            for start, end in self.cache.pins:
                cache.pin(start, end)
            return cache

    # ---- asking ----------------------------------------------------------------------------------------------------

    @property
    def tokens(self) -> int:
        return self._unknown + len(self._stream.finish())

    @property
    def ids(self) -> array[int]:
        """Token ids of the text; zeros for those that are not known."""
        return self._with_unknown(self._stream.finish())

    @property
    def has_text(self) -> bool:
        """Whether all its token ids are known: not of a file that was saved without its text."""
        return not self._unknown

    def prompt(self, question: str) -> array[int]:
        """Token ids of the whole prompt; zeros for those that are not known.

        Raises:
            ValueError: the chat template puts something else before the document than without the question.
        """
        # What was read stays what it is, also where a template tells the date.
        empty, _ = render_prompt(self.tokenizer, "", "", chat=self.chat_template)
        before, after = render_prompt(self.tokenizer, "", question, chat=self.chat_template)
        if before != empty:
            raise ValueError("the chat template's text before the document depends on the question")
        return self.prompt_before(after)

    def prompt_before(self, after: str) -> array[int]:
        """Token ids of the document and the text after it; zeros for those that are not known."""
        return self._with_unknown(self._stream.finish(after))

    @property
    def before(self) -> str:
        """The chat template's text before the document."""
        return self._before

    def protected(self, prompt: Sequence[int]) -> list[Span]:
        """Token spans of a prompt that the setting ``protect`` names, but for the first tokens."""
        return protected_spans(self.tokenizer, prompt, self.cache.settings.protect) if self.chat_template else []

    def ask(
        self,
        question: str,
        *,
        max_new_tokens: int = 64,
        sampling: Sampling | None = None,
        seed: int | None = None,
        graph: bool | None = False,
        progress: Progress | None = None,
    ) -> Answer:
        """The answer to a question, written while it is read (see ``Answer``). The document stays as it was.

        It equals the answer of a fresh run over text and question (in few bits where the room depends
        on the prompt's length, under full attention and one-shot, and after ``prepare``: to rounding).

        Where a prompt of that length is read otherwise from its
        beginning on (short texts under a pyramid, LongRoPE's other factor), the text is read anew for this question, and
        ``reads`` counts it. Without the text in the file, a question shorter than ``local_len`` tokens holds back only
        its own tokens.

        Args:
            seed: of sampling; by default the settings'.

        Raises:
            ValueError: an empty question; without the text: a repetition penalty.
            CannotFork: the text would have to be read anew, and is not in the file.
        """
        if not question.strip():
            raise ValueError("the question is empty")
        self._check_sampling(sampling)
        ids = self.prompt(question)
        cache = self.open(len(ids))
        for start, end in self.protected(ids):
            cache.pin(start, end)
        return Answer(
            self.model, self.tokenizer, ids, cache, max_new_tokens=max_new_tokens, sampling=sampling,
            seed=self.cache.settings.seed if seed is None else seed, graph=graph, progress=progress,
        )  # fmt: skip

    def open(self, prompt_length: int) -> BoundedCache:
        """A cache of its own that has read the text and goes on with a prompt of so many tokens."""
        local_len = self.cache.schedule.local_len
        if self._unknown:  # evictions before the tail must come after what was read
            local_len = min(local_len, prompt_length - self.cache.get_seq_length() - 1)
        cache = self._fork(prompt_length, local_len)
        self.reads += cache.get_seq_length() < self.cache.get_seq_length()
        return cache

    def prepare(self) -> None:
        """Read the text's end ahead of the questions, so that each reads few tokens but its own, and make what their first
        token would wait for. An error or an interrupt leaves the document as it was.

        Then an answer equals that of a fresh run to rounding, no longer bit for bit: the same tokens are multiplied in other
        pieces, and of two slots that tie another may be kept. Without effect where the text is not in the file.
        """
        if self._unknown:
            return
        local_len, self._ahead = self.cache.schedule.local_len, True
        end = self._end(self._stream, local_len, 0)
        with suppress(CannotFork):
            if end > self.cache.get_seq_length():
                cache = self.cache.fork(end + local_len + 1, local_len=local_len)
                self._reader(self.model, self._stream.ids[:end], cache, None)
                self.cache = cache
        ready(self.model, self.cache)

    def _check_sampling(self, sampling: Sampling | None) -> None:
        if self._unknown and sampling is not None and sampling.repetition_penalty != 1.0:
            raise ValueError(
                f"repetition_penalty={sampling.repetition_penalty} needs the text, which is not in the file"
            )

    def chat(self, history: int = 1024, **generation: Any) -> Chat:
        """A conversation about the document, whose turns have ``history`` slots of their own. Raises ValueError as ``ask``."""
        self._check_sampling(generation.get("sampling"))
        return Chat(self.model, self.tokenizer, document=self, history=history, **generation)

    # ---- files -----------------------------------------------------------------------------------------------------

    def save(self, path: str | Path, *, text: bool = True, names: dict[str, str] | None = None) -> None:
        """Write the document to one ``.safetensors`` file.

        Args:
            text: False leaves the token ids out; the tokens after the last safe boundary are then stored as rows.
            names: what backbone and heads are called, for people and as a default of commands.

        Raises:
            ValueError: without its text, a document of a policy that reads passages again, or one whose last token
                hangs on the question. OSError: the file cannot be written; the one that was there is whole.
        """
        document = self if self._bare or (text and not self._unknown) else self._without_text()
        stream = document._stream
        record = TextRecord(
            title=self.title, tokens=self.tokens, text=not document._unknown, open=stream.text,
            sha256=None if self._unknown else hash_ids(self._stream.finish()),
            done=stream.done, chat=self.chat_template, before=self._before, share=self.share,
            tokenizer=tokenizer_identity(self.tokenizer), names=names or {},
        )  # fmt: skip
        more = {IDS: torch.tensor(stream.ids, dtype=torch.int32)} if record.text else {}
        save_cache(document.cache, path, asdict(record), more)

    @property
    def _bare(self) -> bool:
        """Whether nothing of the text is at hand: a file without its text, to which nothing was added."""
        stream = self._stream
        return bool(self._unknown) and not stream.ids and not stream.text[stream.done :].strip()

    def _without_text(self) -> Document:
        """The same document with every token read and no ids."""
        if self.cache.policy.reread is not None:
            raise ValueError(
                f"policy={self.cache.policy.name!r} reads passages of the text again: it cannot be saved without its text"
            )
        stream = copy(self._stream)
        stream.ids = array("i", stream.ids)
        stream.forget()
        question = render_prompt(self.tokenizer, "", "What?", chat=self.chat_template)[1]
        if stream.finish(question) != self._stream.finish(question):
            raise ValueError("the last token of the text hangs on the question: it cannot be saved without its text")
        ids = self._with_unknown(stream.ids)
        cache = self._fork(len(ids) + self.cache.schedule.local_len + 1, self.cache.schedule.local_len)
        if len(ids) > cache.get_seq_length():
            with attached(self.model):
                prefill(self.model, ids, cache)
        stream.ids = array("i")
        return Document(
            self.model, self.tokenizer, cache, stream, chat=self.chat_template, before=self._before, title=self.title,
            share=self.share, unknown=len(ids),
        )  # fmt: skip

    @classmethod
    def load(
        cls,
        path: str | Path,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        heads: RetainingHeads | str | Path | None = None,
        policy: str | Policy | None = None,
        *,
        force: bool = False,
        store: StoreSettings | None = None,
    ) -> Document:
        """The document in a file.

        Args:
            heads: those that the document was read with. policy, force, store: as in ``load_cache``.

        Raises:
            OSError: there is no such file. ValueError: it is damaged or holds no document, or the first difference to what
                is at hand.
        """
        record, tensors = read(Path(path))
        saved, about = _stated(record, path)
        with blaming(str(path), ValueError):
            if found := first_difference({"tokenizer": about.tokenizer}, {"tokenizer": tokenizer_identity(tokenizer)}):
                raise ValueError(found)
            stream = _stream(tokenizer, about.chat)
            stream.ids = stored_ids(tensors.pop(IDS, None), len(tokenizer)) if about.text else array("i")
            stream.text, stream.done = about.open, about.done
        cache = restore(saved, tensors, model, heads, policy, where=str(path), force=force, store=store)
        seen = cache.get_seq_length()
        document = cls(
            model, tokenizer, cache, stream, chat=about.chat, before=about.before, title=about.title, share=about.share,
            unknown=0 if about.text else seen,
        )  # fmt: skip
        with blaming(str(path), ValueError):
            if about.text and (hash_ids(stream.finish()) != about.sha256 or seen > len(stream.ids)):
                raise ValueError("document: its token ids do not have the hash that it states")
            if document.tokens != about.tokens:
                raise ValueError(f"document: tokens={about.tokens} must be {document.tokens}")
        return document


def describe(path: str | Path) -> tuple[Saved, TextRecord]:
    """What a file says of its cache and of its text, whose tensors are not read.

    Raises:
        OSError: there is no such file. ValueError: its record is damaged, or it holds no document.
    """
    return _stated({name: value for name, value in read_record(Path(path)).items() if name != "digest"}, path)


def _stated(record: Record, path: str | Path) -> tuple[Saved, TextRecord]:
    """What a file's record says of its cache and of its text."""
    saved = Saved.of(record, path)
    with blaming(str(path), ValueError):
        if saved.document is None:
            raise ValueError("it holds a cache without a document: load_cache reads it")
        with blaming("document", ValueError):
            return saved, made(TextRecord, saved.document, "field", whole=True)


def read_alone(model: PreTrainedModel, ids: array[int], cache: BoundedCache, progress: Progress | None) -> None:
    """Read tokens into a cache, while nothing else runs."""
    with attached(model):
        prefill(model, ids, cache, progress)


def _stream(tokenizer: PreTrainedTokenizerBase, chat: bool) -> IdStream:
    """The stream of a prompt's tokens. A chat template writes the special tokens itself."""
    return IdStream(tokenizer, special=not (chat and has_template(tokenizer)))


def _pieces(text: str | Path | Iterable[str]) -> Iterable[str]:
    """The pieces of a text; of a file, as ``text.reader`` reads it."""
    if isinstance(text, Path):
        from ..text.reader import read_document

        return [read_document(text)]
    return [text] if isinstance(text, str) else text


def stored_ids(ids: torch.Tensor | None, vocabulary: int) -> array[int]:
    """The token ids of a file. Raises ValueError where they are none of ``vocabulary``."""
    if ids is None or ids.dtype != torch.int32 or ids.dim() != 1:
        raise ValueError(f"{IDS} must be one axis of int32")
    if ids.numel() and not (ids.min() >= 0 and ids.max() < vocabulary):
        raise ValueError(f"{IDS} must be from 0 to {vocabulary - 1}")
    return array("i", ids.tolist())


def hash_ids(ids: array[int]) -> str:
    """SHA-256 (hexadecimal) of token ids as little-endian 32-bit integers."""
    return hashlib.sha256(torch.tensor(ids, dtype=torch.int32).numpy().astype("<i4").tobytes()).hexdigest()
