"""Two policies on the same prompts: the mean difference example by example. Its standard error is smaller than that of the
difference of two means wherever hard examples are hard for both."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from ...naming import nearest
from ..engine.result_rows import Row
from ..tables import LIKELIHOOD, Table, mean_and_stderr, size

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
    figure: str
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
    """Every label of the rows minus ``against``, one per cell; of the same budget, unless ``against`` has none.

    Args:
        against: a label as tables show it, such as 'locret (smollm2-135m-locret)' or 'full'.
        figure: one of `Row.scores`; the main one by default.

    Raises:
        ValueError: no such label or figure, or rows of one example whose prompts differ.
    """
    rows = [row for row in rows if row.score is not None]
    _require("against", against, "rows", {row.label for row in rows}, "Labels")
    if figure is not None:
        _require("figure", figure, "figure", {name for row in rows for name in _figures(row)}, "Figures")
    base = {_example(row, row.budget): row for row in rows if row.label == against}
    pairs: dict[Key, list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        other = base.get(_example(row, row.budget)) or base.get(_example(row, 0))
        name = figure or row.metric
        if row.label == against or other is None or not {name} <= _figures(row).keys() & _figures(other).keys():
            continue
        if row.prompt_hash != other.prompt_hash:
            raise ValueError(f"{row.task}, sample={row.sample}: {row.label} and {against} have read different prompts")
        key = (row.task, row.haystack, row.length, row.budget, row.label, name)
        pairs[key].append((_figures(row)[name], _figures(other)[name]))
    result = []
    for key, values in sorted(pairs.items()):
        mean, stderr = mean_and_stderr([mine - theirs for mine, theirs in values])
        theirs, _ = mean_and_stderr([theirs for _, theirs in values])
        result.append(Difference(*key, len(values), theirs or 0.0, mean or 0.0, stderr))
    return result


def _require(key: str, given: str, what: str, known: set[str], names: str) -> None:
    if given not in known:
        listed = sorted(known)
        raise ValueError(f"{key}={given!r}: no such {what}.{nearest(given, listed)} {names}: {', '.join(listed)}.")


def _figures(row: Row) -> dict[str, float]:
    """Every figure by name; the oldest rows have the main one alone."""
    return {row.metric: row.score or 0.0, **row.scores}


def _example(row: Row, budget: int | float) -> tuple[str, str, int, int, int | float]:
    return row.task, row.haystack, row.length, row.sample, budget


def to_markdown(pairs: Iterable[Difference], against: str) -> str:
    """One table, a line per cell."""
    lines = [
        [
            one.task if one.haystack == "-" else f"{one.task}, {one.haystack}",
            size(one.length), str(one.budget or "-"), one.label,
            f"{one.figure} (lower is better)" if one.figure in LIKELIHOOD else one.figure,
            str(one.n), f"{one.theirs:.3f}", str(one),
        ]
        for one in pairs
    ]  # fmt: skip
    head = ["task", "length", "budget", "policy", "figure", "n", against, "difference"]
    return Table(head, lines).markdown().rstrip("\n")
