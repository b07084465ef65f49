"""Tables of a run, and paired comparisons.

A cell has the mean, standard error and number of examples that differ only in their number. Tables are written as
Markdown, LaTeX and HTML (``report/page.html``), also into the card of published heads. Two policies on the same prompts are
compared by the mean difference per example. Its standard error is smaller than that of the difference of two means
if hard examples are hard for both.
"""

import csv
import io
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import groupby

from ..naming import check_name
from .engine import Row, grouped, label_of
from .metrics import library

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

    @property
    def bounds(self) -> tuple[float, float]:
        """Ends of the mean's 95% interval: Wilson's of a share, else 1.96 standard errors around it."""
        mean, spread = self.mean or 0.0, Z * (self.stderr or 0.0)
        return (mean - spread, mean + spread) if self.low is None else (self.low, self.high or 0.0)

    def __str__(self) -> str:
        """``0.50 [0.25, 0.75] (n=16)``, ``0.50 ± 0.13 (n=16, 1 failed)``, or a dash without a score."""
        words = ["-" if self.mean is None else f"{self.mean:.2f}"]
        if self.low is not None:
            words.append(f"[{self.low:.2f}, {self.high:.2f}]")
        elif self.stderr is not None:
            words.append(f"± {self.stderr:.2f}")
        failed = f", {self.errors} failed" if self.errors else ""
        return " ".join([*words, f"(n={self.n}{failed})"])


def mean_and_stderr(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Mean and its standard error; exact sums, so that the order of rows does not matter."""
    mean = statistics.fmean(values) if values else None
    return mean, statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


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
                errors=len(members) - len(good), tokens=statistics.fmean(row.tokens for row in costs),
                prefill_s=statistics.fmean(row.prefill_s for row in costs),
                peak_bytes=max(row.peak_bytes for row in costs),
                dtype="+".join(sorted({row.dtype for row in costs if row.dtype})), low=low, high=high,
            )
        )  # fmt: skip
    return cells


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
    return task if haystack == "-" else f"{task}, haystack: {haystack}"


def named(metric: str) -> str:
    """The metric, and whether lower is better."""
    return f"{metric}, lower is better" if metric in LIKELIHOOD else metric


def policy_order(label: str) -> tuple:
    """Sorts full attention first, then `locret` in its forms."""
    return label != "full", not label.startswith("locret"), label


MARKS = {"†": "on other texts than most of its column", "‡": "in another precision than most of the table"}
"""Marks after a value, and their meaning."""
ESCAPES = str.maketrans({"|": "\\|", "&": "&amp;", "<": "&lt;", ">": "&gt;", "\n": " "})
"""Characters of a cell that Markdown would read as markup."""


@dataclass(frozen=True)
class Table:
    """A header, and lines with the same number of cells."""

    head: Sequence[str]
    lines: Sequence[Sequence[str]]
    title: str = ""
    unit: str = ""
    """Unit of the cells."""
    notes: Sequence[str] = ()
    """Paragraphs below it."""

    def markdown(self) -> str:
        """The title, the table, and a paragraph for each note."""
        title = [f"**{escaped(self.title)}** ({self.unit})", ""] if self.title else []
        lines = [*title, line(self.head), "|---" * len(self.head) + "|", *map(line, self.lines)]
        return "\n".join(lines) + "\n" + "".join(f"\n{note}\n" for note in self.notes)

    def latex(self) -> str:
        """The table for LaTeX with the package booktabs, its title as a comment. Raises ImportError without pandas."""
        frame = library("pandas").DataFrame(self.lines, columns=self.head)
        comments = [f"% {' '.join(text.split())}\n" for text in (f"{self.title} ({self.unit})", *self.notes)]
        return "".join(comments) + frame.to_latex(index=False, escape=True)


def line(cells: Iterable[str]) -> str:
    """A line of a Markdown table."""
    return f"| {' | '.join(map(escaped, cells))} |"


def escaped(text: str) -> str:
    """The text of a cell, on one line."""
    return text.translate(ESCAPES)


def to_csv(cells: Iterable[Cell]) -> str:
    """Every field of every cell, with numbers in full precision: ``summary.csv``."""
    text = io.StringIO()
    writer = csv.DictWriter(text, [item.name for item in fields(Cell)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(vars(cell) for cell in cells)
    return text.getvalue()


@dataclass(frozen=True)
class Difference:
    """A policy minus the one that it is compared with, over the examples that both have answered."""

    cell: Cell
    """Its mean is that of the differences. The other policy has as many slots, or none (`full`)."""
    theirs: float
    """Mean of the other policy."""

    def __str__(self) -> str:
        """The mean with its sign and its standard error."""
        return f"{self.cell.mean:+.3f}" + ("" if self.cell.stderr is None else f" ± {self.cell.stderr:.3f}")


def differences(rows: Iterable[Row], against: str, figure: str | None = None) -> list[Difference]:
    """Differences of every label of the rows from ``against``, one per cell, at equal budgets unless ``against`` has
    none.

    Args:
        against: a label as in tables, such as 'locret (smollm2-135m-locret)' or 'full'.
        figure: one of `Row.scores`; by default the main score.

    Raises:
        ValueError: no such label or score, no example that both have answered, or different prompts for one.
    """
    rows = [row for row in rows if row.score is not None]
    check_name("against", against, sorted({row.label for row in rows}))
    if figure is not None:
        check_name("figure", figure, sorted({name for row in rows for name in _scores(row)}))
    base = {_example(row, row.budget): row for row in rows if row.label == against}
    mine, theirs = [], []
    for row in rows:
        other = base.get(_example(row, row.budget)) or base.get(_example(row, 0))
        name = figure or row.metric
        if row.label == against or other is None or not {name} <= _scores(row).keys() & _scores(other).keys():
            continue
        if row.prompt_hash != other.prompt_hash:
            raise ValueError(f"{row.task}, sample={row.sample}: {row.label} and {against} have read different prompts")
        score = _scores(other)[name]
        theirs.append(replace(row, metric=name, score=score))
        mine.append(replace(row, metric=name, score=_scores(row)[name] - score))
    if not mine:
        raise ValueError(f"{against=} has no example that another policy has answered at its budget")
    pairs = zip(summarize(mine), summarize(theirs), strict=True)
    return [Difference(cell, other.mean or 0.0) for cell, other in pairs]


def _scores(row: Row) -> dict[str, float]:
    """Scores by name; the oldest rows have only the main one."""
    return {row.metric: row.score or 0.0, **row.scores}


def _example(row: Row, budget: int | float) -> tuple[str, str, int, int, int | float]:
    return row.task, row.haystack, row.length, row.sample, budget


def differences_table(pairs: Iterable[Difference], against: str) -> Table:
    """A line per cell."""
    head = ["task", "length", "budget", "policy", "figure", "n", against, "difference"]
    lines = []
    for pair in pairs:
        cell = pair.cell
        names = [over(cell.task, cell.haystack), size(cell.length), str(cell.budget or "-"), cell.label]
        lines.append([*names, named(cell.metric), str(cell.n), f"{pair.theirs:.3f}", str(pair)])
    return Table(head, lines)
