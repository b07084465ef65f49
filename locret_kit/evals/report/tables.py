"""Tables of text cells: one matrix, as Markdown here and as HTML in ``page.html``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

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
