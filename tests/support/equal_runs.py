"""Pieces that several tests of resume share."""

from __future__ import annotations

from pathlib import Path

import torch

from locret_kit import RetainingHeads
from locret_kit.training.fit import read_curves


def same_run(a: Path, b: Path) -> None:
    """Equal curves and equal heads."""
    first, second = read_curves(a), read_curves(b)
    for tag in ("loss", "recall", "train/lr", "val/loss", "val/recall", "val/recall_layer/02"):
        assert first[tag] == second[tag], tag
    mine, theirs = (RetainingHeads.from_pretrained(str(path / "heads")) for path in (a, b))
    assert all(torch.equal(x, y) for x, y in zip(mine.parameters(), theirs.parameters(), strict=True))
    assert sorted(path.name for path in (a / "best").iterdir()) == sorted(path.name for path in (b / "best").iterdir())
