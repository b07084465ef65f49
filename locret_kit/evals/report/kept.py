"""Kept tokens of a prompt as text: each with the share of layers and heads that hold it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ...backbones.load import load_tokenizer
from ..engine.rows import Row, read_kept

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BRIGHT, DIM, PLAIN = "\033[1m", "\033[2m", "\033[0m"
CONTEXT = 4
"""Tokens before one that its text may depend on."""


tokenizer_of = lru_cache(maxsize=2)(load_tokenizer)
"""The tokenizer of a backbone, as a row names it."""


def token_texts(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[str]:
    """The text of each token; together they are the text. Of the tokens of one character the last has it."""

    def decode(start: int, end: int) -> str:
        return str(tokenizer.decode(list(ids[start:end]), clean_up_tokenization_spaces=False))

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


def show_kept(out: Path, row: Row, *, layer: int | None = None, color: bool = True) -> str:
    """A headline and the prompt: tokens that at least half of the heads hold are bright, those held less often than the
    average token dim; without colour, `` ... `` stands for these."""
    ids, share_T = shares(out, row, layer)
    level_T = np.where(share_T >= 0.5, 2, (share_T >= share_T.mean()) & (share_T > 0))
    where = "all layers" if layer is None else f"layer {layer}"
    head = (
        f"{row.task}, {row.haystack}, {len(ids)} tokens, sample {row.sample}; {row.label}"
        f"{f', budget {row.budget}' if row.budget else ''}: {share_T.mean():.1%} kept ({where}); "
        f"held by at least half of the heads: {(level_T == 2).sum()} tokens, more than average: {(level_T == 1).sum()}"
    )
    styles = ((DIM, PLAIN), ("", ""), (BRIGHT, PLAIN))
    text, texts = "", iter(token_texts(tokenizer_of(row.model), ids))
    for level, run in groupby(level_T.tolist()):
        piece, (begin, end) = "".join(next(texts) for _ in run), styles[level]
        text += f"{begin}{piece}{end}" if color else piece if level else " ... "
    return f"{head}\n\n{text}\n\nanswer {row.answer!r}, output {row.output!r}, score {row.score}\n"
