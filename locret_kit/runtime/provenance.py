"""Origin of a report or a row: the backbone, the heads with a hash of their weights, the kit with its commit."""

from __future__ import annotations

import hashlib
import platform
from typing import TYPE_CHECKING

import torch

from locret_kernels import provenance as origin

if TYPE_CHECKING:
    from ..heads import RetainingHeads


def provenance(
    model: str, heads: str | None, heads_hash: str, adapter: str | None, backend: str | None
) -> dict[str, object]:
    """Origin that a report or a row states.

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
    """Versions of python, torch, transformers and locret_kit; of a checkout also its commit."""
    versions = {"python": platform.python_version(), **origin.versions("torch", "transformers", "locret_kit")}
    here = origin.commit(origin.ROOT)
    return {**versions, "commit": here} if here else versions
