"""Last used 2026-11-23, for scripts/research/logs/heads.md.

Say what a run of trials has learned, each signal at its best rate: recall of its own target, from the curves.

    python scripts/research/signal_curves.py runs/signals/heads --last 20 [--write scripts/research/logs/heads.md]

A step's recall is taken before its update, on a sample that is new. Of each signal the rate (NAME@RATE) with the highest recall
over the ``last`` steps before those of the table is taken. Recalls of different targets do not compare; signals with the same
target are compared, sample by sample, with the best of them. Needs no model.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Sequence
from pathlib import Path

from locret_kit.evals.cells import mean_and_stderr
from locret_kit.evals.tables import Table
from locret_kit.files import read_json, write_text

BEGIN, END = "<!-- learned:begin -->\n", "<!-- learned:end -->"


def recalls(run: Path) -> dict[str, list[float]]:
    """Recall of each step, by trial."""
    with (run / "curves.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    names = sorted(path.parent.name for path in run.glob("*/training.json"))
    return {name: [float(row[f"{name}/recall"]) for row in rows if row[f"{name}/recall"]] for name in names}


def target_of(folder: Path) -> str:
    """What a trial's recall is of, in a few words."""
    target = read_json(folder / "training.json")["target"]
    words = [target["kind"], f"asked by {target['queries']}"]
    words += [f"window {target['window']}"] * bool(target["window"]) + ["times values"] * bool(target["values"])
    return ", ".join(words)


def plus(values: Sequence[float], sign: str = "") -> str:
    """Mean and standard error."""
    mean, stderr = mean_and_stderr(list(values))
    return f"{mean:{sign}.3f} ± {stderr:.3f}"


def table(run: Path, last: int) -> str:
    """A line for each signal.

    Raises:
        ValueError: fewer than twice ``last`` steps, or fewer than two to take.
    """
    found = recalls(run)
    if any(len(curve) < 2 * last for curve in found.values()) or last < 2:
        raise ValueError(f"last={last} must be at least 2 and at most half of the run's steps")
    best: dict[str, str] = {}
    for name in sorted(found, key=lambda name: -sum(found[name][-2 * last : -last])):
        best.setdefault(name.partition("@")[0], name)
    groups: dict[str, list[str]] = {}
    for name in sorted(best.values(), key=lambda name: -sum(found[name][-last:])):
        groups.setdefault(target_of(run / name), []).append(name)
    lines = []
    for target, names in sorted(groups.items()):
        base = found[names[0]][-last:]
        for name in names:
            mine, (signal, _, rate) = found[name][-last:], name.partition("@")
            apart = "-" if name == names[0] else plus([a - b for a, b in zip(mine, base, strict=True)], "+")
            lines.append([target, signal, rate, plus(mine), apart])
    says = f"mean of the last {last} steps ± standard error, each on one new sample"
    head = ["target", "signal", "rate", "recall of the true top tenth", "minus the best of that target"]
    return Table(head, lines, "What was learned", says).markdown()


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0; 1 after an error said in one line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[2], allow_abbrev=False)
    parser.add_argument("run", type=Path, help="the folder heads of a run with trials.rates")
    parser.add_argument("--last", type=int, default=20, help="steps that count")
    parser.add_argument("--write", type=Path, help="page whose table is rewritten")
    args = parser.parse_args(argv)
    try:
        made = table(args.run, args.last)
        print(made)
        if args.write:
            before, rest = args.write.read_text(encoding="utf-8").split(BEGIN)
            write_text(args.write, before + BEGIN + made + END + rest.split(END)[1])
    except (OSError, ValueError) as error:
        print(f"signal_curves.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
