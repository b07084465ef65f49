"""Refusals that both backends share, made before anything is allocated."""

from __future__ import annotations

from torch import Tensor


def check_queries(q_BQTD: Tensor, k_BHSD: Tensor) -> None:
    """Raise ValueError unless there are queries and each has its own row among the last rows of the keys."""
    T, S = q_BQTD.shape[2], k_BHSD.shape[2]
    if not 1 <= T <= S:
        raise ValueError(
            f"q: {T} queries must be at least 1 and at most the {S} rows of k, of which the last are their own"
        )


def check_some(name: str, count: int, what: str) -> None:
    """Raise ValueError, naming the argument, where there are no ``what``."""
    if count < 1:
        raise ValueError(f"{name}: {count} {what} must be at least 1")


def check_moves(index_BHK: Tensor, rows: Tensor) -> None:
    """Raise ValueError unless between one and all of a buffer's rows stay."""
    K, S = index_BHK.shape[2], rows.shape[2]
    if not 1 <= K <= S:
        raise ValueError(f"index: {K} rows must be at least 1 and at most the {S} rows of a buffer")
