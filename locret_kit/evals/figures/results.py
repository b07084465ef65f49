"""Figures of a run's rows: score against budget and length, the needle grid, and what it cost."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..cells import Cell, mean_and_stderr, size, summarize
from ..engine.result_rows import Row
from ..tasks.task import asked_depth
from .style import MAP, line, panels, score_axis, shared_legend, token_axis

DEPTHS = 10
"""Rows of a needle grid whose depths are all different."""


def score_budget(rows: Sequence[Row]) -> Figure:
    """Mean score against budget with its `whisker`, a panel per task and length; full attention is a level line."""
    cells, by_title = _scored(rows), dict[str, list[Cell]]()
    for place in dict.fromkeys((c.task, c.haystack, c.length) for c in cells if c.budget):
        members = [c for c in cells if (c.task, c.haystack, c.length) == place]
        by_title[f"{over(*place[:2])}, {size(place[2])} tokens"] = members
    if not by_title:
        raise ValueError("no row has a budget: run a policy other than full")
    return _score_panels("Score against budget", by_title, lambda c: c.budget, "budget (slots a head)")


def score_length(rows: Sequence[Row]) -> Figure:
    """Mean score against prompt length with its `whisker`, a panel per task and budget; full attention in each."""
    cells, by_title = _scored(rows), dict[str, list[Cell]]()
    places = dict.fromkeys((c.task, c.haystack, c.budget) for c in cells if c.budget)
    for task, haystack, budget in places or dict.fromkeys((c.task, c.haystack, 0) for c in cells):
        title = over(task, haystack) + (f", budget {size(budget)}" if budget else "")
        by_title[title] = [c for c in cells if (c.task, c.haystack) == (task, haystack) and c.budget in (0, budget)]
    return _score_panels("Score against prompt length", by_title, lambda c: c.length, "prompt length (tokens)")


def _score_panels(title: str, by_title: dict[str, list[Cell]], x: Callable[[Cell], float], unit: str) -> Figure:
    """A panel per title and a line per label; level where ``x`` is 0."""
    figure, axes = panels(len(by_title), title)
    labels = policy_labels([cell for cells in by_title.values() for cell in cells])
    for (name, cells), axis in zip(by_title.items(), axes, strict=True):
        for label in policy_labels(cells):
            mine, i = sorted((cell for cell in cells if cell.label == label), key=x), labels.index(label)
            means = [cell.mean or 0.0 for cell in mine]
            if x(mine[0]):
                whiskers = np.array([whisker(cell) for cell in mine]).T
                axis.errorbar([x(cell) for cell in mine], means, whiskers, label=label, capsize=2, **line(i))
            else:
                axis.axhline(means[0], label=label, **line(i, marker=False))
        low, high = min(cell.n for cell in cells), max(cell.n for cell in cells)
        axis.set_title(f"{name} (n={low})" if low == high else f"{name} (n={low} to {high})")
        score_axis(axis, cells[0].metric)
        token_axis(axis, [x(cell) for cell in cells if x(cell)], unit)
    shared_legend(figure)
    return figure


def whisker(cell: Cell) -> tuple[float, float]:
    """Lengths of a mean's error bar, down and up: to the ends of Wilson's 95% interval of a share, else the standard error."""
    if cell.mean is None or cell.low is None or cell.high is None:
        return (cell.stderr or 0.0,) * 2
    return max(0.0, cell.mean - cell.low), max(0.0, cell.high - cell.mean)


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


def cost(rows: Sequence[Row]) -> Figure:
    """Memory and tokens per second against prompt length, a line per policy and budget; whiskers are standard errors. The peak is
    drawn of GPUs alone: on a CPU it is the process's so far, and so tells the order of the runs."""
    timed = [row for row in rows if row.score is not None and row.prefill_s > 0]
    if not timed:
        raise ValueError("no row has the seconds that it took")
    lines: dict[tuple, list[Row]] = defaultdict(list)
    for row in timed:
        lines[row.budget != 0, row.label, row.budget].append(row)
    devices = ", ".join(sorted({f"{row.device or '?'} {row.dtype}".strip() for row in timed}))
    kinds: list[tuple[str, str, Callable[[Row], float | None]]] = [
        ("Peak memory", "peak memory (MiB)", lambda r: r.peak_bytes / 2**20 if "cuda" in r.device else None),
        ("Cache buffers", "buffers (MiB)", lambda r: r.cache_bytes / 2**20 if r.cache_bytes else None),
        ("Prefill", "prompt tokens per second", lambda r: r.tokens / r.prefill_s),
        ("Decoding", "new tokens per second", lambda r: r.new_tokens / r.decode_s if r.decode_s > 0 else None),
    ]
    kinds = [kind for kind in kinds if any(kind[2](row) is not None for row in timed)]
    figure, axes = panels(len(kinds), f"Cost against prompt length ({devices})", columns=2, width=4.2)
    for (title, unit, value), axis in zip(kinds, axes, strict=True):
        for i, ((_, label, budget), members) in enumerate(sorted(lines.items())):
            name = f"{label}, budget {size(budget)}" if budget else label
            _cost_line(axis, members, value, name, i)
        axis.set_title(title)
        axis.set_ylabel(unit)
        axis.set_ylim(0, 1.05 * axis.get_ylim()[1])
        token_axis(axis, [row.length for row in timed], "prompt length (tokens)")
    shared_legend(figure, 3)
    return figure


def _cost_line(axis: Axes, members: list[Row], value: Callable[[Row], float | None], name: str, i: int) -> None:
    by_length: dict[int, list[float]] = defaultdict(list)
    for row in members:
        if (figure := value(row)) is not None:
            by_length[row.length].append(figure)
    if by_length:
        x = sorted(by_length)
        means = [mean_and_stderr(by_length[n]) for n in x]
        axis.errorbar(x, [m or 0.0 for m, _ in means], [e or 0 for _, e in means], label=name, capsize=2, **line(i))


def _scored(rows: Sequence[Row]) -> list[Cell]:
    cells = [cell for cell in summarize(rows) if cell.n]
    if not cells:
        raise ValueError("no row has a score")
    return cells


def policy_labels(cells: list[Cell]) -> list[str]:
    """Labels in the order of tables, full attention first."""
    return list(dict.fromkeys(cell.label for cell in sorted(cells, key=lambda c: (c.label != "full", c.label))))


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
