"""Figures of a run's rows: score against budget and length, the needle grid, and what it cost."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..engine.rows import Row
from ..report.summary import Cell, mean_and_stderr, size, summarize
from ..tasks.base import asked_depth
from .style import MAP, line, panels, score_axis, shared_legend, token_axis

DEPTHS = 10
"""Rows of a needle grid whose depths are all different."""


def score_budget(rows: Sequence[Row]) -> Figure:
    """Mean score against budget with its standard error, a panel a task and length; full attention is a level line."""
    cells = _scored(rows)
    titles = {
        (c.task, c.haystack, c.length): f"{_over(c.task, c.haystack)}, {size(c.length)} tokens"
        for c in cells
        if c.budget
    }
    return _lines(cells, titles, lambda c: (c.task, c.haystack, c.length), lambda c: c.budget, "budget (slots a head)")


def score_length(rows: Sequence[Row]) -> Figure:
    """Mean score against prompt length with its standard error, a panel a task and budget; full attention in each."""
    cells = _scored(rows)
    titles = {
        (c.task, c.haystack, c.budget): f"{_over(c.task, c.haystack)}, budget {size(c.budget)}"
        for c in cells
        if c.budget
    }
    titles = titles or {(c.task, c.haystack, 0): _over(c.task, c.haystack) for c in cells}
    budgets: dict[tuple, set[int]] = defaultdict(set)
    for task, haystack, budget in titles:
        budgets[task, haystack].add(budget)
    spread = [
        (c, (c.task, c.haystack, budget))
        for c in cells
        for budget in ({c.budget} if c.budget else budgets[c.task, c.haystack])
    ]
    figure, axes = panels(len(titles), "Score against prompt length")
    labels = _labels(cells)
    for (key, title), axis in zip(titles.items(), axes, strict=True):
        members = [cell for cell, where in spread if where == key]
        for label in _labels(members):
            _curve(axis, [(c.length, c) for c in members if c.label == label], label, labels.index(label))
        _finish(axis, title, members, [c.length for c in members], "prompt length (tokens)")
    shared_legend(figure)
    return figure


def needle_grid(rows: Sequence[Row]) -> Figure:
    """Mean score by the depth asked for and the prompt's length, a panel per task, policy and budget. Where the needle
    really stands differs a little from prompt to prompt, which would give every prompt a row of its own."""
    found = [
        replace(row, depth=asked_depth(row.task, row.sample))
        for row in rows
        if row.depth is not None and row.score is not None
    ]
    if not found:
        raise ValueError("no row has a needle's depth and a score: run tasks=[grid] or another needle task")
    groups: dict[tuple, list[Row]] = defaultdict(list)
    for row in found:
        groups[row.task, row.haystack, row.label, row.budget].append(row)
    lengths = sorted({row.length for row in found})
    depths = sorted({row.depth for row in found if row.depth is not None})
    edges = depths if len(depths) <= DEPTHS + 2 else list(np.arange(DEPTHS) / DEPTHS)
    figure, axes = panels(
        len(groups), "Needle in a haystack: score by depth and length", width=max(2.8, 0.6 * len(lengths) + 1.8)
    )
    for (key, members), axis in zip(sorted(groups.items(), key=lambda item: _grid_order(item[0])), axes, strict=True):
        grid, counts = _grid(members, lengths, np.array(edges))
        task, haystack, label, budget = key
        image = axis.imshow(grid, aspect="auto", cmap=MAP, vmin=0, vmax=1)
        for (i, j), value in np.ndenumerate(grid):
            if counts[i, j]:
                shade = "white" if value < 0.5 else "black"
                axis.text(j, i, f"{value:.2g}", ha="center", va="center", color=shade, fontsize=7)
        budget_text = f"budget {size(budget)}, " if budget else ""
        axis.set_title(f"{_over(task, haystack)}\n{label}\n{budget_text}n={len(members)}")
        axis.set_xticks(range(len(lengths)), [size(n) for n in lengths])
        axis.set_yticks(range(len(edges)), [f"{100 * depth:.0f}" for depth in edges])
        axis.set_xlabel("prompt length (tokens)")
        axis.set_ylabel("depth (% of the haystack)" if edges is depths else "depth from (% of the haystack)")
        axis.grid(False)
    figure.colorbar(image, ax=axes, label="mean score (blank: not run)", shrink=0.8, aspect=30)
    return figure


def cost(rows: Sequence[Row]) -> Figure:
    """Memory and tokens a second against prompt length, a line a policy and budget; whiskers are standard errors."""
    found = [row for row in rows if row.score is not None and row.prefill_s > 0]
    if not found:
        raise ValueError("no row has the seconds that it took")
    lines: dict[tuple, list[Row]] = defaultdict(list)
    for row in found:
        lines[row.budget != 0, row.label, row.budget].append(row)
    devices = ", ".join(sorted({f"{row.device or '?'} {row.dtype}".strip() for row in found}))
    peak = "peak memory (MiB)" + ("\nCPU: of the process so far" if any("cuda" not in r.device for r in found) else "")
    kinds: list[tuple[str, str, Callable[[Row], float | None]]] = [
        ("Peak memory", peak, lambda r: r.peak_bytes / 2**20 if r.peak_bytes else None),
        ("Cache buffers", "buffers (MiB)", lambda r: r.cache_bytes / 2**20 if r.cache_bytes else None),
        ("Prefill", "prompt tokens a second", lambda r: r.tokens / r.prefill_s),
        ("Decoding", "new tokens a second", lambda r: r.new_tokens / r.decode_s if r.decode_s > 0 else None),
    ]
    kinds = [kind for kind in kinds if any(kind[2](row) is not None for row in found)]
    figure, axes = panels(len(kinds), f"Cost against prompt length ({devices})", columns=2, width=4.2)
    for (title, unit, value), axis in zip(kinds, axes, strict=True):
        for i, ((_, label, budget), members) in enumerate(sorted(lines.items())):
            name = f"{label}, budget {size(budget)}" if budget else label
            _cost_line(axis, members, value, name, i)
        axis.set_title(title)
        axis.set_ylabel(unit)
        axis.set_ylim(0, 1.05 * axis.get_ylim()[1])
        token_axis(axis, [row.length for row in found], "prompt length (tokens)")
    shared_legend(figure, 3)
    return figure


def _cost_line(axis: Axes, members: list[Row], value: Callable[[Row], float | None], name: str, i: int) -> None:
    by_length: dict[int, list[float]] = defaultdict(list)
    for row in members:
        if (figure := value(row)) is not None:
            by_length[row.length].append(figure)
    if by_length:
        x = sorted(by_length)
        found = [mean_and_stderr(by_length[n]) for n in x]
        axis.errorbar(x, [m or 0.0 for m, _ in found], [e or 0 for _, e in found], label=name, capsize=2, **line(i))


def _lines(
    cells: list[Cell], titles: dict[tuple, str], key: Callable[[Cell], tuple], x: Callable[[Cell], int], unit: str
) -> Figure:
    if not titles:
        raise ValueError("no row has a budget: run a policy other than full")
    figure, axes = panels(len(titles), "Score against budget")
    labels = _labels(cells)
    for (where, title), axis in zip(titles.items(), axes, strict=True):
        members = [cell for cell in cells if key(cell) == where]
        for label in _labels(members):
            mine = [cell for cell in members if cell.label == label]
            if mine[0].budget:
                _curve(axis, [(x(cell), cell) for cell in mine], label, labels.index(label))
            else:
                style = line(labels.index(label), marker=False)
                axis.axhline(mine[0].mean or 0, label=label, **style)
        _finish(axis, title, members, [x(cell) for cell in members if cell.budget], unit)
    shared_legend(figure)
    return figure


def _curve(axis: Axes, points: list[tuple[int, Cell]], label: str, i: int) -> None:
    points = sorted(points, key=lambda point: point[0])
    x, y = [n for n, _ in points], [cell.mean or 0.0 for _, cell in points]
    axis.errorbar(x, y, [cell.stderr or 0 for _, cell in points], label=label, capsize=2, **line(i))


def _finish(axis: Axes, title: str, cells: list[Cell], values: list[int], unit: str) -> None:
    counts = sorted({cell.n for cell in cells})
    n = f"n={counts[0]}" if len(counts) == 1 else f"n={counts[0]} to {counts[-1]}"
    axis.set_title(f"{title} ({n})")
    score_axis(axis, cells[0].metric)
    token_axis(axis, values, unit)


def _scored(rows: Sequence[Row]) -> list[Cell]:
    cells = [cell for cell in summarize(rows) if cell.n]
    if not cells:
        raise ValueError("no row has a score")
    return cells


def _labels(cells: list[Cell]) -> list[str]:
    """Labels in the order of tables, full attention first."""
    return list(dict.fromkeys(cell.label for cell in sorted(cells, key=lambda c: (c.label != "full", c.label))))


def _over(task: str, haystack: str) -> str:
    return task if haystack == "-" else f"{task}, {haystack}"


def _grid_order(key: tuple) -> tuple[Any, ...]:
    task, haystack, label, budget = key
    return task, haystack, label != "full", label, budget


def _grid(rows: list[Row], lengths: list[int], starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean score and count ``[depths, lengths]``; a row belongs to the last of ``starts`` that its depth reaches."""
    total, count = np.zeros((len(starts), len(lengths))), np.zeros((len(starts), len(lengths)), dtype=int)
    for row in rows:
        at = max(0, int(np.searchsorted(starts, (row.depth or 0) + 1e-9, side="right")) - 1), lengths.index(row.length)
        total[at] += row.score or 0
        count[at] += 1
    return np.where(count > 0, total / np.maximum(count, 1), np.nan), count
