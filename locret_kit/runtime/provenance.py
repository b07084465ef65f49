"""Where a figure comes from: the backbone, the heads with a hash of their weights, the kit with its commit."""

from __future__ import annotations

import hashlib
import platform
import subprocess
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers

if TYPE_CHECKING:
    from ..heads import RetainingHeads

ROOT = Path(__file__).resolve().parents[2]


def provenance(
    model: str, heads: str | None, heads_hash: str, adapter: str | None, backend: str | None
) -> dict[str, Any]:
    """What a report or a row says of its origin.

    Args:
        model: the backbone as it was named. heads: the checkpoint as it was named; None without heads.
        heads_hash: `weights_hash`, '' without heads. backend: of the kernels, a cache's once a model has run over it.
    """
    return {
        "model": model, "heads": heads or "-", "heads_hash": heads_hash, "adapter": adapter, "backend": backend or "",
        "versions": versions(),
    }  # fmt: skip


def weights_hash(heads: RetainingHeads) -> str:
    """First 16 hexadecimal digits of the SHA-256 of the weights, as float32 in their published order and by name.

    Heads that were cast to a coarser dtype have another hash: take it as they are loaded.
    """
    from ..heads import state_of

    digest = hashlib.sha256()
    for name, weight in state_of(heads, torch.float32).items():
        digest.update(f"{name} {tuple(weight.shape)}\n".encode())
        digest.update(weight.numpy().tobytes())
    return digest.hexdigest()[:16]


def versions() -> dict[str, str]:
    """Of python, torch, transformers and locret_kit; of a checkout also its commit."""
    from .. import __version__

    found = {
        "python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__,
        "locret_kit": __version__,
    }  # fmt: skip
    here = commit(ROOT)
    return {**found, "commit": here} if here else found


@lru_cache(maxsize=1)
def commit(root: Path) -> str | None:
    """The commit that is checked out in ``root``, with ``-dirty`` where files differ from it; None where it is no checkout
    of its own."""
    if not (root / ".git").exists():
        return None
    command = [
        "git",
        "--no-optional-locks",
        "-C",
        str(root),
        "describe",
        "--always",
        "--dirty",
        "--exclude=*",
        "--abbrev=12",
    ]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return said.stdout.strip() or None
