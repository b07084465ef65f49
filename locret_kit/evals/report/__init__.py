"""Report of a run: tables by task, length, policy and budget; figures; one page of them with the settings; and a page that
shades a text by its kept tokens. The pages need no network or server.

Templates escape all text and figures are images, so a run's content cannot become markup or a script. Lines of figures differ in
dash and marker as in colour. To add a figure, write a function of rows and width that returns a matplotlib figure, and name it in
`FIGURES`.
"""

from __future__ import annotations

import json
import math
from base64 import b64encode
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jinja2 import Environment, PackageLoader

from ...files import locked, write_beside, write_text
from ..engine import SETTINGS, Row, grouped, read_rows
from ..metrics import library
from ..tables import LIKELIHOOD, MARKS, Cell, Table, named, over, policy_order, size, summarize, to_csv
from ..tasks import groups
from ..tasks.document_tasks import averages
from ..tasks.task import asked_depth

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

UNIT = "mean [95% interval] or ± standard error"
"""Unit of a table's figures: the interval, Wilson's, is of a share."""
FURTHER = ("f1", "rougeL", "bleu", "nll")
"""Figures beside a task's main one that the table of all tasks shows."""


def tables_of(rows: Sequence[Row]) -> list[Table]:
    """The table of all tasks, if there are several figures, and one for each task."""
    every = overview(rows)
    return [*([every] if every else []), *score_tables(summarize(rows))]


def overview(rows: Iterable[Row]) -> Table | None:
    """One table of all tasks, or nothing where there is but one figure: a line per length, budget and policy, a column per
    task and figure; texts that were compared have both ROUGE-L and BLEU."""
    columns: dict[str, list[Cell]] = {}
    main: list[Cell] = []
    for (task, haystack), members in grouped(rows, lambda row: (row.task, row.haystack)).items():
        metric, scores = next(((row.metric, row.scores) for row in members if row.score is not None), ("-", {}))
        main += (cells := summarize(members))
        columns[f"{over(task, haystack)} ({named(metric)})"] = cells
        for name in (name for name in FURTHER if name != metric and name in scores):
            others = (replace(row, score=row.scores.get(name), metric=name) for row in members)
            columns[f"{over(task, haystack)} ({named(name)})"] = summarize(others)
    if len(columns) < 2:
        return None
    columns |= group_means(main)
    blocks = grouped((cell for cells in columns.values() for cell in cells), lambda cell: (cell.length, cell.budget))
    lines = []
    for (length, budget), block in sorted(blocks.items()):
        labels = sorted({cell.label for cell in block}, key=policy_order)
        by_column = [column(cells, labels, length, budget) for cells in columns.values()]
        lines += [[size(length), str(budget or "-"), *line] for line in zip(labels, *by_column, strict=True)]
    return Table(["length", "budget", "policy", *columns], lines, "All tasks", UNIT, notes_of(lines))


def group_means(cells: Iterable[Cell]) -> dict[str, list[Cell]]:
    """Mean columns: one per group of tasks that a policy has answered completely, and one per haystack if there are
    several. A column holds the unweighted mean of the tasks' means and its standard error; n counts the examples of all
    tasks."""
    good = [cell for cell in cells if cell.mean is not None and cell.metric not in LIKELIHOOD]
    runs = grouped(good, lambda cell: (cell.length, cell.budget, cell.label)).values()
    columns: dict[str, list[Cell]] = {}
    for group, names in {**averages(), "ruler": groups()["ruler"]}.items():
        texts = sorted({cell.haystack for cell in good if cell.task in names} - {"-"}) or ["-"]
        for text, run in product(texts, runs):
            # Of a task that makes its own text there is one cell for all haystacks.
            members = [cell for cell in run if cell.task in names and cell.haystack in (text, "-")]
            if len(members) < len(names):
                continue
            errors = [cell.stderr for cell in members if cell.stderr is not None]
            mean = replace(
                members[0], task=group, metric="mean", n=sum(cell.n for cell in members),
                samples="; ".join(cell.samples for cell in members),
                mean=math.fsum(cell.mean or 0.0 for cell in members) / len(names),
                stderr=math.hypot(*errors) / len(names) if len(errors) == len(names) else None,
                errors=sum(cell.errors for cell in members), low=None, high=None,
            )  # fmt: skip
            columns.setdefault(over(f"mean of {group}", text if len(texts) > 1 else "-"), []).append(mean)
    return columns


def score_tables(cells: Iterable[Cell]) -> list[Table]:
    """A table for each task and haystack: a line per policy, a column per length and budget."""
    return [score_table(members) for members in grouped(cells, lambda cell: (cell.task, cell.haystack)).values()]


def score_table(cells: Sequence[Cell]) -> Table:
    """The table of one task. `full` has no budget and stands in every column of its length."""
    columns = sorted({(cell.length, cell.budget) for cell in cells if cell.budget})
    columns = columns or sorted({(cell.length, 0) for cell in cells})
    columns += sorted((n, 0) for n in {c.length for c in cells} - {n for n, _ in columns})
    labels = sorted({cell.label for cell in cells}, key=policy_order)
    head = ["policy", *(f"{size(n)}, budget {b}" if b else size(n) for n, b in columns)]
    lines = [*zip(labels, *(column(cells, labels, *place) for place in columns), strict=True)]
    metric = next((cell.metric for cell in cells if cell.n), "-")
    unit = f"{metric}{': nats a token, lower is better' if metric in LIKELIHOOD else ''}; {UNIT}"
    return Table(head, lines, over(cells[0].task, cells[0].haystack), unit, notes_of(lines))


def column(cells: Sequence[Cell], labels: Sequence[str], length: int, budget: float) -> list[str]:
    """The figure of each label, marked where it differs from most of the cells, which are of one task. `full` has no budget:
    it stands in every column of its length."""
    at = {(cell.label, cell.length, cell.budget): cell for cell in cells}
    beside = [cell for cell in cells if cell.length == length and (not budget or cell.budget in (0, budget))]
    counts = Counter((cell.n, cell.samples) for cell in beside if cell.n)
    _, samples = max(counts, key=lambda pair: (counts[pair], pair), default=(0, ""))
    other_text, other_dtype = MARKS
    dtype, figures = usual_dtype(cells), []
    for cell in (at.get((label, length, budget)) or at.get((label, length, 0)) for label in labels):
        marks = "" if cell is None or cell.samples == samples or not cell.n else other_text
        marks += "" if cell is None or cell.dtype == dtype or not cell.n else other_dtype
        figures.append("-" if cell is None else f"{cell}{marks}")
    return figures


def usual_dtype(cells: Iterable[Cell]) -> str:
    """The precision that most examples of a table were answered in."""
    counts: Counter[str] = Counter()
    for cell in cells:
        counts[cell.dtype] += cell.n
    return max(counts, key=lambda dtype: (counts[dtype], dtype), default="")


def notes_of(lines: Iterable[Sequence[str]]) -> list[str]:
    """Meanings of the marks behind the figures."""
    marks = {mark for cells in lines for cell in cells[1:] for mark in cell.rpartition(")")[2]}
    return [f"{mark} {text}" for mark, text in MARKS.items() if mark in marks]


def write_summary(out: Path) -> str:
    """Write ``summary.md`` and ``summary.csv`` from all rows of the folder, one process at a time, so that the last one to
    finish writes of everything; the tables of ``summary.md``."""
    with locked(out / ".summary.lock", f"{out}: its summary is being written", wait=-1):
        rows = read_rows(out)
        text = "\n".join(table.markdown() for table in tables_of(rows))
        write_text(out / "summary.csv", to_csv(summarize(rows)))
        write_text(out / "summary.md", text)
    return text


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


COLORS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
LOOKS: dict[str, Sequence[Any]] = {
    "color": COLORS, "marker": "osD^vPX*<>h",
    "linestyle": ("-", "--", "-.", ":", (0, (6, 1.5)), (0, (3, 1, 1, 1, 1, 1)), (0, (1, 1)), (0, (8, 2, 2, 2))),
}  # fmt: skip
"""Looks of lines in turn: the first 56 differ in colour and dash, any 8 in dash alone."""
RC: Any = {
    "font.size": 9, "axes.titlesize": 9, "axes.grid": True, "grid.alpha": 0.3, "grid.linewidth": 0.5,
    "axes.spines.top": False, "axes.spines.right": False, "legend.fontsize": 8, "legend.frameon": False,
    "lines.linewidth": 1.4, "lines.markersize": 4.5, "text.parse_math": False, "figure.dpi": 100, "pdf.fonttype": 42,
}  # fmt: skip


def panels(count: int, width: float | None) -> tuple[Figure, list[Axes]]:
    """A figure of ``count`` panels, at most three a row, ``width`` inches wide."""
    from matplotlib.figure import Figure

    columns = min(count, 3 if width is None else max(1, round(width / 3)))
    rows = math.ceil(count / columns)
    figure = Figure(figsize=(width or max(4.2, 3.6 * columns), 2.9 * rows), layout="constrained")
    axes = [*figure.subplots(rows, columns, squeeze=False).flat]
    for unused in axes[count:]:
        unused.remove()
    return figure, axes[:count]


def score_memory(rows: Sequence[Row], width: float | None = None) -> Figure:
    """Mean score with its 95% interval against memory, a panel per task and length, a line per policy through its budgets.

    Memory is the peak on a GPU, and the cache's buffers on a CPU, where the peak is the process's.
    """
    on_gpu = all("cuda" in row.device for row in rows if row.error is None)
    cells = summarize(row if on_gpu else replace(row, peak_bytes=row.cache_bytes) for row in rows)
    cells = [cell for cell in cells if cell.mean is not None and cell.peak_bytes]
    if not cells:
        raise ValueError("no row has both a score and its memory")
    parts = grouped(cells, lambda cell: (cell.task, cell.haystack, cell.length))
    figure, axes = panels(len(parts), width)
    labels = sorted({cell.label for cell in cells})
    drawn: dict[str, Any] = {}
    for ((task, haystack, length), members), axis in zip(parts.items(), axes, strict=True):
        for (label,), some in grouped(members, lambda cell: (cell.label,)).items():
            i, points = labels.index(label), sorted(some, key=lambda cell: cell.peak_bytes)
            x, y = [cell.peak_bytes / 2**20 for cell in points], np.array([cell.mean for cell in points])
            whiskers = np.abs(np.array([cell.bounds for cell in points]).T - y)
            look = {name: choices[i % len(choices)] for name, choices in LOOKS.items()}
            drawn[label] = axis.errorbar(x, y, whiskers, label=label, capsize=2, elinewidth=0.8, **look)
        axis.set_title(f"{over(task, haystack)}, {size(length)} tokens")
        axis.set_xlabel("peak memory (MiB)" if on_gpu else "cache buffers (MiB)")
        axis.set_xlim(left=0)
        metric = members[0].metric
        axis.set_ylabel("nats a token (lower is better)" if metric in LIKELIHOOD else f"{metric} (0 to 1)")
        if metric not in LIKELIHOOD:
            axis.set_ylim(-0.03, 1.06)
    columns = max(1, int(figure.get_figwidth() * 13 // (max(map(len, drawn)) + 10)))
    figure.set_figheight(figure.get_figheight() + 0.17 * math.ceil(len(drawn) / columns))
    figure.legend([*drawn.values()], [*drawn], loc="outside lower center", ncols=columns, handlelength=3.6)
    return figure


def needle_grid(rows: Sequence[Row], width: float | None = None) -> Figure:
    """Mean score by the depth that was asked for, to a tenth, and by prompt length, a panel per task, policy and budget."""
    scored = [row for row in rows if row.depth is not None and row.score is not None]
    if not scored:
        raise ValueError("no row has a needle's depth and a score: run tasks=[grid] or another needle task")
    parts = grouped(scored, lambda row: (row.task, row.haystack, row.label != "full", row.label, row.budget))
    figure, axes = panels(len(parts), width)
    for ((task, haystack, _, label, budget), members), axis in zip(sorted(parts.items()), axes, strict=True):
        scores = {key: [row.score or 0.0 for row in some] for key, some in grouped(members, _place).items()}
        depths, lengths = (sorted(set(values)) for values in zip(*scores, strict=True))
        grid = np.full((len(depths), len(lengths)), np.nan)
        for (depth, length), values in scores.items():
            i, j = depths.index(depth), lengths.index(length)
            grid[i, j] = np.mean(values)
            shade = "white" if grid[i, j] < 0.5 else "black"
            axis.text(j, i, f"{grid[i, j]:.2g}", ha="center", va="center", color=shade, fontsize=7)
        # The brightness of this map rises: it reads in grey.
        image = axis.imshow(grid, aspect="auto", cmap="cividis", vmin=0, vmax=1)
        slots = f"budget {size(budget)}, " if budget else ""
        axis.set_title(f"{over(task, haystack)}\n{label}\n{slots}n={len(members)}")
        axis.set_xticks(range(len(lengths)), [*map(size, lengths)])
        axis.set_yticks(range(len(depths)), [f"{100 * depth:.0f}" for depth in depths])
        axis.set_xlabel("prompt length (tokens)")
        axis.set_ylabel("depth (% of the haystack)")
        axis.grid(False)
    figure.colorbar(image, ax=axes, label="mean score (blank: not run)", shrink=0.8, aspect=30)
    return figure


def _place(row: Row) -> tuple[float, int]:
    """Depth and length. The text's lines move a needle a little from where a task is asked to hide it; of 'questions' the row
    stores what was asked for."""
    name = row.task.rpartition(":")[2]
    depth = (row.depth or 0.0) if name == "questions" else asked_depth(name, row.sample)
    return round(depth, 1), row.length


FIGURES = {
    "score-memory": (score_memory, "Score against memory (Locret, figure 4), with 95% intervals"),
    "needle-grid": (needle_grid, "Score by the needle's depth and the prompt's length"),
}
"""Functions and captions; whoever reads them alone needs no matplotlib."""


def draw(name: str, rows: Sequence[Row], folder: Path, width: float | None = None) -> list[Path]:
    """Write a figure to ``NAME.pdf``, ``NAME.png`` and ``NAME.svg``; returns their paths. The same rows give the same bytes.

    Raises:
        ValueError: no data; says which is missing. OSError: has the file's name and the reason. ImportError: no
            matplotlib.
    """
    paths = [folder / f"{name}.{form}" for form in ("pdf", "png", "svg")]
    undated = {".pdf": {"CreationDate": None}, ".svg": {"Date": None}}
    with library("matplotlib").rc_context({**RC, "svg.hashsalt": name}):
        figure = FIGURES[name][0](rows, width)
        for path in paths:
            metadata = undated.get(path.suffix)
            write_beside(path, partial(figure.savefig, format=path.suffix[1:], dpi=150, metadata=metadata))
    return paths


PAGE = "report.html"


def write_page(out: Path) -> Path:
    """Draw the figures of the rows into ``out/figures`` and write ``out/report.html`` with them; the page's path.

    Raises:
        FileNotFoundError: the folder holds no rows. OSError: a file cannot be written.
    """
    rows = read_rows(out)
    failed = sum(row.error is not None for row in rows)
    html = environment().get_template("page.html").render(
        title=out.resolve().name, lead=f"{len(rows)} examples, {failed or 'none'} failed; rows.*.jsonl has their answers",
        tables=[*tables_of(rows), settings(rows)], figures=[*figures(out, rows)],
    )  # fmt: skip
    text = html.encode("utf-8", "backslashreplace")  # half a surrogate pair in a name
    write_beside(out / PAGE, lambda path: path.write_bytes(text))
    return out / PAGE


def figures(out: Path, rows: Sequence[Row]) -> Iterator[tuple[str, str]]:
    """Caption and address, as an image, of every figure that can be drawn of the rows."""
    for name, (_, caption) in FIGURES.items():
        with suppress(ValueError):  # nothing to draw: no needle, no memory
            svg = draw(name, rows, out / "figures")[-1]
            yield caption, f"data:image/svg+xml;base64,{b64encode(svg.read_bytes()).decode()}"


def settings(rows: Sequence[Row]) -> Table:
    """Settings of a run, as its rows name them."""
    good = [row for row in rows if not row.error]
    every = [{**vars(row), "date": row.date[:10], **row.versions} for row in good]
    names = dict.fromkeys([*SETTINGS, "backend", "device", "date", *(name for row in good for name in row.versions)])
    values = {name: sorted({str(one.get(name, "?")) for one in every}) for name in names}
    return Table(["setting", "value"], [[name, ", ".join(some[:8])] for name, some in values.items()], "Settings")
