"""Targets of a card with a prompt of 131,072 tokens under a cap of 24 GiB, one per figure of `end_to_end.py`, and the table of
what its rows reach."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from locret_kit.evals.tables import Table

TOKENS, CAP = 131072, "24GiB"
MODELS = {"phi3-mini": "Phi-3-mini", "llama3.1-8b": "Llama-3.1-8B"}
"""Recipe -> name."""
TARGETS: dict[str, tuple[str, str | dict[str, str]]] = {
    "prefill, of the floating-point floor": ("%", "at least 60"),
    "share of prefill in all three beyond the heads' products": ("%", "at most 3"),
    "peak memory, allocated against planned": ("times", "0.95 to 1.05"),
    "prefill against full attention": ("times faster", {"phi3-mini": "at least 2.5", "llama3.1-8b": "at least 1.8"}),
    "cache against full attention": ("times smaller", {"phi3-mini": "at least 14", "llama3.1-8b": "at least 7"}),
    "prefill of h2o against locret": ("times", "at most 1.5"),
    "prefill of roco against locret": ("times", "at most 1.5"),
    "prefill of tova against locret": ("times", "at most 1.5"),
    "decode at a full cache, graph, of the copy floor": ("%", "at least 70"),
    "decode after the whole prompt against a short one, graph": ("times", "0.97 to 1.03"),
}
"""Figure -> its unit, and the target: of every model, or by recipe."""


def target(figure: str, model: str) -> str:
    """The figure's target for a model; empty where there is none."""
    _, goal = TARGETS.get(figure, ("", ""))
    return goal if isinstance(goal, str) else goal.get(model, "")


def to_markdown(rows: Sequence[Mapping[str, str]]) -> str:
    """A table for each of the two newest runs on a device, newest first, of every target that it measured by rows of
    `scripts/gpu.py`; one of "not measured yet" without rows. Rows of other lengths or caps are left out; of rows for the same
    thing the last counts."""
    runs: dict[str, dict[tuple[str, str], Mapping[str, str]]] = {}
    for row in sorted(rows, key=lambda row: row["date"]):
        if (row["context"], row["cap"]) != (str(TOKENS), CAP):
            continue
        versions = f"torch {row['torch']}, triton {row['triton']}, transformers {row['transformers']}"
        where = f"{row['device']}, driver {row['driver']}, {versions}, commit {row['commit']}, {row['date']}"
        runs.setdefault(where, {})[row["model"], row["measurement"]] = row
    every = reversed([*(runs or {"no GPU so far": {}}).items()][-2:])
    return "\n".join(_table(where, found) for where, found in every)


def _table(where: str, found: Mapping[tuple[str, str], Mapping[str, str]]) -> str:
    lines = []
    for figure, (unit, _) in TARGETS.items():
        goals = dict.fromkeys(target(figure, model) for model in MODELS)
        cells = [_measured(found.get((model, figure))) for model in MODELS]
        if not found or any((model, figure) in found for model in MODELS):
            lines.append([f"{figure} ({unit})", " and ".join(goals), *cells])
    return Table([f"{TOKENS:,} tokens under {CAP} ({where})", "target", *MODELS.values()], lines).markdown()


def _measured(row: Mapping[str, str] | None) -> str:
    return "not measured yet" if row is None else f"{float(row['value']):.3g}" if row["value"] else row["note"]
