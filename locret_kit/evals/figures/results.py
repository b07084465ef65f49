"""Figures of a run's rows: score against memory, and the needle grid."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from matplotlib.figure import Figure

from ..cells import mean_and_stderr, size
from ..engine.result_rows import Row
from ..tasks.task import asked_depth
from .style import MAP, line, panels, score_axis, shared_legend

DEPTHS = 10
"""Rows of a needle grid whose depths are all different."""


def score_memory(rows: Sequence[Row]) -> Figure:
    """Mean score against memory, a panel per task and length, a line per policy through its budgets: of the peak on a GPU, of
    the cache's buffers on a CPU, where the peak is the process's."""
    on_gpu = all("cuda" in row.device for row in rows)
    groups: dict[tuple, dict[str, dict[float, list[Row]]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    for row in rows:
        if row.score is not None and (row.peak_bytes if on_gpu else row.cache_bytes):
            groups[row.task, row.haystack, row.length][row.label][row.budget].append(row)
    if not groups:
        raise ValueError("no row has a score and the memory that it took")
    figure, axes = panels(len(groups), "Score against memory")
    labels = sorted({label for lines in groups.values() for label in lines})
    for ((task, haystack, length), lines), axis in zip(groups.items(), axes, strict=True):
        for label, budgets in lines.items():
            used = [max(r.peak_bytes if on_gpu else r.cache_bytes for r in members) for members in budgets.values()]
            means = [mean_and_stderr([row.score or 0.0 for row in members]) for members in budgets.values()]
            x, y, error = zip(
                *sorted((bytes_ / 2**20, mean or 0.0, e or 0.0) for bytes_, (mean, e) in zip(used, means, strict=True)),
                strict=True,
            )
            axis.errorbar(x, y, error, label=label, capsize=2, **line(labels.index(label)))
        axis.set_title(f"{over(task, haystack)}, {size(length)} tokens")
        axis.set_xlabel("peak memory (MiB)" if on_gpu else "cache buffers (MiB)")
        axis.set_xlim(left=0)
        score_axis(
            axis, next(row.metric for lines_ in lines.values() for members in lines_.values() for row in members)
        )
    shared_legend(figure)
    return figure


def needle_grid(rows: Sequence[Row]) -> Figure:
    """Mean score by the depth asked for and the prompt's length, a panel per task, policy and budget. Where the needle
    really stands differs a little from prompt to prompt, which would give every prompt a row of its own."""
    scored = [
        replace(row, depth=_nominal_depth(row)) for row in rows if row.depth is not None and row.score is not None
    ]
    if not scored:
        raise ValueError("no row has a needle's depth and a score: run tasks=[grid] or another needle task")
    groups: dict[tuple, list[Row]] = defaultdict(list)
    for row in scored:
        groups[row.task, row.haystack, row.label, row.budget].append(row)
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


def over(task: str, haystack: str) -> str:
    return task if haystack == "-" else f"{task}, {haystack}"


def _nominal_depth(row: Row) -> float | None:
    """The depth that the row's task asked for; four needles stand in each text of 'questions', whose rows have it already."""
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
