"""Records of saved documents: what a file says of its text, and the ids of its tokens."""

from __future__ import annotations

import hashlib
import re
from array import array
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..backbones.weights import first_difference, tokenizer_identity
from ..cache.bounded import BoundedCache
from ..cache.file import Record, read_record
from ..cache.saved import Saved, restore
from ..heads import RetainingHeads
from ..naming import blaming
from ..policies import Policy
from ..settings import Count, Share, check, made, shown
from .document_text import DocumentText, open_stream

IDS = "document.ids"
"""Name of the tensor of token ids."""
UNKNOWN = 1 << 24
"""Tokens whose ids are not in the file, at most: each question counts them."""


@dataclass(frozen=True, kw_only=True)
class TextRecord:
    """A saved document's record of its text.

    Raises:
        ValueError: a field of another type or out of its bound; it is named.
    """

    title: str
    tokens: Count
    sha256: str | None
    """Hash of the token ids, as little-endian 32-bit integers; None where they are not known."""
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
    """Names of the backbone and the heads. They help to find them; content decides whether they are the same."""

    def __post_init__(self) -> None:
        check(self)
        if self.done > len(self.open):
            raise ValueError(f"done={self.done} must be at most {len(self.open)}, the length of open")
        if not re.fullmatch("[0-9a-f]{64}" if self.text else "[0-9a-f]{64}|None", str(self.sha256)):
            raise ValueError(f"sha256={shown(self.sha256)} must be 64 hexadecimal digits")
        if not self.text and self.tokens > UNKNOWN:
            raise ValueError(f"tokens={self.tokens} must be at most {UNKNOWN} without the text")


def describe(path: str | Path) -> tuple[Saved, TextRecord]:
    """A file's records of its cache and its text, whose tensors are not read.

    Raises:
        OSError: there is no such file. ValueError: its record is damaged, or it holds no document.
    """
    return stated({name: value for name, value in read_record(Path(path)).items() if name != "digest"}, path)


def stated(record: Record, path: str | Path) -> tuple[Saved, TextRecord]:
    """The parts of a file's record: of its cache and of its text."""
    saved = Saved.of(record, path)
    with blaming(str(path), ValueError):
        if saved.document is None:
            raise ValueError("it holds a cache without a document: load_cache reads it")
        with blaming("document", ValueError):
            return saved, made(TextRecord, saved.document, "field", whole=True)


def restored(
    record: Record, tensors: dict[str, torch.Tensor], path: str | Path, model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase, heads: RetainingHeads | str | Path | None, policy: str | Policy | None, *,
    force: bool = False,
) -> tuple[DocumentText, BoundedCache, TextRecord]:  # fmt: skip
    """Text and cache of a file that was read, and what it says of the text. Arguments and errors as of ``Document.load``."""
    saved, about = stated(record, path)
    with blaming(str(path), ValueError):
        text = stored_text(about, tensors.pop(IDS, None), tokenizer)
    cache = restore(saved, tensors, model, heads, policy, where=str(path), force=force)
    seen = cache.get_seq_length()
    text.unknown = 0 if about.text else seen
    with blaming(str(path), ValueError):
        if about.text and (hash_ids(text.ids) != about.sha256 or seen > len(text.settled)):
            raise ValueError("document: its token ids do not have the hash that it states")
        if text.tokens != about.tokens:
            raise ValueError(f"document: tokens={about.tokens} must be {text.tokens}")
    return text, cache, about


def stored_text(about: TextRecord, ids: torch.Tensor | None, tokenizer: PreTrainedTokenizerBase) -> DocumentText:
    """The text that a record and the tensor ``IDS`` of its file state; without the text, the end that is not read yet.

    Raises:
        ValueError: another tokenizer, or ids that are none of its vocabulary.
    """
    if difference := first_difference({"tokenizer": about.tokenizer}, {"tokenizer": tokenizer_identity(tokenizer)}):
        raise ValueError(difference)
    stream = open_stream(tokenizer, about.chat)
    stream.ids = _stored_ids(ids, len(tokenizer)) if about.text else array("i")
    stream.text, stream.done = about.open, about.done
    return DocumentText(stream, chat=about.chat, before=about.before)


def _stored_ids(ids: torch.Tensor | None, vocabulary: int) -> array[int]:
    """The token ids of a file. Raises ValueError where they are none of ``vocabulary``."""
    if ids is None or ids.dtype != torch.int32 or ids.dim() != 1:
        raise ValueError(f"{IDS} must be one axis of int32")
    if ids.numel() and not (ids.min() >= 0 and ids.max() < vocabulary):
        raise ValueError(f"{IDS} must be from 0 to {vocabulary - 1}")
    return array("i", ids.tolist())


def hash_ids(ids: array[int]) -> str:
    """SHA-256 (hexadecimal) of token ids as little-endian 32-bit integers."""
    return hashlib.sha256(np.asarray(ids, "<i4").tobytes()).hexdigest()
