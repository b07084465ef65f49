"""Records of saved documents: what a file says of the text, and the ids of its tokens."""

from __future__ import annotations

import re
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from ..backbones.identity import first_difference, tokenizer_identity
from ..cache.restore import Saved
from ..cache.saved import CacheFile
from ..naming import prefixed_errors
from ..settings import Count, Share
from ..validation import build, display, validate_fields
from .document_text import DocumentText, open_stream

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
