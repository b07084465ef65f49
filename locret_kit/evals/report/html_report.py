"""Pages of one HTML file that needs no network, no server and no other file: the report of a run, and a text shaded by what was
kept of it.

The report has tables that sort, figures and the run's settings. The templates escape all text and figures are images, so that
nothing of a run can become markup or a script.
"""

from __future__ import annotations

import json
import re
from base64 import b64encode
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
from jinja2 import Environment, PackageLoader

from ...files import write_beside
from ..engine.result_rows import SETTINGS, Row, read_config, read_rows
from ..figures import FIGURES, draw
from ..tables import Figure, Table, cells_table, summarize
from .summary import overview, score_tables


def environment() -> Environment:
    """The templates of this folder; they escape all text."""
    return Environment(loader=PackageLoader(__package__, ""), autoescape=True)


def kept_page(title: str, lead: str, texts: Sequence[str], positions: Sequence[Sequence[np.ndarray]], seen: int) -> str:
    """A page of one text, page by page, shaded by the layers and heads that hold each token; it needs no other file.

    Args:
        texts: of the tokens. positions: held by each layer and key/value head, ascending. seen: tokens that were read into the
            cache; those after them are read with each question.
    """
    gaps = [[np.diff(row, prepend=0).tolist() for row in heads] for heads in positions]
    data = json.dumps({"texts": list(texts), "kept": gaps, "seen": seen}, ensure_ascii=False, separators=(",", ":"))
    data = data.replace("<", "\\u003c")  # in a script element, which nothing in it can end
    return environment().get_template("kept.html").render(title=title, lead=lead, data=data)


PAGE = "report.html"


def write_page(out: Path) -> Path:
    """Draw the figures of the rows into ``out/figures`` and write ``out/report.html`` with them; the page's path.

    Raises:
        FileNotFoundError: the folder holds no rows. OSError: a file cannot be written.
    """
    text = page(out, read_rows(out)).encode("utf-8", "backslashreplace")  # half a surrogate pair in a name
    write_beside(out / PAGE, lambda path: path.write_bytes(text))
    return out / PAGE


def page(out: Path, rows: Sequence[Row]) -> str:
    """The page's HTML. Tables begin with the one of all tasks."""
    cells = summarize(rows)
    every = overview(rows)
    failed = sum(row.error is not None for row in rows)
    days = sorted({row.date[:10] for row in rows if row.date})
    lead = [f"{len(rows)} examples", f"{failed or 'none'} failed", f"model {_joined(row.model for row in rows)}"]
    if days:
        lead.append(f"measured {days[0]}" + (f" to {days[-1]}" if len(days) > 1 else ""))
    templates = environment()
    templates.filters["number"] = number
    return templates.get_template("page.html").render(
        title=out.resolve().name, lead=", ".join(lead), tables=[*([every] if every else []), *score_tables(cells)],
        figures=list(figures(out, rows)), cells=cells_table(cells), settings=settings(out, rows),
    )  # fmt: skip


def number(cell: str | Figure) -> str | float | None:
    """The number by which a cell sorts; None sorts it by its text."""
    if isinstance(cell, Figure):
        return cell.value
    return cell if re.fullmatch(r"-?\d+(\.\d+)?", cell) else None


def figures(out: Path, rows: Sequence[Row]) -> Iterator[dict[str, str]]:
    """Every figure that can be drawn of the rows as the address of an image, with its name and caption."""
    for name, says in FIGURES.items():
        with suppress(ValueError):  # nothing to draw: no needle, no memory
            _, svg = draw(name, rows, out / "figures")
            source = f"data:image/svg+xml;base64,{b64encode(svg.read_bytes()).decode()}"
            yield {"name": name, "caption": says[:1].upper() + says[1:], "source": source}


def settings(out: Path, rows: Sequence[Row]) -> list[Table]:
    """The rows' own settings, and the folder's configuration."""
    good = [row for row in rows if not row.error]
    values = {name: _joined(getattr(row, name) for row in good) for name in (*SETTINGS, "backend", "device")}
    for name in sorted({name for row in rows for name in row.versions}):
        values[f"version of {name}"] = _joined(row.versions.get(name, "?") for row in rows)
    tables = [Table(["of the rows", "value"], list(values.items()), "As the rows say")]
    if given := read_config(out):
        lines = [(key, json.dumps(value)) for key, value in given.items()]
        tables.append(Table(["setting", "value"], lines, "config.json"))
    return tables


def _joined(values: Iterable[object]) -> str:
    words = sorted({str(value) for value in values})
    return ", ".join(words[:8]) + (", ..." if len(words) > 8 else "") or "-"
