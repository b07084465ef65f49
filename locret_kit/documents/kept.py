"""Tokens of its text that a document holds: of one at hand, or of one in a file, whose model is not loaded."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from ..cache.bounded import BoundedCache
from ..cache.saved import CacheFile
from ..naming import prefixed_errors
from ..text.tokens import CHARACTER, token_texts
from .document import Document
from .text_record import stated, stored_text

T = TypeVar("T")


@dataclass(frozen=True)
class Kept:
    """Tokens of a text, and the positions that the cache holds."""

    ids: array[int]
    seen: int
    """Tokens that were read into the cache; those after them are read with each question."""
    positions: list[list[np.ndarray]]
    """Positions of each layer and key/value head, ascending."""

    @classmethod
    def of(cls, ids: array[int], cache: BoundedCache) -> Kept:
        """The positions of a text that a cache holds."""
        layers = range(len(cache.layers))
        positions = [[row[row >= 0].cpu().numpy() for row in cache.kept_positions(layer)[0]] for layer in layers]
        return cls(ids, cache.get_seq_length(), positions)

    def heads(self, layer: int | None = None, head: int | None = None) -> tuple[np.ndarray, int]:
        """Numbers of heads ``[seen]`` that hold each token read, and the total number of heads. ``layer`` and ``head``
        select one of them.

        Raises:
            ValueError: no such layer or head.
        """
        chosen = [rows for heads in _one(self.positions, layer, "layer") for rows in _one(heads, head, "head")]
        counts = np.zeros(self.seen, dtype=np.int64)
        for positions in chosen:
            counts[positions] += 1
        return counts, len(chosen)

    def texts(self, tokenizer: PreTrainedTokenizerBase, start: int, end: int) -> list[str]:
        """Texts of the tokens from ``start`` to ``end``, equal to that part of ``token_texts`` of all tokens."""
        begin = max(0, start - 2 * CHARACTER)
        return token_texts(tokenizer, self.ids[begin : end + CHARACTER])[start - begin : end - begin]


BRIGHT, DIM, PLAIN = "\033[1m", "\033[2m", "\033[0m"


def highlight(texts: Iterable[str], share_T: np.ndarray, *, color: bool = True) -> str:
    """The text of tokens: bright if at least half of the heads hold the token, dim if fewer than average hold it.
    Without colour, `` ... `` replaces the dim ones. ``share_T`` ``[T]`` is the share of heads."""
    styles = ((DIM, PLAIN), ("", ""), (BRIGHT, PLAIN))
    level_T = np.where(share_T >= 0.5, 2, (share_T >= share_T.mean()) & (share_T > 0))
    shown, rest = "", iter(texts)
    for level, run in groupby(level_T.tolist()):
        piece, (begin, end) = "".join(next(rest) for _ in run), styles[level]
        shown += f"{begin}{piece}{end}" if color else piece if level else " ... "
    return shown


def _one(items: list[T], number: int | None, what: str) -> list[T]:
    """All items, or only the selected one."""
    if number is not None and number >= len(items):
        raise ValueError(f"{what}={number} must be from 0 to {len(items) - 1}")
    return items if number is None else [items[number]]


def kept_of(document: Document) -> Kept:
    """Tokens that a document at hand holds.

    Raises:
        ValueError: it was loaded from a file without its text.
    """
    if not document.has_text:
        raise ValueError("it was written without its text, so its words are unknown")
    return Kept.of(document.ids, document.cache)


def read_kept(path: str | Path, tokenizer: PreTrainedTokenizerBase) -> Kept:
    """Tokens that the document in a file holds.

    Raises:
        OSError: there is no such file. ValueError: it is damaged, is of another tokenizer, or holds no text.
    """
    file = CacheFile.read(path)
    about, layers = stated(file), file.saved.layers
    with prefixed_errors(str(path), ValueError):
        if not about.text:
            raise ValueError("it was written with --no-text, so its words are unknown")
        text = stored_text(about, file.apart, tokenizer)
        seen = int(layers[0].get("seen", 0)) if layers else 0
        if not seen:
            raise ValueError("its cache is empty: a text this short is read with each question")
        positions = [_positions(file.tensors, number, seen) for number in range(len(layers))]
        ids = text.ids
        if not 0 < seen <= len(ids):
            raise ValueError(f"its cache has seen {seen} tokens of {len(ids)}")
    return Kept(ids, seen, positions)


def _positions(tensors: Mapping[str, torch.Tensor], layer: int, seen: int) -> list[np.ndarray]:
    """Positions of each head of a layer: rows of ``[1, H, rows]``, or stretches of ``[rows of all heads]``."""
    name = f"layers.{layer}"
    positions, lengths = (tensors.get(f"{name}.{part}") for part in ("positions", "lengths"))
    if positions is None or positions.dtype != torch.int32 or positions.dim() != (3 if lengths is None else 1):
        raise ValueError(f"{name}.positions must be integers [1, heads, rows], or [rows] with lengths")
    if positions.numel() and not 0 <= positions.min() <= positions.max() < seen:
        raise ValueError(f"{name}.positions must be from 0 to {seen - 1}")
    if lengths is None:
        return list(positions.flatten(0, 1).numpy())
    if lengths.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{name}.lengths must be integers")
    ends = lengths.flatten().cumsum(0).tolist()
    if not ends or min(lengths.flatten().tolist()) < 0 or ends[-1] != positions.numel():
        raise ValueError(f"{name}.lengths must make {positions.numel()} rows")
    return np.split(positions.numpy(), ends[:-1])
