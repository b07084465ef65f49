"""Tables of the papers' own comparisons in small, from `scripts/research/logs/papers`."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

from locret_kit.evals.engine import read_rows
from locret_kit.evals.tables import Table, differences, mean_and_stderr

FOLDER = "scripts/research/logs/papers"
MARKERS = ("learned", "once")
"""Tables of `scripts/research/logs/papers.md`."""
LAST = 40
"""Steps of a training that count, each on one new sample."""
TRIALS = {
    "paper-3e-3": "", "paper-5e-4": "paper-3e-3", "paper-1e-3": "paper-3e-3", "paper-1e-2": "paper-3e-3",
    "width-32": "paper-3e-3", "width-64": "paper-3e-3", "width-256": "paper-3e-3", "width-512": "paper-3e-3",
    "alpha-0": "paper-3e-3", "alpha-0.08": "paper-3e-3", "alpha-1": "paper-3e-3",
    "ours-1e-3": "", "ours-3e-3": "ours-1e-3", "ours-1e-2": "ours-1e-3",
}  # fmt: skip
"""Heads of recipes/trials/locret.yaml of commit 4ec06cb, each against others of the same target."""
ONCE = {
    "full": "", "h2o": "full", "kvcrush(base=h2o)": "h2o", "roco(newest=0,sinks=0)": "h2o", "snapkv": "full",
    "ada-snapkv": "snapkv", "nacl(ratio=0)": "full", "nacl(ratio=1.0)": "nacl(ratio=0)",
}  # fmt: skip
"""Policies that evict once, each against the one that its paper improves on."""


def sections(root: Path) -> dict[str, str]:
    """Every table by its marker; empty where a checkout has no rows for it."""
    curves, rows = root / FOLDER / "recall.csv", sorted((root / FOLDER).glob("once.jsonl"))
    return {
        "learned": learned(curves, TRIALS) if curves.exists() else "",
        "once": compared(rows, ONCE, ("agreement", "nll")) if rows else "",
    }


def learned(curves: Path, against: Mapping[str, str]) -> str:
    """Recall of the true top tenth of its own target, by set of heads: the mean over the `LAST` steps and, sample by sample, the
    difference from the heads that it is held against."""
    with curves.open(newline="", encoding="utf-8") as file:
        steps = list(csv.DictReader(file))[-LAST:]
    recall = {name: [float(step[name]) for step in steps] for name in against}
    lines = [
        [name, number(recall[name]), base or "-", apart(recall[name], recall.get(base))]
        for name, base in against.items()
    ]
    return Table(["heads", "recall", "minus", "difference"], lines).markdown()


def compared(files: Sequence[Path], against: Mapping[str, str], figures: Sequence[str]) -> str:
    """Figures of each policy that was run, with n, and prompt by prompt the difference from the one that it is held against."""
    rows = [row for row in read_rows(files) if row.score is not None]
    lines = []
    for label, base in against.items():
        own = [row for row in rows if row.label == label]
        cells = [f"`{label}`", str(len(own)), f"`{base}`" if base else "-"]
        for name in figures:
            pairs = differences([row for row in rows if row.label in (label, base)], base, name) if base and own else []
            cells += [number([row.scores[name] for row in own]), str(pairs[0]) if pairs else "-"]
        if own:
            lines.append(cells)
    return Table(
        ["policy", "n", "minus", *(cell for name in figures for cell in (name, "difference"))], lines
    ).markdown()


def apart(mine: Sequence[float], theirs: Sequence[float] | None) -> str:
    """The mean difference with its sign and its standard error."""
    return "-" if theirs is None else number([a - b for a, b in zip(mine, theirs, strict=True)], "+")


def number(values: Sequence[float], sign: str = "") -> str:
    """Mean and standard error."""
    mean, stderr = mean_and_stderr(list(values))
    return f"{mean:{sign}.3f} ± {stderr:.3f}" if stderr is not None else "-"
