"""Tables for papers: LaTeX with the package booktabs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ..tables import Figure, Table

SIGNS = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}",
    "±": r"$\pm$", "†": r"$^\dagger$", "‡": r"$^\ddagger$", "\n": " ",
}  # fmt: skip
"""Characters that LaTeX would read as a command, or has no letter for."""
TEXT = ("length", "budget", "policy")
"""Columns that stand to the left."""


def to_latex(tables: Iterable[Table]) -> str:
    """Tables one after another; the package to load is named in a comment."""
    return "\n".join(["% \\usepackage{booktabs}", *map(typeset, tables)])


def typeset(table: Table) -> str:
    """One table: the best of each column in bold, rules as the table has them. Where all of its cells count as many examples,
    the caption says how many and the cells do not."""
    counts = {cell.n for cell in table.figures if cell.n is not None and not cell.errors}
    (same,) = counts if len(counts) == 1 else (None,)
    caption = f"{table.title}: {table.unit}{f'; n={same}' if same is not None else ''}.".removeprefix(": ")
    notes = "".join(f" {escaped(note)}." for note in table.notes)
    columns = "".join("l" if name in TEXT else "c" for name in table.head)
    body = []
    for i, cells in enumerate(table.lines):
        body += [r"\midrule"] if i in table.rules else []
        body.append(_line(_typeset_cell(cell, same is not None) for cell in cells))
    return "\n".join(
        [
            r"\begin{table}", r"\centering", rf"\caption{{{escaped(caption)}{notes}}}",
            rf"\begin{{tabular}}{{{columns}}}", r"\toprule", _line(map(escaped, table.head)), r"\midrule", *body,
            r"\bottomrule", r"\end{tabular}", r"\end{table}",
        ]
    ) + "\n"  # fmt: skip


def _typeset_cell(cell: str | Figure, without_count: bool) -> str:
    if isinstance(cell, str):
        return escaped(cell)
    text = escaped(str(replace(cell, n=None) if without_count and not cell.errors else cell))
    return f"\\textbf{{{text}}}" if cell.best else text


def escaped(text: str) -> str:
    """The text, as LaTeX sets it letter by letter."""
    return "".join(SIGNS.get(letter, letter) for letter in text)


def _line(cells: Iterable[str]) -> str:
    return f"{' & '.join(cells)} \\\\"
