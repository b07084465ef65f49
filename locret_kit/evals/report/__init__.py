"""Report of a run: tables by task, length, policy and budget, and self-contained HTML pages that need no network or
server. One page is the report, the other shades a text by its kept tokens.

The report has sortable tables, figures and settings. Templates escape all text and figures are images, so a run's
content cannot become markup or a script.
"""

from __future__ import annotations

import json
import math
import re
from base64 import b64encode
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
from jinja2 import Environment, PackageLoader

from ...files import locked, write_beside, write_text
from ..engine import SETTINGS, Row, read_config, read_rows
from ..figures import FIGURES, draw
from ..tables import LIKELIHOOD, Cell, Table, Value, cells_table, grouped, policy_order, size, summarize
from ..tasks import groups
from ..tasks.document_tasks import averages

UNIT = "mean ± standard error"
"""Unit of a table's figures."""
ENOUGH = 10
"""Minimum number of examples for a mean to be marked best in its column. With fewer, the order of policies is chance.
"""


def usual_samples(cells: Iterable[Cell], length: int, budget: float) -> str:
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


def overview(rows: Iterable[Row]) -> Table | None:
    """One table of all tasks, or nothing where there is but one figure: a line per length, budget and policy, a column per
    task and figure; texts that were compared have both ROUGE-L and BLEU."""
    columns: dict[str, list[Cell]] = {}
    for (task, haystack), members in grouped(rows, lambda row: (row.task, row.haystack)).items():
        for name in next((_score_names(row) for row in members if row.score is not None), ["-"]):
            head = f"{_over(task, haystack)} ({'nll, lower is better' if name in LIKELIHOOD else name})"
            columns[head] = summarize(_by_figure(row, name) for row in members)
    if len(columns) < 2:
        return None
    columns |= group_means(cell for cells in columns.values() for cell in cells if cell.metric not in LIKELIHOOD)
    blocks: dict[tuple[int, float], set[str]] = defaultdict(set)
    for cell in (cell for cells in columns.values() for cell in cells):
        blocks[cell.length, cell.budget].add(cell.label)
    lines: list[list[str | Value]] = []
    for (length, budget), names in sorted(blocks.items()):
        labels = sorted(names, key=policy_order)
        by_column = [column(cells, labels, length, budget) for cells in columns.values()]
        lines += [
            [size(length), str(budget or "-"), label, *figures]
            for label, *figures in zip(labels, *by_column, strict=True)
        ]
    full = [i for i, line in enumerate(lines) if line[2] == "full"]
    return Table(["length", "budget", "policy", *columns], lines, "All tasks", UNIT, full)


def group_means(cells: Iterable[Cell]) -> dict[str, list[Cell]]:
    """Mean columns: one per group of tasks that a policy has answered completely, and one per haystack if there are
    several. A column holds the unweighted mean of the tasks' means and its standard error; n counts the examples of all
    tasks."""
    at: dict[tuple[int, float, str], dict[tuple[str, str], Cell]] = defaultdict(dict)
    for cell in cells:
        if cell.mean is not None:  # a task's main figure comes first
            at[cell.length, cell.budget, cell.label].setdefault((cell.task, cell.haystack), cell)
    columns: dict[str, list[Cell]] = defaultdict(list)
    for group, names in {**averages(), "ruler": groups()["ruler"]}.items():
        texts = {text for known in at.values() for name, text in known if name in names} - {"-"} or {"-"}
        for text, known in product(sorted(texts), at.values()):
            # Of a task that makes its own text there is one cell for all haystacks.
            cells_there = [known.get((name, text)) or known.get((name, "-")) for name in names]
            if len(members := [cell for cell in cells_there if cell is not None]) == len(names):
                errors = [cell.stderr for cell in members if cell.stderr is not None]
                spread = math.hypot(*errors) / len(names) if len(errors) == len(names) else None
                columns[_over(f"mean of {group}", text if len(texts) > 1 else "-")].append(
                    replace(
                        members[0], task=group, metric="mean", n=sum(cell.n for cell in members),
                        samples="; ".join(cell.samples for cell in members), stderr=spread,
                        mean=math.fsum(cell.mean or 0.0 for cell in members) / len(names),
                        errors=sum(cell.errors for cell in members), low=None, high=None,
                    )
                )  # fmt: skip
    return dict(columns)


def _score_names(row: Row) -> list[str]:
    """Names of a row's values: the main score and, if present, F1 of words, the two text comparisons and the
    likelihood."""
    return list(dict.fromkeys([row.metric, *(name for name in ("f1", "rougeL", "bleu", "nll") if name in row.scores)]))


def _by_figure(row: Row, name: str) -> Row:
    """The row with another of its figures as its score."""
    if row.score is None or name == row.metric:
        return row
    return replace(row, score=row.scores.get(name), metric=name)


def _over(task: str, haystack: str) -> str:
    return task if haystack == "-" else f"{task}, haystack: {haystack}"


def score_tables(cells: Iterable[Cell]) -> list[Table]:
    """A table for each task and haystack: a line per policy, a column per length and budget."""
    return [score_table(members) for members in grouped(cells, lambda cell: (cell.task, cell.haystack)).values()]


def to_markdown(cells: Iterable[Cell]) -> str:
    """`score_tables`, in Markdown."""
    return "\n".join(table.markdown() for table in score_tables(cells))


def score_table(cells: Sequence[Cell]) -> Table:
    """The table of one task. `full` has no budget and stands in every column of its length."""
    columns = sorted({(cell.length, cell.budget) for cell in cells if cell.budget})
    columns = columns or sorted({(cell.length, 0) for cell in cells})
    columns += sorted((n, 0) for n in {c.length for c in cells} - {n for n, _ in columns})
    labels = sorted({cell.label for cell in cells}, key=policy_order)
    head = ["policy", *(f"{size(n)}, budget {b}" if b else size(n) for n, b in columns)]
    by_column = [column(cells, labels, *place) for place in columns]
    lines = [list(line) for line in zip(labels, *by_column, strict=True)]
    metric = next((cell.metric for cell in cells if cell.n), "-")
    unit = f"{metric}{': nats a token, lower is better' if metric in LIKELIHOOD else ''}; {UNIT}"
    full = [i for i, label in enumerate(labels) if label == "full"]
    return Table(head, lines, _over(cells[0].task, cells[0].haystack), unit, full)


def column(cells: Sequence[Cell], labels: Sequence[str], length: int, budget: float) -> list[str | Value]:
    """A figure for each label, marked where it differs from most of the cells, which are of one task. `full` has no budget."""
    at = {(cell.label, cell.length, cell.budget): cell for cell in cells}
    members = [at.get((label, length, budget)) or at.get((label, length, 0)) for label in labels]
    samples, dtype = usual_samples(cells, length, budget), usual_dtype(cells)
    best = leaders([cell if cell and cell.budget and cell.samples == samples else None for cell in members])
    figures: list[str | Value] = []
    for i, cell in enumerate(members):
        if cell is None:
            figures.append("-")
        else:
            marks = ("" if cell.samples == samples else "†") + ("" if cell.dtype == dtype else "‡")
            figures.append(replace(Value.of(cell, marks), best=i in best))
    return figures


def leaders(cells: Sequence[Cell | None]) -> list[int]:
    """Numbers of the cells with the best mean, to the digits shown, of `ENOUGH` examples. None where all of these are as good, or
    there is but one."""
    means = {
        i: round(cell.mean, 2) * (-1 if cell.metric in LIKELIHOOD else 1)
        for i, cell in enumerate(cells)
        if cell is not None and cell.mean is not None and cell.n >= ENOUGH
    }
    best = [i for i, mean in means.items() if mean == max(means.values())]
    return best if len(best) < len(means) else []


def write_summary(out: Path) -> str:
    """Write ``summary.md`` and ``summary.csv`` from all rows of the folder, one process at a time, so that the last one to
    finish writes of everything; the tables of ``summary.md``."""
    with locked(out / ".summary.lock", f"{out}: its summary is being written", wait=-1):
        rows = read_rows(out)
        text = every_table(rows)
        write_text(out / "summary.csv", cells_table(summarize(rows)).csv())
        write_text(out / "summary.md", text)
    return text


def every_table(rows: Sequence[Row]) -> str:
    """Markdown tables: one of all tasks if there are several, and one per task."""
    every = overview(rows)
    return "\n".join([*([every.markdown()] if every else []), to_markdown(summarize(rows))])


# ---- pages ------------------------------------------------------------------------------------------------------------


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


def number(cell: str | Value) -> str | float | None:
    """The number that sorts a cell; None sorts by text."""
    if isinstance(cell, Value):
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
