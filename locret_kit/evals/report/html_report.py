"""The report: one HTML file of a run that needs no network, no server and no other file.

Tables that sort, figures, the run's settings, and every example with its output; where the run stored what was kept
(``keep=N``), the prompt with the share of heads that hold each token. The template escapes all text; examples go through
JSON and `textContent`, and figures are images, so that nothing of a run can become markup or a script.
"""

from __future__ import annotations

import json
import re
from base64 import b64encode
from collections.abc import Iterable, Sequence
from pathlib import Path

from ...files import write_beside
from ...naming import first_line
from ...runtime.kept_text import token_texts
from ..cells import summarize
from ..engine.result_rows import KEY, SETTINGS, Row, read_config, read_rows
from ..figures import FIGURES, draw
from ..tables import Figure, Table, cells_table
from .heat import environment, script_data
from .kept_shares import shares, tokenizer_of
from .summary import overview, score_tables

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
    for name, kind in FIGURES.items():
        if kind.source == "rows":
            try:
                draw(name, rows, out / "figures")
            except ValueError:  # nothing to draw: no needle, no budget, no score
                for path in (out / "figures").glob(f"{name}.*"):
                    path.unlink()
    text = page(out, rows).encode(
        "utf-8", "backslashreplace"
    )  # half a surrogate pair stands in the examples' JSON alone
    write_beside(out / PAGE, lambda path: path.write_bytes(text))
    return out / PAGE


def page(out: Path, rows: Sequence[Row]) -> str:
    """The page's HTML; figures are read from ``out/figures``. Tables begin with the one of all tasks, and failed examples stand
    last."""
    cells = summarize(rows)
    rows = sorted(rows, key=lambda row: row.error is not None)
    every = overview(rows)
    failed = sum(row.error is not None for row in rows)
    days = sorted({row.date[:10] for row in rows if row.date})
    lead = [f"{len(rows)} examples", f"{failed or 'none'} failed", f"model {_joined(row.model for row in rows)}"]
    if days:
        lead.append(f"measured {days[0]}" + (f" to {days[-1]}" if len(days) > 1 else ""))
    templates = environment()
    templates.filters["number"] = number
    return templates.get_template("page.html").render(
        title=out.resolve().name, lead=", ".join(lead), kept=sum(row.kept is not None for row in rows),
        tables=[*([every] if every else []), *score_tables(cells)], figures=figures(out),
        cells=cells_table(cells), settings=settings(out, rows), data=data(out, rows),
    )  # fmt: skip


def number(cell: str | Figure) -> str | float | None:
    """The number by which a cell sorts; None sorts it by its text."""
    if isinstance(cell, Figure):
        return cell.value
    return cell if re.fullmatch(r"-?\d+(\.\d+)?", cell) else None


def figures(out: Path) -> list[dict[str, str]]:
    """Every SVG of ``out/figures`` as the address of an image, in the registry's order, with its name and caption."""
    places = {name: place for place, name in enumerate(FIGURES)}
    drawings = []
    for path in sorted(
        (out / "figures").glob("*.svg"), key=lambda path: (places.get(path.stem, len(places)), path.stem)
    ):
        says = FIGURES[path.stem].says if path.stem in FIGURES else path.stem
        source = f"data:image/svg+xml;base64,{b64encode(path.read_bytes()).decode()}"
        drawings.append({"name": path.stem, "caption": says[:1].upper() + says[1:], "source": source})
    return drawings


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


def data(out: Path, rows: Sequence[Row]) -> str:
    """JSON for the page's script: the examples, and the token texts of the prompts of which something is known."""
    hidden = {*SETTINGS, "versions", "kept", "backend", "device"} - {*KEY, "metric", "seed"}
    prompts: dict[str, list[str]] = {}
    examples = []
    for row in rows:
        example = {name: value for name, value in vars(row).items() if name not in hidden}
        answer = row.answer if isinstance(row.answer, str) else json.dumps(row.answer)
        kept = {} if row.kept is None else _kept(out, row, prompts)
        examples.append({**example, "policy": row.label, "answer": answer, **kept})
    return script_data({"examples": examples, "prompts": prompts, "steps": STEPS})


def _kept(out: Path, row: Row, prompts: dict[str, list[str]]) -> dict[str, object]:
    """Digits from 0 to `STEPS`, one per token; or why there are none."""
    try:
        ids, share_T = shares(out, row)
        if row.prompt_hash not in prompts:
            prompts[row.prompt_hash] = token_texts(tokenizer_of(row.model), ids)
    except (OSError, ValueError) as error:
        return {"kept_error": first_line(error)}
    digits = "".join(str(round(STEPS * share)) for share in share_T.tolist())
    return {"kept": digits, "mean_kept": float(share_T.mean())}
