"""Write a run's TensorBoard scalars as one CSV: `python scripts/curves.py runs/NAME > curves.csv`."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

TAGS = ("loss", "train/regression", "train/smoothing", "recall", "train/lr", "tok/s", "val/loss", "val/recall")


def main() -> None:
    """A row a step; later event files (a resumed run) override earlier ones."""
    rows: dict[int, dict[str, float]] = {}
    for file in sorted(Path(sys.argv[1]).rglob("events.*"), key=lambda path: path.stat().st_mtime):
        events = EventAccumulator(str(file))
        events.Reload()
        for tag in set(TAGS) & set(events.Tags()["scalars"]):
            for event in events.Scalars(tag):
                rows.setdefault(event.step, {})[tag] = event.value
    writer = csv.writer(sys.stdout)
    writer.writerow(("step", *TAGS))
    for step in sorted(rows):
        writer.writerow((step, *(f"{rows[step][tag]:.5g}" if tag in rows[step] else "" for tag in TAGS)))


if __name__ == "__main__":
    main()
