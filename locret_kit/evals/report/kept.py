"""What was kept of a prompt, as text: the tokens with the share of layers and heads that hold them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from ...backbones.load import load_tokenizer
from ..engine.rows import Row, read_kept

BRIGHT, DIM, PLAIN = "\033[1m", "\033[2m", "\033[0m"
CONTEXT = 4
"""Tokens before one that its text may depend on."""


tokenizer_of = lru_cache(maxsize=2)(load_tokenizer)
"""The tokenizer of a backbone, as a row names it."""


def token_texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """The text of each token; together they are the text. Of the tokens of one character the last has it."""

    def decode(start: int, end: int) -> str:
        return tokenizer.decode(ids[start:end], skip_special_tokens=False, clean_up_tokenization_spaces=False)

    texts, done = [], 0
    for end in range(1, len(ids) + 1):
        start = max(0, done - CONTEXT)
        text = decode(start, end)
        if text.endswith("\ufffd") and end - done < CONTEXT and end < len(ids):
            texts.append("")
            continue
        texts.append(text[len(decode(start, done)) :] if done else text)
        done = end
    return texts


def shares(out: Path, row: Row, layer: int | None = None) -> tuple[list[int], np.ndarray]:
    """``(prompt ids, share of the key/value heads that hold each token)``, of one layer or of all.

    Raises:
        FileNotFoundError: see `read_kept`. ValueError: there is no such layer.
    """
    kept = read_kept(out, row)
    heads_LT = kept["heads"]
    if layer is not None:
        if not 0 <= layer < len(heads_LT):
            raise ValueError(f"layer={layer} must be from 0 to {len(heads_LT) - 1}")
        heads_LT = heads_LT[layer : layer + 1]
    return kept["ids"].tolist(), heads_LT.mean(0) / kept["n_heads"]


def levels(share_T: np.ndarray) -> np.ndarray:
    """2 for tokens that at least half of the heads hold, 1 for those held at least as often as the average token, else 0."""
    return np.where(share_T >= 0.5, 2, np.where((share_T >= share_T.mean()) & (share_T > 0), 1, 0))


def runs(texts: Sequence[str], level_T: np.ndarray) -> Iterator[tuple[int, str]]:
    """``(level, text)`` of neighbouring tokens of one level."""
    for level, members in groupby(zip(level_T.tolist(), texts, strict=True), key=lambda pair: pair[0]):
        yield level, "".join(text for _, text in members)


def show_kept(out: Path, row: Row, *, layer: int | None = None, color: bool = True) -> str:
    """A headline and the prompt: kept tokens bright, evicted ones dim; without colour, `` ... `` stands for evicted ones."""
    ids, share_T = shares(out, row, layer)
    level_T = levels(share_T)
    where = "all layers" if layer is None else f"layer {layer}"
    head = (
        f"{row.task}, {row.haystack}, {len(ids)} tokens, sample {row.sample}; {row.label}"
        f"{f', budget {row.budget}' if row.budget else ''}: {share_T.mean():.1%} kept ({where}); "
        f"held by at least half of the heads: {(level_T == 2).sum()} tokens, more than average: {(level_T == 1).sum()}"
    )
    pieces = runs(token_texts(tokenizer_of(row.model), ids), level_T)
    if color:
        codes = (DIM, "", BRIGHT)
        text = "".join(f"{codes[level]}{piece}{PLAIN if codes[level] else ''}" for level, piece in pieces)
    else:
        text = "".join(piece if level else " ... " for level, piece in pieces)
    return f"{head}\n\n{text}\n\nanswer {row.answer!r}, output {row.output!r}, score {row.score}\n"
