"""Tables of text cells: one matrix, as Markdown here, as HTML in ``page.html``, and in `latex`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

Interval = Literal["stderr", "wilson"]
"""What stands beside a mean: its standard error, or of a share Wilson's 95% interval."""
ESCAPES = str.maketrans({"|": "\\|", "<": "&lt;", ">": "&gt;", "\n": " "})
"""Characters of a cell that Markdown would read as markup."""


@dataclass(frozen=True)
class Table:
    """A header and lines of as many cells."""

    head: Sequence[str]
    lines: Sequence[Sequence[str]]
    title: str = ""
    says: str = ""
    """Unit of the cells."""
    notes: Sequence[str] = ()
    """Meaning of the marks beside cells."""
    best: Collection[tuple[int, int]] = ()
    """Line and column of the cells that lead their column, where the table is drawn or typeset."""
    reference: Collection[int] = ()
    """Lines that the others are held against: full attention."""
    rules: Collection[int] = ()
    """Lines above which a thin rule stands."""

    def markdown(self) -> str:
        """The title, the table, and a paragraph for each note."""
        title = [f"**{escaped(self.title)}** ({self.says})", ""] if self.title else []
        lines = [*title, line(self.head), "|---" * len(self.head) + "|", *map(line, self.lines)]
        return "\n".join(lines) + "\n" + "".join(f"\n{note}\n" for note in self.notes)


def line(cells: Iterable[str]) -> str:
    """A line of a Markdown table."""
    return f"| {' | '.join(map(escaped, cells))} |"


def escaped(text: str) -> str:
    """The text of a cell, on one line."""
    return text.translate(ESCAPES)
