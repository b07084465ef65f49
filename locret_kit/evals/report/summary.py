"""Tables of a run: mean, standard error and number of examples, by task, length, policy and budget."""

from __future__ import annotations

import csv
import fcntl
import io
import math
import os
from collections import Counter, defaultdict
from collections.abc import Iterable
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from ...files import write_beside
from ..engine.rows import Row, label_of, read_rows

LIKELIHOOD = ("nll", "nll_prefill")
OTHERS = "† on other texts than most of its column"
PRECISION = "‡ in another precision than most of the table"
"""Marks: beside a cell the first character, under the table all of it."""


@dataclass(frozen=True)
class Cell:
    """Examples that differ in their number alone."""

    task: str
    haystack: str
    length: int
    policy: str
    heads: str
    budget: int
    metric: str
    n: int
    """Examples with a score."""
    samples: str
    """Their numbers, such as '0-3 7'."""
    mean: float | None
    """Of the metric; None without a score."""
    stderr: float | None
    """Standard error of the mean (sample deviation over root n); None below two scores."""
    errors: int
    """Examples that ended with an error; not in the mean."""
    tokens: float
    """Mean prompt tokens."""
    prefill_s: float
    """Mean seconds of prefill, shared beginnings in every example, see `Row.prefill_s`."""
    peak_bytes: int
    """Largest peak memory."""
    dtype: str
    """Of the backbone; several are joined by '+'."""

    @property
    def label(self) -> str:
        """The policy as tables name it."""
        return label_of(self.policy, self.heads)


def mean_and_stderr(values: list[float]) -> tuple[float | None, float | None]:
    """Mean and its standard error; exact sums, so that the order of rows does not matter."""
    n = len(values)
    if not n:
        return None, None
    mean = math.fsum(values) / n
    if n < 2:
        return mean, None
    return mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1) / n)


def summarize(rows: Iterable[Row]) -> list[Cell]:
    """One cell for each task, haystack, length, policy, heads and budget, in that order."""
    grouped: dict[tuple, list[Row]] = defaultdict(list)
    for row in rows:
        grouped[row.task, row.haystack, row.length, row.policy, row.heads, row.budget].append(row)
    cells = []
    for key, members in sorted(grouped.items(), key=lambda item: _order(item[0])):
        good = [row for row in members if row.score is not None]
        mean, stderr = mean_and_stderr([row.score for row in good if row.score is not None])
        costs = good or members
        task, haystack, length, policy, heads, budget = key
        cells.append(
            Cell(
                task, haystack, length, policy, heads, budget, good[0].metric if good else "-", len(good),
                ranges(row.sample for row in good), mean, stderr,
                errors=len(members) - len(good), tokens=math.fsum(row.tokens for row in costs) / len(costs),
                prefill_s=math.fsum(row.prefill_s for row in costs) / len(costs),
                peak_bytes=max(row.peak_bytes for row in costs),
                dtype="+".join(sorted({row.dtype for row in costs if row.dtype})),
            )
        )  # fmt: skip
    return cells


def ranges(numbers: Iterable[int]) -> str:
    """``0-3 7`` for 0, 1, 2, 3 and 7."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return " ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def usual_samples(cells: Iterable[Cell], length: int, budget: int) -> str:
    """The examples that most cells of a column have; of two sets as frequent the larger. `full` stands in every column of
    its length, and all others in its own (``budget=0``)."""
    counts = Counter(
        (cell.n, cell.samples)
        for cell in cells
        if cell.n and cell.length == length and (not budget or cell.budget in (0, budget))
    )
    return max(counts, key=lambda one: (counts[one], one), default=(0, ""))[1]


def usual_dtype(cells: Iterable[Cell]) -> str:
    """The precision that most examples of a table were answered in."""
    counts: Counter[str] = Counter()
    for cell in cells:
        counts[cell.dtype] += cell.n
    return max(counts, key=lambda one: (counts[one], one), default="")


def to_csv(cells: list[Cell]) -> str:
    """A header and one line a cell; numbers in full."""
    text = io.StringIO()
    writer = csv.DictWriter(text, [f.name for f in fields(Cell)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(cell) for cell in cells)
    return text.getvalue()


def overview(rows: Iterable[Row]) -> str:
    """One table of all tasks, or nothing where there is but one figure: a line a length, budget and policy, a column a task
    and figure; texts that were compared have both ROUGE-L and BLEU."""
    by_task: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        by_task[row.task, row.haystack].append(row)
    columns: dict[str, dict[tuple, Cell]] = {}
    for (task, haystack), members in by_task.items():
        for name in next((_figures(row) for row in members if row.score is not None), ["-"]):
            cells = summarize(_by_figure(row, name) for row in members)
            head = f"{_over(task, haystack)} ({'nll, lower is better' if name in LIKELIHOOD else name})"
            columns[head] = {(cell.length, cell.budget, cell.label): cell for cell in cells}
    if len(columns) < 2:
        return ""
    keys = sorted(
        {key for found in columns.values() for key in found}, key=lambda key: (*key[:2], _policy_order(key[2]))
    )
    lines = [f"| length | budget | policy | {' | '.join(columns)} |", "|---" * (3 + len(columns)) + "|"]
    for length, budget, label in keys:
        shown = " | ".join(
            show(
                found.get((length, budget, label)),
                usual_samples(found.values(), length, budget),
                usual_dtype(found.values()),
            )
            for found in columns.values()
        )
        lines.append(f"| {size(length)} | {budget or '-'} | {label} | {shown} |")
    return _with_legend("\n".join(["**All tasks** (mean ± standard error)", "", *lines]) + "\n")


def legend(shown: Iterable[str]) -> list[str]:
    """What the marks behind any of these figures mean."""
    marks = {letter for text in shown for letter in text.rpartition(")")[2]}
    return [mark for mark in (OTHERS, PRECISION) if mark[0] in marks]


def _with_legend(text: str) -> str:
    """A table with what its marks mean, where it has some."""
    return "\n".join([text, *(f"{mark}\n" for mark in legend(cell.strip() for cell in text.split("|")))])


def _figures(row: Row) -> list[str]:
    """A row's main figure, and where it has them the two by which texts are compared and the likelihood."""
    return list(dict.fromkeys([row.metric, *(name for name in ("rougeL", "bleu", "nll") if name in row.scores)]))


def _by_figure(row: Row, name: str) -> Row:
    """The row with another of its figures as its score."""
    if row.score is None or name == row.metric:
        return row
    return replace(row, score=row.scores.get(name), metric=name)


def _over(task: str, haystack: str) -> str:
    return task if haystack == "-" else f"{task}, haystack: {haystack}"


def to_markdown(cells: list[Cell]) -> str:
    """A table for each task and haystack: a line a policy, a column a length and budget."""
    tables: dict[tuple[str, str], list[Cell]] = defaultdict(list)
    for cell in cells:
        tables[cell.task, cell.haystack].append(cell)
    return "\n".join(table(name, haystack, members) for (name, haystack), members in tables.items())


def table(task: str, haystack: str, cells: list[Cell]) -> str:
    """Markdown of one task. `full` has no budget and stands in every column of its length."""
    columns = sorted({(cell.length, cell.budget) for cell in cells if cell.budget})
    columns = columns or sorted({(cell.length, 0) for cell in cells})
    columns += sorted((n, 0) for n in {c.length for c in cells} - {n for n, _ in columns})
    labels = sorted({cell.label for cell in cells}, key=_policy_order)
    found = {(cell.label, cell.length, cell.budget): cell for cell in cells}
    metric = next((cell.metric for cell in cells if cell.n), "-")
    head = " | ".join(f"{size(n)}, budget {b}" if b else size(n) for n, b in columns)
    lines = [
        f"**{_over(task, haystack)}** ({describe(metric)})",
        "",
        f"| policy | {head} |",
        "|---" * (len(columns) + 1) + "|",
    ]
    usual, dtype = {column: usual_samples(cells, *column) for column in columns}, usual_dtype(cells)
    for label in labels:
        figures = [show(found.get((label, n, b)) or found.get((label, n, 0)), usual[n, b], dtype) for n, b in columns]
        lines.append(f"| {label} | {' | '.join(figures)} |")
    return _with_legend("\n".join(lines) + "\n")


def show(cell: Cell | None, usual: str | None = None, dtype: str | None = None) -> str:
    """``0.50 ± 0.13 (n=16)``; errors are named. Other examples than the column's ``usual`` ones and another precision than the
    table's, where these are given, are marked."""
    if cell is None:
        return "-"
    failed = f", {cell.errors} failed" if cell.errors else ""
    if cell.mean is None:
        return f"- (n=0{failed})"
    spread = "" if cell.stderr is None else f" ± {cell.stderr:.2f}"
    mark = "" if usual in (None, cell.samples) else OTHERS[0]
    mark += "" if dtype in (None, cell.dtype) else PRECISION[0]
    return f"{cell.mean:.2f}{spread} (n={cell.n}{failed}){mark}"


def describe(metric: str) -> str:
    """What the figures are."""
    if metric in LIKELIHOOD:
        return f"{metric}: nats a token, lower is better; mean ± standard error"
    return f"{metric}; mean ± standard error"


def size(tokens: int) -> str:
    """``8K`` for 8192, ``1000`` for 1000."""
    return f"{tokens // 1024}K" if tokens % 1024 == 0 else str(tokens)


def write_summary(out: Path) -> str:
    """Write ``summary.md`` and ``summary.csv`` from all rows of the folder, one process at a time, so that the last one to
    finish writes of everything; the tables of ``summary.md``."""
    with _locked(out / ".summary.lock"):
        rows = read_rows(out)
        cells = summarize(rows)
        text = "\n".join(part for part in (overview(rows), to_markdown(cells)) if part)
        write_beside(out / "summary.csv", lambda path: path.write_text(to_csv(cells), encoding="utf-8"))
        write_beside(out / "summary.md", lambda path: path.write_text(text, encoding="utf-8"))
    return text


@contextmanager
def _locked(path: Path):
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _policy_order(label: str) -> tuple:
    return label != "full", not label.startswith("locret"), label


def _order(key: tuple) -> tuple:
    task, haystack, length, policy, heads, budget = key
    return task, haystack, length, _policy_order(policy), heads, budget
