"""Scores of several runs against a setting in which they differ: stabilizers, chunks, bits, wording."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from ...naming import nearest
from ..cells import Cell, size, summarize
from ..engine.result_rows import KEY, RUN, SETTINGS, Row
from .results import over, policy_labels, whisker
from .style import line, panels, score_axis, shared_legend, token_axis

SWEPT = tuple(dict.fromkeys((*KEY[2:4], *RUN, *(name for name in SETTINGS if name != "metric"))))
"""Settings of a row that a sweep may run over."""
Value = int | float | str


@dataclass(frozen=True)
class Sweep:
    """Runs and the setting in which they differ."""

    x: str
    runs: Sequence[Sequence[Row]]
    """Rows of each run; those of one run share their settings, but for budget and length."""


def runs_in(out: str | Path) -> list[Path]:
    """The folder and the folders in it that hold rows, in the order of their names.

    Raises:
        FileNotFoundError: there is none.
    """
    folders = [folder for folder in (Path(out), *sorted(Path(out).rglob("*"))) if any(folder.glob("rows.*.jsonl"))]
    if not folders:
        raise FileNotFoundError(f"out={out} and its folders hold no rows")
    return folders


def sweep(given: Sweep) -> Figure:
    """Mean score with its `results.whisker` against the setting; a panel per task, length and budget, a line per policy; full
    attention in each panel. Settings that are no numbers stand side by side.

    Raises:
        ValueError: an unknown setting, or one that has the same value in all rows.
    """
    if given.x not in SWEPT or given.x not in {item.name for item in fields(Row)}:
        raise ValueError(f"x={given.x} is no setting of rows.{nearest(given.x, SWEPT)} There are: {', '.join(SWEPT)}")
    panels_: dict[tuple[str, str, int, float], dict[str, dict[Value, Cell]]] = defaultdict(lambda: defaultdict(dict))
    for rows in given.runs:
        for value in {_value(row, given.x) for row in rows}:
            for cell in summarize(row for row in rows if _value(row, given.x) == value and row.score is not None):
                length, budget = (0 if given.x == name else getattr(cell, name) for name in ("length", "budget"))
                panels_[cell.task, cell.haystack, length, budget][cell.label][value] = cell
    values = {value for lines in panels_.values() for points in lines.values() for value in points}
    if len(values) < 2:
        said = next(iter(values), "-")
        raise ValueError(f"x={given.x} is {said} in all rows: draw a folder that holds runs in which it differs")
    return _drawn(given.x, panels_, sorted(values, key=lambda value: (isinstance(value, str), value)))


def _value(row: Row, x: str) -> Value:
    value = getattr(row, x)
    if value is None:
        return "none"
    return value if isinstance(value, int | float) and not isinstance(value, bool) else str(value)


def _drawn(
    x: str, groups: dict[tuple[str, str, int, float], dict[str, dict[Value, Cell]]], values: list[Value]
) -> Figure:
    """Panels of full attention alone are left out, and full attention is drawn in those of its length."""
    full = {key[:3]: lines["full"] for key, lines in groups.items() if "full" in lines}
    shown = {key: lines for key, lines in groups.items() if set(lines) != {"full"}} or groups
    labels = policy_labels([cell for lines in groups.values() for points in lines.values() for cell in points.values()])
    numbers = [value for value in values if not isinstance(value, str)]
    at = {value: value if len(numbers) == len(values) else i for i, value in enumerate(values)}
    figure, axes = panels(len(shown), f"Score against {x}")
    for ((task, haystack, length, budget), lines), axis in zip(sorted(shown.items()), axes, strict=True):
        known = {"full": full[task, haystack, length], **lines} if (task, haystack, length) in full else lines
        for label in (label for label in labels if label in known):
            points = sorted(((float(at[value]), cell) for value, cell in known[label].items()), key=lambda one: one[0])
            whiskers = np.array([whisker(cell) for _, cell in points]).T
            axis.errorbar(
                [place for place, _ in points], [cell.mean or 0.0 for _, cell in points], whiskers, label=label, capsize=2,
                **line(labels.index(label)),
            )  # fmt: skip
        parts = [
            over(task, haystack),
            f"{size(length)} tokens" if length else "",
            f"budget {size(budget)}" if budget else "",
        ]
        axis.set_title(", ".join(part for part in parts if part))
        score_axis(axis, next(iter(next(iter(lines.values())).values())).metric)
        if len(numbers) == len(values):
            token_axis(axis, numbers, x)
        else:
            axis.set_xticks(range(len(values)), [str(value) for value in values])
            axis.set_xlabel(x)
    shared_legend(figure)
    return figure
