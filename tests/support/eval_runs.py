"""What two evaluations must have in common."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from locret_kit.evals.engine import Row, read_rows
from locret_kit.evals.tables import summarize, to_csv

COSTS = frozenset(("prefix_shared", "prefill_s", "decode_s", "peak_bytes", "date", "rank"))
"""What differs between two runs of the same examples."""


def figures(out: Path, costs: Collection[str] = COSTS) -> dict[tuple, dict]:
    """Every row without what a run costs, and what its cache held behind the prompt."""
    found = {}
    for row in read_rows(out):
        kept = kept_of(out, row)["heads"].tolist() if row.kept else None
        found[row.key] = {**{k: v for k, v in vars(row).items() if k not in costs}, "kept": kept}
    return found


def kept_of(out: Path, row: Row) -> Mapping[str, np.ndarray]:
    """What the cache held behind a row's prompt."""
    return np.load(out / "kept" / f"{row.kept}.npz")


def scores(out: Path) -> str:
    """The summary without its costs."""
    return to_csv(replace(cell, prefill_s=0.0, peak_bytes=0) for cell in summarize(read_rows(out)))
