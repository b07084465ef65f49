"""Training curves from a run's ``curves.csv``. Source: Locret, figure 7."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .style import line, panels

GROUPS: list[tuple[str, str, tuple[str, ...]]] = [
    ("Loss", "loss of a step (mean over layers)", ("loss", "val/loss")),
    ("Recall of the true top 10%", "share found (0 to 1)", ("recall", "val/recall")),
    ("Smoothing, a part of the loss", "loss of a step (mean over layers)", ("train/smoothing",)),
    ("Learning rate", "learning rate", ("train/lr",)),
]
"""Panel title, unit, columns."""
FEW = 30
"""A column with fewer values is drawn with markers."""


def training_curves(run: Path) -> Figure:
    """Loss, recall and learning rate by step; training values thin with their running mean over them.

    Raises:
        FileNotFoundError: neither the folder nor its ``heads`` has a ``curves.csv``. ValueError: the file has no known column.
    """
    path = next((p for p in (run, run / "curves.csv", run / "heads" / "curves.csv") if p.is_file()), None)
    if path is None:
        raise FileNotFoundError(f"out={run} has no curves.csv (locret-train writes it)")
    columns = read_columns(path)
    groups = [(title, unit, [name for name in names if name in columns]) for title, unit, names in GROUPS]
    groups = [group for group in groups if group[2]]
    if not groups:
        raise ValueError(f"{path} has none of the columns {', '.join(name for g in GROUPS for name in g[2])}")
    where = run if run.is_dir() else run.parent
    figure, axes = panels(len(groups), f"Training of {where.resolve().name}", columns=2, width=4.4)
    for (title, unit, names), axis in zip(groups, axes, strict=True):
        for i, name in enumerate(names):
            _draw(axis, *columns[name], name, i)
        axis.set_title(title)
        axis.set_xlabel("step")
        axis.set_ylabel(unit)
        axis.legend()
        if title == "Loss":
            axis.set_yscale("log")
            axis.yaxis.set_major_formatter("{x:g}")
            axis.yaxis.set_minor_formatter("{x:g}")
    return figure


def read_columns(path: Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """``{column: (steps, values)}``, empty fields left out."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    names = [name for name in (rows[0] if rows else {}) if name != "step"]
    points = {name: [(float(row["step"]), float(row[name])) for row in rows if row[name]] for name in names}
    return {name: (np.array(p)[:, 0], np.array(p)[:, 1]) for name, p in points.items() if p}


def running_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Mean of each value and up to ``window - 1`` before it."""
    total = np.concatenate(([0.0], np.cumsum(values)))
    end = np.arange(1, len(values) + 1)
    start = np.maximum(0, end - window)
    return (total[end] - total[start]) / (end - start)


def _draw(axis: Axes, steps: np.ndarray, values: np.ndarray, name: str, i: int) -> None:
    if len(values) < FEW or name == "train/lr":
        axis.plot(steps, values, label=name, **line(i, marker=len(values) < FEW))
        return
    window = max(2, len(values) // 20)
    style = line(i, marker=False)
    axis.plot(steps, values, color=style["color"], alpha=0.25, linewidth=0.6)
    axis.plot(steps, running_mean(values, window), label=f"{name} (mean of {window})", **style)
