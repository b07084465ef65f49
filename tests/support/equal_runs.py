"""Pieces that several tests of trainings share."""

from pathlib import Path

import torch

from locret_kit import RetainingHeads
from locret_kit.cli.train import main
from locret_kit.training.fit import read_curves


def refused(capsys, *words: str) -> str:
    """The one line of a training that failed."""
    capsys.readouterr()
    assert main(list(words)) == 1
    lines = capsys.readouterr().err.splitlines()
    (line,) = [line for line in lines if line.startswith("locret-train:") and "%|" not in line]  # the bar's
    return line


def same_run(a: Path, b: Path) -> None:
    """Equal curves and equal heads."""
    first, second = read_curves(a), read_curves(b)
    for tag in ("loss", "recall", "train/lr", "val/loss", "val/recall", "val/recall_layer/02"):
        assert first[tag] == second[tag], tag
    mine, theirs = (RetainingHeads.from_pretrained(str(path / "heads")) for path in (a, b))
    assert all(torch.equal(x, y) for x, y in zip(mine.parameters(), theirs.parameters(), strict=True))
    assert sorted(path.name for path in (a / "best").iterdir()) == sorted(path.name for path in (b / "best").iterdir())
