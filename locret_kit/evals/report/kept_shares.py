"""Kept tokens of a prompt as text: each with the share of layers and heads that hold it."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import numpy as np

from ...backbones.load import load_tokenizer
from ...runtime.kept_text import highlight, levels, token_texts
from ..engine.result_rows import Row, read_kept

tokenizer_of = lru_cache(maxsize=2)(load_tokenizer)
"""The tokenizer of a backbone, as a row names it."""


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
    level_T = levels(share_T)
    where = "all layers" if layer is None else f"layer {layer}"
    head = (
        f"{row.task}, {row.haystack}, {len(ids)} tokens, sample {row.sample}; {row.label}"
        f"{f', budget {row.budget}' if row.budget else ''}: {share_T.mean():.1%} kept ({where}); "
        f"held by at least half of the heads: {(level_T == 2).sum()} tokens, more than average: {(level_T == 1).sum()}"
    )
    text = highlight(token_texts(tokenizer_of(row.model), ids), level_T, color=color)
    return f"{head}\n\n{text}\n\nanswer {row.answer!r}, output {row.output!r}, score {row.score}\n"
