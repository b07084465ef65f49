"""Tables: made once from rows, and rendered as Markdown, CSV, HTML (``report/page.html``) and in the card of published heads."""

from __future__ import annotations

import csv
import io
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, fields

from .cells import Cell

MARKS = {"†": "on other texts than most of its column", "‡": "in another precision than most of the table"}
"""Marks beside a figure, and their meaning."""
ESCAPES = str.maketrans({"|": "\\|", "&": "&amp;", "<": "&lt;", ">": "&gt;", "\n": " "})
"""Characters of a cell that Markdown would read as markup."""


@dataclass(frozen=True)
class Figure:
    """A number in a table, with what stands beside it."""

    value: float | None
    """None is a dash."""
    interval: str = ""
    """Its uncertainty, such as '± 0.13'."""
    n: int | None = None
    """Examples in it; None where the cell does not say."""
    errors: int = 0
    """Examples that ended with an error."""
    marks: str = ""
    """Letters of `MARKS`."""
    best: bool = False
    """It leads its column: bold on the page."""
    digits: int = 2

    @classmethod
    def of(cls, cell: Cell, marks: str = "") -> Figure:
        """The mean of a cell, with its standard error and its number of examples."""
        beside = "" if cell.stderr is None else f"± {cell.stderr:.2f}"
        return cls(cell.mean, beside, cell.n, cell.errors, marks if cell.n else "")

    @property
    def number(self) -> str:
        """The number alone, with its uncertainty."""
        value = "-" if self.value is None else f"{self.value:.{self.digits}f}"
        return f"{value} {self.interval}".rstrip()

    def __str__(self) -> str:
        """``0.50 ± 0.13 (n=16)``; errors are named, marks come last."""
        failed = f", {self.errors} failed" if self.errors else ""
        return self.number + ("" if self.n is None else f" (n={self.n}{failed})") + self.marks


@dataclass(frozen=True)
class Table:
    """A header and lines of as many cells, each a text or a figure."""

    head: Sequence[str]
    lines: Sequence[Sequence[str | Figure]]
    title: str = ""
    unit: str = ""
    """Unit of the cells."""
    reference: Collection[int] = ()
    """Lines that the others are held against: full attention."""

    @property
    def figures(self) -> list[Figure]:
        """Every figure, line by line."""
        return [cell for cells in self.lines for cell in cells if isinstance(cell, Figure)]

    @property
    def notes(self) -> list[str]:
        """Meaning of the marks beside figures."""
        return [f"{mark} {text}" for mark, text in MARKS.items() if any(mark in one.marks for one in self.figures)]

    def markdown(self) -> str:
        """The title, the table, and a paragraph for each note."""
        title = [f"**{escaped(self.title)}** ({self.unit})", ""] if self.title else []
        lines = [*title, line(self.head), "|---" * len(self.head) + "|", *map(line, self.lines)]
        return "\n".join(lines) + "\n" + "".join(f"\n{note}\n" for note in self.notes)

    def csv(self) -> str:
        """A header and the lines; of figures the number in full."""
        text = io.StringIO()
        lines = ([cell.value if isinstance(cell, Figure) else cell for cell in cells] for cells in self.lines)
        csv.writer(text, lineterminator="\n").writerows([self.head, *lines])
        return text.getvalue()


def line(cells: Iterable[str | Figure]) -> str:
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


def _whole(value: str | float | None, digits: int) -> str | Figure:
    return Figure(value, digits=digits) if value is None or isinstance(value, float) else str(value)
