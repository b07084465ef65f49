"""Tables of the benchmark of heads: figures with their uncertainty, differences text by text, and the grid's worst cell."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from ...config.benchmark_runs import GRIDS, QUESTIONS
from ...files import write_text
from ...naming import blaming
from ..cells import LIKELIHOOD, Cell, size, summarize
from ..engine.result_rows import Row
from ..tables import Figure, Table, placed
from .paired import Difference, differences


@dataclass(frozen=True)
class BlockRows:
    """The rows of one run of the benchmark."""

    block: str
    variation: str
    rows: Sequence[Row]


def figure(cell: Cell | None) -> str | Figure:
    """Mean of a cell, with Wilson's interval where each score is right or wrong, else with its standard error."""
    if cell is None:
        return "-"
    if cell.low is None:
        return replace(Figure.of(cell, digits=3), n=None)
    return Figure(cell.mean, f"[{cell.low:.2f}, {cell.high:.2f}]", errors=cell.errors)


def by_document(rows: Iterable[Row]) -> list[Row]:
    """A row for each document instead of each question: answers about one document are not independent of each other. Documents
    of which a question is missing are left out."""
    documents: dict[tuple, list[Row]] = defaultdict(list)
    rest = []
    for row in rows:
        if row.task != "questions":
            rest.append(row)
        elif row.score is not None:
            key = (*row.key[:-1], row.sample // QUESTIONS)
            documents[key].append(row)
    for members in documents.values():
        if len(members) == QUESTIONS:
            members.sort(key=lambda row: row.sample)
            score = sum(row.score or 0.0 for row in members) / QUESTIONS
            hashes = " ".join(row.prompt_hash for row in members)
            number = members[0].sample // QUESTIONS
            rest.append(replace(members[0], sample=number, score=score, scores={}, metric="share", prompt_hash=hashes))
    return rest


def write_page(parts: Sequence[BlockRows], against: str, out: Path, write: Path | None = None) -> str:
    """Write the tables to ``out/benchmark.md``, and between the marks of another page; the tables. ``against`` is the label of
    the heads that the others are compared with.

    Raises:
        ValueError: that page has no marks.
    """
    text = tables(parts, against)
    write_text(out / "benchmark.md", text)
    if write is not None:
        with blaming(f"write={write}", ValueError):
            write_text(write, placed(write.read_text(encoding="utf-8"), "heads", text))
    return text


def tables(parts: Sequence[BlockRows], against: str) -> str:
    """Every table, in Markdown."""
    plain = [row for part in parts if part.block not in GRIDS for row in by_document(part.rows)]
    made = [*([scores(plain)] if plain else []), *compared(plain, against)]
    varied = [part for part in parts if part.block in GRIDS]
    return "\n".join([*(table.markdown() for table in made), *(table.markdown() for table in grids(varied))])


def scores(rows: Sequence[Row]) -> Table:
    """A line for each task, text, length and budget; a column for each policy. Full attention has no budget, and stands in
    every line of its length."""
    groups: dict[tuple[str, str, int, int | float], dict[str, Cell]] = defaultdict(dict)
    for cell in summarize(row for row in rows if row.score is not None):
        groups[cell.task, cell.haystack, cell.length, cell.budget][cell.label] = cell
    labels = list(dict.fromkeys(sorted({row.label for row in rows}, key=_order)))
    lines: list[list[str | Figure]] = []
    for (task, text, length, budget), mine in sorted(groups.items(), key=lambda item: (*item[0][:3], -item[0][3])):
        if budget or len(groups) == 1:
            every = {**groups.get((task, text, length, 0), {}), **mine}
            n, metric = max(cell.n for cell in every.values()), next(iter(mine.values())).metric
            named = f"{task} ({metric}{', lower is better' if metric in LIKELIHOOD else ''})"
            lines.append([named, text, size(length), str(budget), str(n), *(figure(every.get(one)) for one in labels)])
    unit = "shares with their 95% interval (Wilson), all else mean ± standard error"
    return Table(["task", "text", "tokens", "slots", "n", *labels], lines, "Scores", unit)


def compared(rows: Sequence[Row], against: str) -> list[Table]:
    """Other heads minus these, with the same policy, text by text, in every cell, and over all cells. Nothing without others."""
    policies = {row.policy for row in rows if row.label == against}
    ours = [row for row in rows if row.policy in policies]
    if len({row.label for row in ours}) < 2:
        return []
    pairs = differences(ours, against)
    lines = [
        [f"{one.task} ({one.figure})", one.haystack, size(one.length), str(one.budget), one.label, str(one.n), str(one)]
        for one in pairs
    ]  # fmt: skip
    each = Table(["task", "text", "tokens", "slots", "heads", "n", "difference"], lines, f"Minus {against}", "paired")
    whole = []
    for label in sorted({one.label for one in pairs}):
        mine = [one for one in pairs if one.label == label]
        shares = [one.mean for one in mine if one.figure not in LIKELIHOOD]
        worst = min(mine, key=_gain_in_errors)
        whole.append([
            label, str(len(mine)), f"{sum(shares) / len(shares):+.3f}" if shares else "-",
            f"{worst.task}, {worst.haystack}, {size(worst.length)}, {worst.budget} slots: {worst.mean:+.3f}",
            f"{_gain_in_errors(worst):+.1f}",
        ])  # fmt: skip
    head = ["heads", "cells", "mean over cells (likelihoods left out)", "worst cell", "its gain in standard errors"]
    return [each, Table(head, whole, f"All cells, minus {against}", "paired")]


def _gain_in_errors(one: Difference) -> float:
    """The gain in standard errors; without one (or with none at all) its sign alone, times infinity."""
    gain = -one.mean if one.figure in LIKELIHOOD else one.mean
    return gain / one.stderr if one.stderr else math.copysign(math.inf, gain) if gain else 0.0


def grids(parts: Sequence[BlockRows]) -> list[Table]:
    """A table for each text and length, a column for each policy: a line for each variation, their mean and the worst one."""
    groups: dict[tuple[str, int], dict[str, dict[str, Cell]]] = defaultdict(lambda: defaultdict(dict))
    for part in parts:
        for cell in summarize(row for row in part.rows if row.score is not None):
            groups[cell.haystack, cell.length][part.variation][cell.label] = cell
    made = []
    for (text, length), variations in sorted(groups.items()):
        labels = sorted({label for cells in variations.values() for label in cells}, key=_order)
        means = {
            label: {name: cells[label].mean or 0.0 for name, cells in variations.items() if label in cells}
            for label in labels
        }
        lines: list[list[str | Figure]] = [
            [name, *(figure(cells.get(label)) for label in labels)] for name, cells in variations.items()
        ]
        lines.append(["mean", *(f"{fmean(cells.values()):.2f}" for cells in means.values())])
        lines.append(["worst cell", *map(_worst, means.values())])
        n = max(cell.n for cells in variations.values() for cell in cells.values())
        title, unit = f"Grid, {text}, {size(length)}", f"{n} texts in each cell, the same in all"
        made.append(Table(["variation", *labels], lines, title, unit))
    return made


def _worst(cells: Mapping[str, float]) -> str:
    """The least mean, the first variation that has it, and how many others have it too."""
    least = min(cells.values())
    name, *others = (name for name, mean in cells.items() if mean == least)
    return f"{least:.2f}: {name}" + (f" and {len(others)} more" if others else "")


def _order(label: str) -> tuple[bool, bool, str]:
    return label != "full", "locret" not in label, label
