"""Figures of rows by name (`results`). To add one, write a function that returns a matplotlib figure and name it here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ...naming import install_line
from ..engine.result_rows import Row

FIGURES = {
    "score-memory": "score against memory (Locret, figure 4)",
    "needle-grid": "score by the needle's depth and the prompt's length",
}
"""Captions."""


def draw(name: str, rows: Sequence[Row], folder: Path) -> list[Path]:
    """Write ``NAME.png`` and ``NAME.svg`` of a figure; their paths.

    Raises:
        ValueError: nothing to draw; says what is missing. OSError: a file cannot be written. ImportError: matplotlib is missing.
    """
    try:
        from . import results
    except ModuleNotFoundError as error:
        raise ImportError(f"{error}: {install_line('eval')}") from error
    return results.draw(getattr(results, name.replace("-", "_")), rows, folder, name)
