"""Write a run's TensorBoard scalars as one CSV: `python scripts/curves.py runs/NAME curves.csv`.

A finished run has it already, beside its heads (`runs/NAME/heads/curves.csv`)."""

from __future__ import annotations

import sys
from pathlib import Path

from locret_kit.training.curves import write_curves

if __name__ == "__main__":
    write_curves(Path(sys.argv[1]), Path(sys.argv[2]))
