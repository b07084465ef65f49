"""Figures of a run's rows: score against memory, and the needle grid. Their lines differ in dash and marker as in colour.

To add one, write a function of rows and width that returns a matplotlib figure, and name it in `FIGURES`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..files import write_beside
from .engine import Row
from .metrics import library
from .tables import LIKELIHOOD, grouped, over, size, summarize
from .tasks.task import asked_depth

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
LOOKS: dict[str, Sequence[Any]] = {
    "color": COLORS, "marker": "osD^vPX*<>h",
    "linestyle": ("-", "--", "-.", ":", (0, (6, 1.5)), (0, (3, 1, 1, 1, 1, 1)), (0, (1, 1)), (0, (8, 2, 2, 2))),
}  # fmt: skip
"""Looks of lines in turn: the first 56 differ in colour and dash, any 8 in dash alone."""
RC: Any = {
    "font.size": 9, "axes.titlesize": 9, "axes.grid": True, "grid.alpha": 0.3, "grid.linewidth": 0.5,
    "axes.spines.top": False, "axes.spines.right": False, "legend.fontsize": 8, "legend.frameon": False,
    "lines.linewidth": 1.4, "lines.markersize": 4.5, "text.parse_math": False, "figure.dpi": 100, "pdf.fonttype": 42,
}  # fmt: skip


def panels(count: int, width: float | None) -> tuple[Figure, list[Axes]]:
    """A figure of ``count`` panels, at most three a row, ``width`` inches wide."""
    from matplotlib.figure import Figure

    columns = min(count, 3 if width is None else max(1, round(width / 3)))
    rows = math.ceil(count / columns)
    figure = Figure(figsize=(width or max(4.2, 3.6 * columns), 2.9 * rows), layout="constrained")
    axes = [*figure.subplots(rows, columns, squeeze=False).flat]
    for unused in axes[count:]:
        unused.remove()
    return figure, axes[:count]


def score_memory(rows: Sequence[Row], width: float | None = None) -> Figure:
    """Mean score with its 95% interval against memory, a panel per task and length, a line per policy through its budgets.

    Memory is the peak on a GPU, and the cache's buffers on a CPU, where the peak is the process's.
    """
    on_gpu = all("cuda" in row.device for row in rows if row.error is None)
    cells = summarize(row if on_gpu else replace(row, peak_bytes=row.cache_bytes) for row in rows)
    cells = [cell for cell in cells if cell.mean is not None and cell.peak_bytes]
    if not cells:
        raise ValueError("no row has both a score and its memory")
    groups = grouped(cells, lambda cell: (cell.task, cell.haystack, cell.length))
    figure, axes = panels(len(groups), width)
    labels = sorted({cell.label for cell in cells})
    drawn: dict[str, Any] = {}
    for ((task, haystack, length), members), axis in zip(groups.items(), axes, strict=True):
        for (label,), some in grouped(members, lambda cell: (cell.label,)).items():
            i, points = labels.index(label), sorted(some, key=lambda cell: cell.peak_bytes)
            x, y = [cell.peak_bytes / 2**20 for cell in points], np.array([cell.mean for cell in points])
            whiskers = np.abs(np.array([cell.bounds for cell in points]).T - y)
            look = {name: choices[i % len(choices)] for name, choices in LOOKS.items()}
            drawn[label] = axis.errorbar(x, y, whiskers, label=label, capsize=2, elinewidth=0.8, **look)
        axis.set_title(f"{over(task, haystack)}, {size(length)} tokens")
        axis.set_xlabel("peak memory (MiB)" if on_gpu else "cache buffers (MiB)")
        axis.set_xlim(left=0)
        metric = members[0].metric
        axis.set_ylabel("nats a token (lower is better)" if metric in LIKELIHOOD else f"{metric} (0 to 1)")
        if metric not in LIKELIHOOD:
            axis.set_ylim(-0.03, 1.06)
    columns = max(1, int(figure.get_figwidth() * 13 // (max(map(len, drawn)) + 10)))
    figure.set_figheight(figure.get_figheight() + 0.17 * math.ceil(len(drawn) / columns))
    figure.legend([*drawn.values()], [*drawn], loc="outside lower center", ncols=columns, handlelength=3.6)
    return figure


def needle_grid(rows: Sequence[Row], width: float | None = None) -> Figure:
    """Mean score by the depth that was asked for, to a tenth, and by prompt length, a panel per task, policy and budget."""
    scored = [row for row in rows if row.depth is not None and row.score is not None]
    if not scored:
        raise ValueError("no row has a needle's depth and a score: run tasks=[grid] or another needle task")
    groups = grouped(scored, lambda row: (row.task, row.haystack, row.label != "full", row.label, row.budget))
    figure, axes = panels(len(groups), width)
    for ((task, haystack, _, label, budget), members), axis in zip(sorted(groups.items()), axes, strict=True):
        scores = {key: [row.score or 0.0 for row in some] for key, some in grouped(members, _place).items()}
        depths, lengths = (sorted(set(values)) for values in zip(*scores, strict=True))
        grid = np.full((len(depths), len(lengths)), np.nan)
        for (depth, length), values in scores.items():
            i, j = depths.index(depth), lengths.index(length)
            grid[i, j] = np.mean(values)
            shade = "white" if grid[i, j] < 0.5 else "black"
            axis.text(j, i, f"{grid[i, j]:.2g}", ha="center", va="center", color=shade, fontsize=7)
        # The brightness of this map rises: it reads in grey.
        image = axis.imshow(grid, aspect="auto", cmap="cividis", vmin=0, vmax=1)
        slots = f"budget {size(budget)}, " if budget else ""
        axis.set_title(f"{over(task, haystack)}\n{label}\n{slots}n={len(members)}")
        axis.set_xticks(range(len(lengths)), [*map(size, lengths)])
        axis.set_yticks(range(len(depths)), [f"{100 * depth:.0f}" for depth in depths])
        axis.set_xlabel("prompt length (tokens)")
        axis.set_ylabel("depth (% of the haystack)")
        axis.grid(False)
    figure.colorbar(image, ax=axes, label="mean score (blank: not run)", shrink=0.8, aspect=30)
    return figure


def _place(row: Row) -> tuple[float, int]:
    """Depth and length. The text's lines move a needle a little from where a task is asked to hide it; of 'questions' the row
    stores what was asked for."""
    name = row.task.rpartition(":")[2]
    depth = (row.depth or 0.0) if name == "questions" else asked_depth(name, row.sample)
    return round(depth, 1), row.length


FIGURES = {
    "score-memory": (score_memory, "Score against memory (Locret, figure 4), with 95% intervals"),
    "needle-grid": (needle_grid, "Score by the needle's depth and the prompt's length"),
}
"""Functions and captions; whoever reads them alone needs no matplotlib."""


def draw(name: str, rows: Sequence[Row], folder: Path, width: float | None = None) -> list[Path]:
    """Write a figure to ``NAME.pdf``, ``NAME.png`` and ``NAME.svg``; returns their paths. The same rows give the same bytes.

    Raises:
        ValueError: no data; says which is missing. OSError: has the file's name and the reason. ImportError: no
            matplotlib.
    """
    paths = [folder / f"{name}.{form}" for form in ("pdf", "png", "svg")]
    undated = {".pdf": {"CreationDate": None}, ".svg": {"Date": None}}
    with library("matplotlib").rc_context({**RC, "svg.hashsalt": name}):
        figure = FIGURES[name][0](rows, width)
        for path in paths:
            metadata = undated.get(path.suffix)
            write_beside(path, partial(figure.savefig, format=path.suffix[1:], dpi=150, metadata=metadata))
    return paths
