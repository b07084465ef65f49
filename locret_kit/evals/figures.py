"""Figures of a run's rows: score against memory, and the needle grid. Their lines differ in dash and marker as in colour.

To add one, write a function that returns a matplotlib figure, and name it in `FIGURES` and in `draw`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..files import write_beside
from .engine import Row
from .metrics import library
from .tables import LIKELIHOOD, grouped, mean_and_stderr, over, size
from .tasks.task import asked_depth

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FIGURES = {
    "score-memory": "score against memory (Locret, figure 4)",
    "needle-grid": "score by the needle's depth and the prompt's length",
}
"""Captions; whoever reads them alone needs no matplotlib."""
COLORS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
DASHES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (6, 1.5)), (0, (3, 1, 1, 1, 1, 1)), (0, (1, 1)), (0, (8, 2, 2, 2)))
MARKERS = "osD^vPX*<>h"
LEGEND_ROW = 0.17
"""Height of a line of a legend, inches."""
MAP = "cividis"
"""Brightness rises along it, so it reads in grey."""
RC: Any = {
    "font.size": 9, "axes.titlesize": 9, "axes.grid": True, "grid.alpha": 0.3, "grid.linewidth": 0.5,
    "axes.spines.top": False, "axes.spines.right": False, "legend.fontsize": 8, "legend.frameon": False,
    "lines.linewidth": 1.4, "lines.markersize": 4.5, "text.parse_math": False, "figure.dpi": 100,
}  # fmt: skip


def line(i: int) -> dict[str, Any]:
    """Colour, dash and marker of the ``i``-th line; the first 56 differ in colour and dash, any 8 in dash alone."""
    looks = {"color": COLORS, "linestyle": DASHES, "marker": MARKERS}
    return {name: choices[i % len(choices)] for name, choices in looks.items()}


def panels(count: int, title: str, width: float = 3.6) -> tuple[Figure, list[Axes]]:
    """A titled figure of ``count`` panels, three a row; ``width`` of each in inches."""
    from matplotlib import rcParams
    from matplotlib.figure import Figure

    columns = min(3, count)
    rows = math.ceil(count / columns)
    figure = Figure(figsize=(max(4.2, columns * width), rows * 2.9 + 0.7), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    figure.suptitle(title, fontsize=rcParams["font.size"] + 2)
    for unused in axes[count:]:
        unused.remove()
    return figure, axes[:count]


def shared_legend(figure: Figure) -> None:
    """One legend below the panels, each name once; the figure grows by its height."""
    pairs = (zip(*axis.get_legend_handles_labels(), strict=True) for axis in figure.axes)
    handles: dict[str, Artist] = {name: handle for handle, name in chain.from_iterable(pairs)}
    longest = max(len(name) for name in handles)
    columns = max(1, min(4, len(handles), int(figure.get_figwidth() * 13 // (longest + 10))))
    figure.set_figheight(figure.get_figheight() + LEGEND_ROW * math.ceil(len(handles) / columns))
    figure.legend([*handles.values()], [*handles], loc="outside lower center", ncols=columns, handlelength=3.6)


DEPTHS = 10
"""Rows of a needle grid whose depths are all different."""


def score_memory(rows: Sequence[Row]) -> Figure:
    """Mean score against memory, a panel per task and length, a line per policy through its budgets.

    Memory is the peak on a GPU, and the cache's buffers on a CPU, where the peak is the process's.
    """
    on_gpu = all("cuda" in row.device for row in rows)
    used_MiB = {row.key: (row.peak_bytes if on_gpu else row.cache_bytes) / 2**20 for row in rows}
    rows = [row for row in rows if row.score is not None and used_MiB[row.key]]
    if not rows:
        raise ValueError("no row has both a score and its memory")
    groups = grouped(rows, lambda row: (row.task, row.haystack, row.length))
    figure, axes = panels(len(groups), "Score against memory")
    labels = sorted({row.label for row in rows})
    for ((task, haystack, length), members), axis in zip(groups.items(), axes, strict=True):
        points: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
        for (label, _), alike in grouped(members, lambda row: (row.label, row.budget)).items():
            mean, error = mean_and_stderr([row.score or 0.0 for row in alike])
            points[label].append((max(used_MiB[row.key] for row in alike), mean or 0.0, error or 0.0))
        for label, some in points.items():
            x, y, errors = zip(*sorted(some), strict=True)
            axis.errorbar(x, y, errors, label=label, capsize=2, **line(labels.index(label)))
        axis.set_title(f"{over(task, haystack)}, {size(length)} tokens")
        axis.set_xlabel("peak memory (MiB)" if on_gpu else "cache buffers (MiB)")
        axis.set_xlim(left=0)
        metric = members[0].metric
        axis.set_ylabel("nats a token (lower is better)" if metric in LIKELIHOOD else f"{metric} (0 to 1)")
        if metric not in LIKELIHOOD:
            axis.set_ylim(-0.03, 1.06)
    shared_legend(figure)
    return figure


def needle_grid(rows: Sequence[Row]) -> Figure:
    """Mean score by requested depth and prompt length, one panel per task, policy and budget. Actual depths differ
    slightly between prompts, which would give every prompt its own row."""
    scored = [
        replace(row, depth=_nominal_depth(row)) for row in rows if row.depth is not None and row.score is not None
    ]
    if not scored:
        raise ValueError("no row has a needle's depth and a score: run tasks=[grid] or another needle task")
    groups = grouped(scored, lambda row: (row.task, row.haystack, row.label, row.budget))
    max_lengths = max(len({row.length for row in members}) for members in groups.values())
    depths = sorted({row.depth for row in scored if row.depth is not None})
    edges = depths if len(depths) <= DEPTHS + 2 else list(np.arange(DEPTHS) / DEPTHS)
    figure, axes = panels(
        len(groups), "Needle in a haystack: score by depth and length", width=max(2.8, 0.6 * max_lengths + 1.8)
    )
    full_first = sorted(groups.items(), key=lambda item: (*item[0][:2], item[0][2] != "full", *item[0][2:]))
    for (key, members), axis in zip(full_first, axes, strict=True):
        lengths = sorted({row.length for row in members})  # its own: those of other panels would stand empty
        grid, counts = _grid(members, lengths, np.array(edges))
        task, haystack, label, budget = key
        image = axis.imshow(grid, aspect="auto", cmap=MAP, vmin=0, vmax=1)
        for (i, j), value in np.ndenumerate(grid):
            if counts[i, j]:
                shade = "white" if value < 0.5 else "black"
                axis.text(j, i, f"{value:.2g}", ha="center", va="center", color=shade, fontsize=7)
        budget_text = f"budget {size(budget)}, " if budget else ""
        axis.set_title(f"{over(task, haystack)}\n{label}\n{budget_text}n={len(members)}")
        axis.set_xticks(range(len(lengths)), [size(n) for n in lengths])
        axis.set_yticks(range(len(edges)), [f"{100 * depth:.0f}" for depth in edges])
        axis.set_xlabel("prompt length (tokens)")
        axis.set_ylabel("depth (% of the haystack)" if edges is depths else "depth from (% of the haystack)")
        axis.grid(False)
    figure.colorbar(image, ax=axes, label="mean score (blank: not run)", shrink=0.8, aspect=30)
    return figure


def _nominal_depth(row: Row) -> float | None:
    """The depth requested by the row's task. A text of 'questions' has four needles, and its rows store the depth."""
    name = row.task.rpartition(":")[2]
    return row.depth if name == "questions" else asked_depth(name, row.sample)


def _grid(rows: list[Row], lengths: list[int], starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean score and count ``[depths, lengths]``; a row belongs to the last of ``starts`` that its depth reaches."""
    total, count = np.zeros((len(starts), len(lengths))), np.zeros((len(starts), len(lengths)), dtype=int)
    for row in rows:
        at = max(0, int(np.searchsorted(starts, (row.depth or 0) + 1e-9, side="right")) - 1), lengths.index(row.length)
        total[at] += row.score or 0
        count[at] += 1
    return np.where(count > 0, total / np.maximum(count, 1), np.nan), count


def draw(name: str, rows: Sequence[Row], folder: Path) -> list[Path]:
    """Write a figure to ``NAME.png`` and ``NAME.svg``; returns their paths. The same rows give the same bytes.

    Raises:
        ValueError: no data; says which is missing. OSError: has the file's name and the reason. ImportError: no
            matplotlib.
    """
    rc_context = library("matplotlib").rc_context
    png, svg = folder / f"{name}.png", folder / f"{name}.svg"
    with rc_context({**RC, "svg.hashsalt": name}):
        figure = {"score-memory": score_memory, "needle-grid": needle_grid}[name](rows)
        write_beside(png, lambda beside: figure.savefig(beside, format="png", dpi=150))
        write_beside(svg, lambda beside: figure.savefig(beside, format="svg", metadata={"Date": None}))
    return [png, svg]
