"""Tokens of its text that a document holds: positions by layer and head."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from ..cache.file import read
from ..naming import blaming
from ..runtime.tokens import CHARACTER, token_texts
from .document import Document
from .text_record import IDS, stated, stored_text

T = TypeVar("T")


@dataclass(frozen=True)
class Kept:
    """Tokens of a text and what is held of them."""

    ids: array[int]
    seen: int
    """Tokens that were read into the cache; those after them are read with each question."""
    positions: list[list[np.ndarray]]
    """Positions of each layer and key/value head, ascending."""

    def heads(self, layer: int | None = None, head: int | None = None) -> tuple[np.ndarray, int]:
        """Number of the heads of all layers, or of one layer or head, that hold each token that was read ``[seen]``; and how many
        heads these are.

        Raises:
            ValueError: there is no such layer, or head.
        """
        chosen = [
            positions for heads in _one(self.positions, layer, "layer") for positions in _one(heads, head, "head")
        ]
        counts = np.zeros(self.seen, dtype=np.int64)
        for positions in chosen:
            counts[positions] += 1
        return counts, len(chosen)

    def texts(self, tokenizer: PreTrainedTokenizerBase, start: int, end: int) -> list[str]:
        """The texts of tokens ``start`` to ``end``, as ``token_texts`` of all has them."""
        begin = max(0, start - 2 * CHARACTER)
        return token_texts(tokenizer, self.ids[begin : end + CHARACTER])[start - begin : end - begin]


def _one(items: list[T], number: int | None, what: str) -> list[T]:
    """All items, or one of them."""
    if number is not None and number >= len(items):
        raise ValueError(f"{what}={number} must be from 0 to {len(items) - 1}")
    return items if number is None else [items[number]]


def kept_of(document: Document) -> Kept:
    """Tokens that a document at hand holds.

    Raises:
        ValueError: it was loaded from a file without its text.
    """
    cache = document.cache
    if not document.has_text:
        raise ValueError("it was written without its text, so nobody can say which words it holds")
    positions = [
        [row[row >= 0].cpu().numpy() for row in cache.kept_positions(layer)[0]] for layer in range(len(cache.layers))
    ]
    return Kept(document.ids, cache.get_seq_length(), positions)


def read_kept(path: str | Path, tokenizer: PreTrainedTokenizerBase) -> Kept:
    """Tokens that the document in a file holds.

    Raises:
        OSError: there is no such file. ValueError: it is damaged, is of another tokenizer, or holds no text.
    """
    record, tensors, _ = read(Path(path))
    saved, about = stated(record, path)
    with blaming(str(path), ValueError):
        if not about.text:
            raise ValueError("it was written with --no-text, so nobody can say which words it holds")
        text = stored_text(about, tensors.get(IDS), tokenizer)
        seen = int(saved.layers[0].get("seen", 0)) if saved.layers else 0
        if not seen:
            raise ValueError("its cache holds nothing: a text this short is read with each question")
        layers = [_positions(tensors, number, seen) for number in range(len(saved.layers))]
        ids = text.ids
        if not 0 < seen <= len(ids):
            raise ValueError(f"its cache has seen {seen} tokens of {len(ids)}")
    return Kept(ids, seen, layers)


def _positions(tensors: dict[str, torch.Tensor], layer: int, seen: int) -> list[np.ndarray]:
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
