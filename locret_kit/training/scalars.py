"""A run's TensorBoard scalars as numbers and as one CSV file."""

from __future__ import annotations

import csv
from pathlib import Path

from ..files import write_beside


def read_curves(run: Path) -> dict[str, dict[int, float]]:
    """``{tag: {step: value}}``; where a resumed run made a step again, the later value counts."""
    from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator

    curves: dict[str, dict[int, float]] = {}
    for file in sorted(run.rglob("events.*"), key=lambda path: (path.stat().st_mtime, path.name)):
        events = EventAccumulator(str(file), size_guidance={SCALARS: 0})
        events.Reload()
        for tag in events.Tags()["scalars"]:
            curves.setdefault(tag, {}).update({event.step: event.value for event in events.Scalars(tag)})
    return curves


def write_curves(run: Path, target: Path) -> None:
    """One row per step, one column per tag."""
    curves = read_curves(run)
    tags = sorted(curves, key=lambda tag: (tag != "loss", "layer" in tag, tag))
    steps = sorted({step for curve in curves.values() for step in curve})

    def write(path: Path) -> None:
        with path.open("w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(("step", *tags))
            rows.writerows((s, *(f"{curves[t][s]:.5g}" if s in curves[t] else "" for t in tags)) for s in steps)

    write_beside(target, write)
