"""Text of a document: its tokens, and the file's record of them. A token is settled when no later text can change it."""

from __future__ import annotations

import hashlib
import re
from array import array
from collections.abc import Iterable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from ..backbones.identity import first_difference, tokenizer_identity
from ..cache.restore import Saved
from ..cache.saved import CacheFile
from ..naming import prefixed_errors
from ..settings import Count, Share
from ..text.template import has_template, render_prompt
from ..text.tokens import IdStream
from ..text.untrusted import defused_pieces
from ..validation import build, display, validate_fields


class DocumentText:
    """The text of a document, after the chat template's first tokens.

    Args:
        stream: the tokens. chat: whether questions go through the chat template. before: the template's text before the
            document.
        unknown: number of first tokens without ids, if a file was saved without its text.
    """

    def __init__(self, stream: IdStream, *, chat: bool, before: str, unknown: int = 0) -> None:
        self.stream, self.chat, self.before, self.unknown = stream, chat, before, unknown

    @classmethod
    def begin(cls, tokenizer: PreTrainedTokenizerBase, chat: bool, max_tokens: int | None = None) -> DocumentText:
        """An empty text. Raises ValueError for a slow tokenizer."""
        before = render_prompt(tokenizer, "", "", chat=chat)[0]
        stream = open_stream(tokenizer, chat)
        stream.max_tokens = max_tokens
        stream.feed(before)
        return cls(stream, chat=chat, before=before)

    @classmethod
    def of(
        cls, tokenizer: PreTrainedTokenizerBase, text: str | Path | Iterable[str], chat: bool, max_tokens: int | None = None
    ) -> DocumentText:  # fmt: skip
        """The document text of a string, pieces or a file.

        Raises:
            ValueError: no text, or more than ``max_tokens``. OSError: the file cannot be read.
        """
        whole = cls.begin(tokenizer, chat, max_tokens)
        if not whole.feed(text):
            raise ValueError("the document holds no text")
        return whole

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self.stream.tokenizer

    @property
    def tokens(self) -> int:
        """Number of tokens, including the template's before the text."""
        return self.unknown + len(self.stream.finish())

    @property
    def start(self) -> int:
        """Number of the template's tokens before the text."""
        stream = open_stream(self.tokenizer, self.chat)
        stream.feed(self.before)
        return len(stream.finish())

    @property
    def ids(self) -> array[int]:
        """Token ids; zeros for unknown ids."""
        return self.ids_before("")

    @property
    def settled(self) -> array[int]:
        """Token ids that no later text can change; zeros for unknown ids."""
        return self._with_unknown(self.stream.ids)

    @property
    def bare(self) -> bool:
        """Whether the text is missing: the file was saved without it, and nothing was added."""
        stream = self.stream
        return bool(self.unknown) and not stream.ids and not stream.text[stream.done :].strip()

    def copy(self) -> DocumentText:
        """A separate copy that may get more text."""
        stream = copy(self.stream)
        stream.ids = array("i", stream.ids)
        return DocumentText(stream, chat=self.chat, before=self.before, unknown=self.unknown)

    def feed(self, text: str | Path | Iterable[str]) -> bool:
        """Add a string, pieces, or a file (see ``text.reader``) at the end. Returns whether it has a word.

        Raises:
            OSError, ValueError: the file cannot be read.
        """
        if isinstance(text, Path):
            from ..text.reader import read_document

            text = read_document(text)
        words, pieces = False, _strings([text] if isinstance(text, str) else text)
        for piece in defused_pieces(self.tokenizer, pieces, self.stream.text) if self.chat else pieces:
            words = words or bool(piece.strip())
            self.stream.feed(piece)
        return words

    def ids_before(self, after: str) -> array[int]:
        """Token ids of the document and the text ``after`` it; zeros for unknown ids."""
        return self._with_unknown(self.stream.finish(after))

    def prompt(self, question: str) -> array[int]:
        """Token ids of the whole prompt; zeros for unknown ids.

        Raises:
            ValueError: the chat template's text before the document depends on the question.
        """
        # What was read stays what it is, also where a template tells the date.
        for _ in range(3):
            empty, _ = render_prompt(self.tokenizer, "", "", chat=self.chat)
            before, after = render_prompt(self.tokenizer, "", question, chat=self.chat)
            if before == empty:  # otherwise a clock may have moved in between
                break
        else:
            if before == render_prompt(self.tokenizer, "", question, chat=self.chat)[0]:
                raise ValueError("the chat template's text before the document depends on the question")
        return self.ids_before(after)

    def before_questions(self, local_len: int) -> int:
        """Number of tokens before the tail of ``local_len`` tokens that even the shortest question holds back."""
        after = render_prompt(self.tokenizer, "", "?", chat=self.chat)[1]
        # Some tokenizers join a question's first letters to what precedes: two tokens fewer.
        return self.unknown + min(len(self.stream.finish(after)) - local_len - 2, len(self.stream.ids))

    def forgotten(self) -> tuple[array[int], DocumentText]:
        """All token ids (zeros for unknown ids), and a copy of the text without ids.

        Raises:
            ValueError: the last token depends on the text that follows.
        """
        text = self.copy()
        stream = text.stream
        stream.forget()
        question = render_prompt(self.tokenizer, "", "What?", chat=self.chat)[1]
        if stream.finish(question) != self.stream.finish(question):
            raise ValueError("the last token of the text depends on the question: it cannot be saved without its text")
        ids, stream.ids = text.settled, array("i")
        text.unknown = len(ids)
        return ids, text

    def _with_unknown(self, ids: array[int]) -> array[int]:
        """Token ids, preceded by a zero for each unknown token in the cache."""
        return array("i", bytes(4 * self.unknown)) + ids


def open_stream(tokenizer: PreTrainedTokenizerBase, chat: bool) -> IdStream:
    """The stream of a prompt's tokens. A chat template writes the special tokens itself."""
    return IdStream(tokenizer, special=not (chat and has_template(tokenizer)))


# ---- records of saved documents: what a file says of the text, and the ids of its tokens ------------------------------


IDS = "document.ids"
"""Name of the tensor of token ids."""
UNKNOWN = 1 << 24
"""Maximum number of tokens without ids in a file: each question counts them."""


@dataclass(frozen=True, kw_only=True)
class TextRecord:
    """A saved document's record of its text.

    Raises:
        ValueError: a field of a wrong type or out of bounds; names it.
    """

    title: str
    tokens: Count
    sha256: str | None
    """Hash of the token ids as little-endian 32-bit integers; None if they are unknown."""
    text: bool
    """Whether the ids are in the file."""
    open: str
    """The end of the text, whose tokens depend on the following text, after ``done`` characters of context."""
    done: Count
    chat: bool
    """Whether questions go through the chat template."""
    before: str
    """The chat template's text before the document."""
    share: Share | None
    """The budget as a share of the document, if it was given as one."""
    tokenizer: dict[str, object]
    names: dict[str, str]
    """Names of the backbone and the heads. They help to find them; content decides whether they are the same."""

    def __post_init__(self) -> None:
        validate_fields(self)
        if self.done > len(self.open):
            raise ValueError(f"done={self.done} must be at most {len(self.open)}, the length of open")
        if not re.fullmatch("[0-9a-f]{64}" if self.text else "[0-9a-f]{64}|None", str(self.sha256)):
            raise ValueError(f"sha256={display(self.sha256)} must be 64 hexadecimal digits")
        if not self.text and self.tokens > UNKNOWN:
            raise ValueError(f"tokens={self.tokens} must be at most {UNKNOWN} without the text")


def describe(path: str | Path) -> tuple[Saved, TextRecord]:
    """A file's records of its cache and its text, whose tensors are not read.

    Raises:
        OSError: there is no such file. ValueError: its record is damaged, or it holds no document.
    """
    file = CacheFile.read_record(path)
    return file.saved, stated(file)


def stated(file: CacheFile) -> TextRecord:
    """Record of a file's text. Raises ValueError if it is damaged, or the file holds no document."""
    with prefixed_errors(file.path, ValueError):
        if file.saved.document is None:
            raise ValueError("it holds a cache without a document: load_cache reads it")
        with prefixed_errors("document", ValueError):
            return build(TextRecord, file.saved.document, "field", whole=True)


def stored_text(
    about: TextRecord, apart: Mapping[str, torch.Tensor], tokenizer: PreTrainedTokenizerBase
) -> DocumentText:
    """The text from a file's record and its additional tensors (``IDS`` ``[T]``, int32). Without the stored text, only
    the unread end.

    Raises:
        ValueError: a different tokenizer, ids outside its vocabulary, or a tensor other than ``IDS``.
    """
    if others := sorted(apart.keys() - {IDS}):
        raise ValueError(f"{display(others[0])}: no such tensor")
    if difference := first_difference({"tokenizer": about.tokenizer}, {"tokenizer": tokenizer_identity(tokenizer)}):
        raise ValueError(difference)
    stream = open_stream(tokenizer, about.chat)
    stream.ids = array("i")
    if about.text:
        ids = apart.get(IDS)
        if ids is None or ids.dtype != torch.int32 or ids.dim() != 1:
            raise ValueError(f"{IDS} must be one-dimensional int32")
        if ids.numel() and not (ids.min() >= 0 and ids.max() < len(tokenizer)):
            raise ValueError(f"{IDS} must be from 0 to {len(tokenizer) - 1}")
        stream.ids = array("i", ids.tolist())
    stream.text, stream.done = about.open, about.done
    return DocumentText(stream, chat=about.chat, before=about.before)


def _strings(pieces: Iterable[object]) -> Iterator[str]:
    """The pieces of a text. Raises TypeError for a piece that is no string, as of bytes or token ids."""
    for piece in pieces:
        if not isinstance(piece, str):
            raise TypeError(f"text holds {piece!r:.40}, which must be a string: give a string, strings or a Path")
        yield piece


def hash_ids(ids: array[int]) -> str:
    """SHA-256 (hexadecimal) of token ids as little-endian 32-bit integers."""
    return hashlib.sha256(np.asarray(ids, "<i4").tobytes()).hexdigest()
