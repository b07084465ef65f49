"""The report: one HTML file of a run that needs no network, no server and no other file.

Tables that sort, figures as inline SVG, the run's settings, and every example with its output; where the run stored what
was kept (``keep=N``), the prompt with the share of heads that hold each token. All text of rows goes through JSON and
`textContent`, so that no output can become markup.
"""

from __future__ import annotations

import html
import json
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...files import write_beside
from ...naming import first_line
from ..engine.rows import Row, read_rows
from ..figures import FIGURES, draw
from .kept import shares, token_texts, tokenizer_of
from .summary import Cell, describe, legend, show, size, summarize, usual_dtype, usual_samples

TEMPLATE = Path(__file__).with_name("page.html")
PAGE = "report.html"
STEPS = 9
"""Kept shares are stored as digits from 0 to this."""


def write_page(out: Path) -> Path:
    """Draw the figures of the rows into ``out/figures`` and write ``out/report.html`` with them and any other figure that
    lies there; the page's path.

    Raises:
        FileNotFoundError: the folder holds no rows. OSError: a file cannot be written.
    """
    out = Path(out)
    rows = read_rows(out)
    draw_rows(out, rows)
    text = page(out, rows)
    data = text.encode("utf-8", "backslashreplace")  # half a surrogate pair stands in the examples' JSON alone
    write_beside(out / PAGE, lambda path: path.write_bytes(data))
    return out / PAGE


def draw_rows(out: Path, rows: list[Row]) -> None:
    """Every figure that the rows give; those that they do not give are removed."""
    for name, kind in FIGURES.items():
        if kind.source == "rows":
            try:
                draw(name, rows, out / "figures")
            except ValueError:  # nothing to draw: no needle, no budget, no score
                for path in (out / "figures").glob(f"{name}.*"):
                    path.unlink()


def page(out: Path, rows: list[Row]) -> str:
    """The page's HTML; figures are read from ``out/figures``."""
    cells = summarize(rows)
    failed = sum(row.error is not None for row in rows)
    days = sorted({row.date[:10] for row in rows if row.date})
    lead = [
        f"{len(rows)} examples", f"{failed} failed" if failed else "none failed", f"model {_joined(r.model for r in rows)}",
        *([f"measured {days[0]}" + (f" to {days[-1]}" if len(days) > 1 else "")] if days else []),
    ]  # fmt: skip
    parts = {
        "TITLE": html.escape(out.resolve().name),
        "LEAD": html.escape(", ".join(lead)),
        "TABLES": "\n".join(score_tables(cells)),
        "CELLS": cells_table(cells),
        "FIGURES": figures(out),
        "SETTINGS": settings(out, rows),
        "DATA": data(out, rows),
    }
    return re.sub(r"\{\{([A-Z]+)\}\}", lambda match: parts[match[1]], TEMPLATE.read_text(encoding="utf-8"))


# ---- tables ----------------------------------------------------------------------------------------------------------


def score_tables(cells: Sequence[Cell]) -> list[str]:
    """A table for each task and haystack: a line a policy, a column a length and budget."""
    groups: dict[tuple[str, str], list[Cell]] = defaultdict(list)
    for cell in cells:
        groups[cell.task, cell.haystack].append(cell)
    out = []
    for (task, haystack), members in groups.items():
        columns = sorted({(c.length, c.budget) for c in members}, key=lambda c: (c[0], c[1] == 0, c[1]))
        found = {(c.label, c.length, c.budget): c for c in members}
        head = ["policy", *(f"{size(n)}, {f'budget {b}' if b else 'full'}" for n, b in columns)]
        usual, dtype = {column: usual_samples(members, *column) for column in columns}, usual_dtype(members)
        lines = [
            [(label, None), *(_score(found.get((label, n, b)), usual[n, b], dtype) for n, b in columns)]
            for label in dict.fromkeys(c.label for c in members)
        ]
        metric = next((c.metric for c in members if c.n), "-")
        over = "" if haystack == "-" else f", haystack: {haystack}"
        says = "; ".join([describe(metric), *legend(text for line in lines for text, _ in line[1:])])
        out.append(table(head, lines, f"{task}{over} ({says})"))
    return out


def cells_table(cells: Sequence[Cell]) -> str:
    """Every cell of the summary."""
    head = [
        "task", "haystack", "length", "policy", "budget", "metric", "mean", "standard error", "n", "failed", "tokens",
        "prefill (s)", "peak (MiB)", "precision",
    ]  # fmt: skip
    lines = [
        [
            (c.task, None), (c.haystack, None), _number(c.length), (c.label, None), _number(c.budget or None),
            (c.metric, None), _number(c.mean, 3), _number(c.stderr, 3), _number(c.n), _number(c.errors),
            _number(c.tokens, 0), _number(c.prefill_s, 2), _number(c.peak_bytes / 2**20, 0), (c.dtype, None),
        ]
        for c in cells
    ]  # fmt: skip
    return table(head, lines, "Every cell of summary.csv")


Field = tuple[str, "float | None"]
"""Text, and the number by which it sorts (None: by its text)."""


def table(head: Sequence[str], lines: Sequence[Sequence[Field]], caption: str) -> str:
    """A table whose columns sort at a click."""
    titles = "".join(f'<th scope="col"><button type="button">{html.escape(name)}</button></th>' for name in head)
    body = "\n".join("<tr>" + "".join(_field(*field) for field in line) + "</tr>" for line in lines)
    return (
        f'<div class="wide"><table class="sortable"><caption>{html.escape(caption)}</caption>'
        f"<thead><tr>{titles}</tr></thead>\n<tbody>{body}</tbody></table></div>"
    )


def _field(text: str, number: float | None) -> str:
    value = "" if number is None else f' class="n" data-value="{number!r}"'
    return f"<td{value}>{html.escape(text)}</td>"


def _score(cell: Cell | None, usual: str, dtype: str) -> Field:
    return show(cell, usual, dtype), None if cell is None else cell.mean


def _number(value: float | None, digits: int = 0) -> Field:
    return ("-", None) if value is None else (f"{value:.{digits}f}", float(value))


# ---- figures and settings --------------------------------------------------------------------------------------------


def figures(out: Path) -> str:
    """Every SVG of ``out/figures``, inline, in the registry's order."""
    order = {name: i for i, name in enumerate(FIGURES)}
    files = sorted((out / "figures").glob("*.svg"), key=lambda path: (order.get(path.stem, len(order)), path.stem))
    return "\n".join(_inline(path) for path in files) or "<p>None was drawn.</p>"


def _inline(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    svg = text[text.index("<svg") :]
    says = FIGURES[path.stem].says if path.stem in FIGURES else path.stem
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    # Ids of one figure must not be those of another: every id and every reference gets the figure's name in front.
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{path.stem}-", svg)
    caption = html.escape(says[:1].upper() + says[1:])
    svg = svg.replace("<svg", f'<svg role="img" aria-label="{caption}"', 1)
    return f'<figure id="{html.escape(path.stem)}"><div class="wide">{svg}</div><figcaption>{caption}</figcaption></figure>'


def settings(out: Path, rows: Sequence[Row]) -> str:
    """The folder's configuration, and what the rows say of themselves."""
    path = out / "config.json"
    given: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    names = (
        "model",
        "adapter",
        "heads_hash",
        "backend",
        "device",
        "dtype",
        "positions",
        "chunk",
        "stabilizers",
        "local_len",
        "one_shot",
        "decode_every",
        "kv_bits",
        "seed",
    )
    found = {name: _joined(getattr(row, name) for row in rows if not row.error) for name in names}
    versions = {key for row in rows for key in row.versions}
    found |= {f"version of {name}": _joined(row.versions.get(name, "?") for row in rows) for name in sorted(versions)}
    tables = [table(["of the rows", "value"], [[(k, None), (v, None)] for k, v in found.items()], "As the rows say")]
    if given:
        lines: list[list[Field]] = [[(key, None), (json.dumps(value), None)] for key, value in given.items()]
        tables.append(table(["setting", "value"], lines, "config.json"))
    return "\n".join(tables)


def _joined(values: Any) -> str:
    found = sorted({str(value) for value in values})
    return ", ".join(found[:8]) + (", ..." if len(found) > 8 else "") or "-"


# ---- examples --------------------------------------------------------------------------------------------------------


def data(out: Path, rows: Sequence[Row]) -> str:
    """JSON for the page's script: the examples, and the token texts of the prompts of which something is known."""
    prompts: dict[str, list[str]] = {}
    examples = []
    for row in rows:
        example: dict[str, Any] = {
            name: getattr(row, name)
            for name in (
                "task", "haystack", "length", "budget", "sample", "score", "metric", "scores", "output", "depth",
                "tokens", "new_tokens", "cut", "prefix_shared", "prefill_s", "decode_s", "peak_bytes", "cache_bytes",
                "prompt_hash", "seed", "date", "error",
            )
        }  # fmt: skip
        example |= {
            "policy": row.label,
            "answer": row.answer if isinstance(row.answer, str) else json.dumps(row.answer),
        }
        if row.kept is not None:
            example |= _kept(out, row, prompts)
        examples.append(example)
    text = json.dumps({"examples": examples, "prompts": prompts, "steps": STEPS}, ensure_ascii=False)
    return text.replace("<", "\\u003c")  # nothing in it can end the script element


def _kept(out: Path, row: Row, prompts: dict[str, list[str]]) -> dict[str, Any]:
    """Digits from 0 to `STEPS`, one a token; or why there are none."""
    try:
        ids, share_T = shares(out, row)
        if row.prompt_hash not in prompts:
            prompts[row.prompt_hash] = token_texts(tokenizer_of(row.model), ids)
    except (OSError, ValueError) as error:
        return {"kept_error": first_line(error)}
    return {
        "kept": "".join(str(round(STEPS * share)) for share in share_T.tolist()),
        "mean_kept": float(share_T.mean()),
    }
