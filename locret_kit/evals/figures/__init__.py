"""Figures by name: drawn from rows (`results`) or from a training run's curves (`curves`).

To add one, write a function that returns a matplotlib figure and name it here.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from ...config.figure_options import Look
from ...naming import install_line, nearest


@dataclass(frozen=True)
class Kind:
    """One figure."""

    function: str
    """``module.function`` of this package; imported when it is drawn."""
    source: str
    """'rows', 'curves' or, for rows of several runs, 'sweep'."""
    says: str
    """Caption, for the list of figures."""


FIGURES: dict[str, Kind] = {
    "score-budget": Kind("results.score_budget", "rows", "score against budget"),
    "score-length": Kind("results.score_length", "rows", "score against prompt length"),
    "score-memory": Kind("results.score_memory", "rows", "score against memory (Locret, figure 4)"),
    "needle-grid": Kind("results.needle_grid", "rows", "score by the needle's depth and the prompt's length"),
    "cost": Kind("results.cost", "rows", "memory and tokens per second against prompt length"),
    "sweep": Kind("sweep.sweep", "sweep", "score of several runs against a setting in which they differ (x=SETTING)"),
    "training-curves": Kind("curves.training_curves", "curves", "loss and recall of a training run (Locret, figure 7)"),
}
PAPERS = (
    "retained", "kept-positions", "stabilizers", "jaccard", "persistence", "scope-size", "concentration", "loss-bound",
    "budget-split", "proxy-share", "random-share", "sparsity",
)  # fmt: skip
"""Figures of other papers, which `examples/paper_figures` draws."""


def find_figure(name: str) -> Kind:
    """The figure of a name.

    Raises:
        ValueError: there is none; suggests the nearest, or says where it is drawn.
    """
    if name in PAPERS:
        raise ValueError(
            f"figure {name!r} is drawn by: python examples/paper_figures/draw.py {name} out=FOLDER key=value"
        )
    if name not in FIGURES:
        known = f"{', '.join(FIGURES)}; in examples/paper_figures: {', '.join(PAPERS)}"
        raise ValueError(f"figure {name!r} is unknown.{nearest(name, (*FIGURES, *PAPERS))} Known: {known}")
    return FIGURES[name]


def draw(name: str, source: object, folder: Path, look: Look | None = None) -> list[Path]:
    """Draw a figure of rows, of a training run's folder, or of a setting and runs; the files written, by default ``NAME.png``
    and ``NAME.svg``.

    Raises:
        ValueError: an unknown figure, or nothing to draw; says what is missing. OSError: a file cannot be written.
        ImportError: matplotlib is missing.
    """
    module, function = find_figure(name).function.split(".")
    try:
        from . import style
    except ModuleNotFoundError as error:
        raise ImportError(f"{error}: {install_line('eval')}") from error
    return style.draw(getattr(import_module(f".{module}", __name__), function), source, folder, name, look)
