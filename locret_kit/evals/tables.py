"""Tables of a run, and paired comparisons.

A cell has the mean, standard error and number of examples that differ only in their number. Tables are rendered as
Markdown, CSV, HTML (``report/page.html``) and in the card of published heads. Two policies on the same prompts are
compared by the mean difference per example. Its standard error is smaller than that of the difference of two means
if hard examples are hard for both.
"""

from __future__ import annotations

import csv
import io
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import groupby
from typing import TypeVar

from ..naming import check_name
from .engine import Row, label_of

T = TypeVar("T")
LIKELIHOOD = ("nll", "nll_prefill")
"""Metrics where lower is better."""


@dataclass(frozen=True)
class Cell:
    """Examples that differ in their number alone."""

    task: str
    haystack: str
    length: int
    policy: str
    heads: str
    budget: int | float
    metric: str
    n: int
    """Examples with a score."""
    samples: str
    """Numbers of the scored examples, such as '0-3 7'."""
    mean: float | None
    """Mean of the metric; None without a score."""
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
    """Precision of the backbone; several are joined by '+'."""
    low: float | None = None
    """Lower end of Wilson's 95% interval of a share (every score is 0 or 1); None for other scores."""
    high: float | None = None
    """Upper end of the interval."""

    @property
    def label(self) -> str:
        """The policy as tables name it."""
        return label_of(self.policy, self.heads)


def mean_and_stderr(values: list[float]) -> tuple[float | None, float | None]:
    """Mean and its standard error; exact sums, so that the order of rows does not matter."""
    n = len(values)
    mean = math.fsum(values) / n if n else None
    if mean is None or n < 2:
        return mean, None
    return mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1) / n)


Z = statistics.NormalDist().inv_cdf(0.975)


def wilson(share: float, n: int) -> tuple[float, float]:
    """Wilson's 95% interval of a share that was found among ``n``; unlike ``share ± 2 stderr`` it has a width at 0 and at 1.
    Source: E. B. Wilson, Probable inference, the law of succession, and statistical inference, 1927."""
    middle, spread = share + Z * Z / (2 * n), Z * math.sqrt(share * (1 - share) / n + Z * Z / (4 * n * n))
    return max(0.0, (middle - spread) / (1 + Z * Z / n)), min(1.0, (middle + spread) / (1 + Z * Z / n))


def summarize(rows: Iterable[Row]) -> list[Cell]:
    """One cell for each task, haystack, length, policy, heads and budget, in that order."""
    groups = grouped(rows, lambda row: (row.task, row.haystack, row.length, row.policy, row.heads, row.budget))
    cells = []
    for key, members in sorted(groups.items(), key=lambda one: (*one[0][:3], policy_order(one[0][3]), *one[0][4:])):
        good = [row for row in members if row.score is not None]
        scores = [row.score for row in good if row.score is not None]
        mean, stderr = mean_and_stderr(scores)
        shares = bool(scores) and {0.0, 1.0}.issuperset(scores) and good[0].metric not in LIKELIHOOD
        low, high = wilson(mean or 0.0, len(scores)) if shares else (None, None)
        costs = good or members
        task, haystack, length, policy, heads, budget = key
        cells.append(
            Cell(
                task, haystack, length, policy, heads, budget, good[0].metric if good else "-", len(good),
                ranges(row.sample for row in good), mean, stderr,
                errors=len(members) - len(good), tokens=math.fsum(row.tokens for row in costs) / len(costs),
                prefill_s=math.fsum(row.prefill_s for row in costs) / len(costs),
                peak_bytes=max(row.peak_bytes for row in costs),
                dtype="+".join(sorted({row.dtype for row in costs if row.dtype})), low=low, high=high,
            )
        )  # fmt: skip
    return cells


def grouped(items: Iterable[T], key: Callable[[T], tuple]) -> dict[tuple, list[T]]:
    """The items by what ``key`` says of them, in their order."""
    groups: dict[tuple, list[T]] = defaultdict(list)
    for item in items:
        groups[key(item)].append(item)
    return groups


def ranges(numbers: Iterable[int]) -> str:
    """``0-3 7`` for 0, 1, 2, 3 and 7."""
    found = groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0])  # the same in a run
    runs = [[number for _, number in run] for _, run in found]
    return " ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def size(tokens: float) -> str:
    """``8K`` for 8192, ``1000`` for 1000, ``0.1`` for a share of the prompt."""
    return f"{tokens // 1024}K" if tokens % 1024 == 0 else str(tokens)


def over(task: str, haystack: str) -> str:
    """The task with its haystack, where it has one."""
    return task if haystack == "-" else f"{task}, {haystack}"


def policy_order(label: str) -> tuple:
    """Sorts full attention first, then `locret` in its forms."""
    return label != "full", not label.startswith("locret"), label


MARKS = {"†": "on other texts than most of its column", "‡": "in another precision than most of the table"}
"""Marks after a value, and their meaning."""
ESCAPES = str.maketrans({"|": "\\|", "&": "&amp;", "<": "&lt;", ">": "&gt;", "\n": " "})
"""Characters of a cell that Markdown would read as markup."""


@dataclass(frozen=True)
class Value:
    """A number in a table, with its interval, count and marks."""

    value: float | None
    """None is a dash."""
    interval: str = ""
    """Uncertainty of the value, such as '± 0.13'."""
    n: int | None = None
    """Examples in it; None where the cell does not say."""
    errors: int = 0
    """Examples that ended with an error."""
    marks: str = ""
    """Letters of `MARKS`."""
    best: bool = False
    """Whether the value leads its column: bold on the page."""
    digits: int = 2

    @classmethod
    def of(cls, cell: Cell, marks: str = "") -> Value:
        """The mean of a cell, with its standard error and its number of examples."""
        beside = "" if cell.stderr is None else f"± {cell.stderr:.2f}"
        return cls(cell.mean, beside, cell.n, cell.errors, marks if cell.n else "")

    def __str__(self) -> str:
        """``0.50 ± 0.13 (n=16)``; errors are named, marks come last."""
        number = "-" if self.value is None else f"{self.value:.{self.digits}f}"
        failed = f", {self.errors} failed" if self.errors else ""
        count = "" if self.n is None else f" (n={self.n}{failed})"
        return f"{number} {self.interval}".rstrip() + count + self.marks


@dataclass(frozen=True)
class Table:
    """A header, and lines with the same number of cells, each a text or a value."""

    head: Sequence[str]
    lines: Sequence[Sequence[str | Value]]
    title: str = ""
    unit: str = ""
    """Unit of the cells."""
    reference: Collection[int] = ()
    """Lines that the others are held against: full attention."""

    @property
    def notes(self) -> list[str]:
        """Meanings of the marks in the table."""
        marks = {mark for cells in self.lines for cell in cells if isinstance(cell, Value) for mark in cell.marks}
        return [f"{mark} {text}" for mark, text in MARKS.items() if mark in marks]

    def markdown(self) -> str:
        """The title, the table, and a paragraph for each note."""
        title = [f"**{escaped(self.title)}** ({self.unit})", ""] if self.title else []
        lines = [*title, line(self.head), "|---" * len(self.head) + "|", *map(line, self.lines)]
        return "\n".join(lines) + "\n" + "".join(f"\n{note}\n" for note in self.notes)

    def csv(self) -> str:
        """The table as CSV, with numbers in full precision."""
        text = io.StringIO()
        lines = ([cell.value if isinstance(cell, Value) else cell for cell in cells] for cells in self.lines)
        csv.writer(text, lineterminator="\n").writerows([self.head, *lines])
        return text.getvalue()


def line(cells: Iterable[str | Value]) -> str:
    """A line of a Markdown table."""
    return f"| {' | '.join(escaped(str(cell)) for cell in cells)} |"


def escaped(text: str) -> str:
    """The text of a cell, on one line."""
    return text.translate(ESCAPES)


def cells_table(cells: Iterable[Cell]) -> Table:
    """Every field of every cell: ``summary.csv``."""
    names = [item.name for item in fields(Cell)]
    lines = [[_whole(getattr(cell, name), 0 if name == "tokens" else 3) for name in names] for cell in cells]
    return Table(names, lines, "Every cell of summary.csv")


def _whole(value: str | float | None, digits: int) -> str | Value:
    return Value(value, digits=digits) if value is None or isinstance(value, float) else str(value)


# ---- two policies on the same prompts ---------------------------------------------------------------------------------


Key = tuple[str, str, int, int | float, str, str]


@dataclass(frozen=True)
class Difference:
    """A policy minus the one that it is compared with, over the examples that both have answered."""

    task: str
    haystack: str
    length: int
    budget: int | float
    """Slots of the policy; those of the other are the same, or it has none (`full`)."""
    label: str
    metric: str
    n: int
    theirs: float
    """Mean of the other policy."""
    mean: float
    """Mean of the differences."""
    stderr: float | None
    """Standard error of that mean; None below two examples."""

    def __str__(self) -> str:
        """The mean with its sign and its standard error."""
        return f"{self.mean:+.3f}" + ("" if self.stderr is None else f" ± {self.stderr:.3f}")


def differences(rows: Iterable[Row], against: str, figure: str | None = None) -> list[Difference]:
    """Differences of every label of the rows from ``against``, one per cell, at equal budgets unless ``against`` has
    none.

    Args:
        against: a label as in tables, such as 'locret (smollm2-135m-locret)' or 'full'.
        figure: one of `Row.scores`; by default the main score.

    Raises:
        ValueError: no such label or score, or different prompts for one example.
    """
    rows = [row for row in rows if row.score is not None]
    check_name("against", against, sorted({row.label for row in rows}))
    if figure is not None:
        check_name("figure", figure, sorted({name for row in rows for name in _scores(row)}))
    base = {_example(row, row.budget): row for row in rows if row.label == against}
    pairs: dict[Key, list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        other = base.get(_example(row, row.budget)) or base.get(_example(row, 0))
        name = figure or row.metric
        if row.label == against or other is None or not {name} <= _scores(row).keys() & _scores(other).keys():
            continue
        if row.prompt_hash != other.prompt_hash:
            raise ValueError(f"{row.task}, sample={row.sample}: {row.label} and {against} have read different prompts")
        key = (row.task, row.haystack, row.length, row.budget, row.label, name)
        pairs[key].append((_scores(row)[name], _scores(other)[name]))
    result = []
    for key, values in sorted(pairs.items()):
        mean, stderr = mean_and_stderr([mine - theirs for mine, theirs in values])
        theirs, _ = mean_and_stderr([theirs for _, theirs in values])
        result.append(Difference(*key, len(values), theirs or 0.0, mean or 0.0, stderr))
    return result


def _scores(row: Row) -> dict[str, float]:
    """Scores by name; the oldest rows have only the main one."""
    return {row.metric: row.score or 0.0, **row.scores}


def _example(row: Row, budget: int | float) -> tuple[str, str, int, int, int | float]:
    return row.task, row.haystack, row.length, row.sample, budget


def differences_markdown(pairs: Iterable[Difference], against: str) -> str:
    """One table, a line per cell."""
    lines = [
        [
            over(one.task, one.haystack),
            size(one.length), str(one.budget or "-"), one.label,
            f"{one.metric} (lower is better)" if one.metric in LIKELIHOOD else one.metric,
            str(one.n), f"{one.theirs:.3f}", str(one),
        ]
        for one in pairs
    ]  # fmt: skip
    head = ["task", "length", "budget", "policy", "figure", "n", against, "difference"]
    return Table(head, lines).markdown().rstrip("\n")
