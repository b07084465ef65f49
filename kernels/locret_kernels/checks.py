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


def check_units(q_BQTD: Tensor, k_BHSD: Tensor, seen_BQNU: Tensor, queries: int, unit: int) -> None:
    """Raise ValueError unless the blocks are those of the queries, and the units those of the rows."""
    if queries < 1 or unit < 1:
        raise ValueError(f"blocks: queries={queries} and unit={unit} must be at least 1")
    (B, Q, T), S = q_BQTD.shape[:3], k_BHSD.shape[2]
    wanted = (B, Q, -(-T // queries), -(-S // unit))
    if tuple(seen_BQNU.shape) != wanted:
        raise ValueError(
            f"blocks: seen {list(seen_BQNU.shape)} must be {list(wanted)}: {T} queries by {queries}, {S} rows by {unit}"
        )


def check_tables(cos_SR: Tensor, sin_SR: Tensor, longest: int, D: int) -> None:
    """Raise ValueError unless there are tables for every rank of the longest head, of columns that its rows have."""
    (places, R), alike = cos_SR.shape, cos_SR.shape == sin_SR.shape
    if not alike or R > D or R % 2 or places < longest:
        raise ValueError(f"cos {tuple(cos_SR.shape)} must be [at least {longest}, even and at most {D}], and sin alike")


def check_some(name: str, count: int, what: str) -> None:
    """Raise ValueError, naming the argument, where there are no ``what``."""
    if count < 1:
        raise ValueError(f"{name}: {count} {what} must be at least 1")


def check_moves(index_BHK: Tensor, rows: Tensor) -> None:
    """Raise ValueError unless between one and all of a buffer's rows stay."""
    K, S = index_BHK.shape[2], rows.shape[2]
    if not 1 <= K <= S:
        raise ValueError(f"index: {K} rows must be at least 1 and at most the {S} rows of a buffer")


def check_scores(scores_BHS: Tensor, protected_BHS: Tensor, valid_BHS: Tensor, most_BH: Tensor) -> None:
    """Raise ValueError unless there are rows, every one with a score and two marks, and a number of each head."""
    check_some("scores", scores_BHS.numel(), "rows")
    marks = {"protected": protected_BHS, "valid": valid_BHS}
    for name, x in marks.items():
        if x.shape != scores_BHS.shape:
            raise ValueError(f"{name} {tuple(x.shape)} must have the shape of scores {tuple(scores_BHS.shape)}")
    if most_BH.shape != scores_BHS.shape[:2]:
        raise ValueError(f"most {tuple(most_BH.shape)} must be {tuple(scores_BHS.shape[:2])}, a number of each head")
