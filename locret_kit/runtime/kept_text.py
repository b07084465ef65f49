"""Text that a cache holds: each token with the key/value heads that hold it, and its view in a terminal."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from ..cache.bounded import BoundedCache

BRIGHT, DIM, PLAIN = "\033[1m", "\033[2m", "\033[0m"


def kept_heads(cache: BoundedCache, tokens: int) -> tuple[np.ndarray, int]:
    """``(heads [L, T] uint8, H)``: how many of a layer's H key/value heads hold each of the first ``tokens`` tokens."""
    heads = np.zeros((len(cache.layers), tokens), dtype=np.uint8)
    n_heads = 0
    for layer in range(len(cache.layers)):
        positions_H = cache.kept_positions(layer)[0]
        n_heads = len(positions_H)
        for positions in positions_H:
            row = positions[(positions >= 0) & (positions < tokens)].cpu().numpy()
            heads[layer] += np.bincount(row, minlength=tokens).astype(np.uint8)
    return heads, n_heads


def levels(share_T: np.ndarray) -> np.ndarray:
    """Level ``[T]`` of each token, by the share of the heads that hold it: 2 from one half on, 1 from the average on, else
    0."""
    return np.where(share_T >= 0.5, 2, (share_T >= share_T.mean()) & (share_T > 0))


def highlight(texts: Iterable[str], level_T: np.ndarray, *, color: bool = True) -> str:
    """The text of tokens: bright at level 2, dim at level 0; without colour, `` ... `` stands for these."""
    styles = ((DIM, PLAIN), ("", ""), (BRIGHT, PLAIN))
    shown, rest = "", iter(texts)
    for level, run in groupby(level_T.tolist()):
        piece, (begin, end) = "".join(next(rest) for _ in run), styles[level]
        shown += f"{begin}{piece}{end}" if color else piece if level else " ... "
    return shown
