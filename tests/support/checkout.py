"""A folder that looks like a checkout, with a tiny random backbone and heads by the names of those that ship."""

from copy import deepcopy
from pathlib import Path

import pytest
from tiny_heads import save_tiny_heads
from tiny_tokenizer import save_tiny_backbone

from locret_kit.policies import registry

ROOT = Path(__file__).resolve().parents[2]
BACKBONE, HEADS = "checkpoints/SmolLM2-135M-Instruct", "checkpoints/smollm2-135m-locret"


def made_checkout(folder: Path, *linked: str) -> Path:
    """With the real folders that are named."""
    for name in linked:
        (folder / name).symlink_to(ROOT / name)
    backbone = save_tiny_backbone(folder / BACKBONE, max_position_embeddings=8192)
    save_tiny_heads(folder, backbone=backbone, name=HEADS, said=BACKBONE)
    return folder


def forget_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the registry be after a test what it was before."""
    registry.policies()
    for name in ("_policies", "_parts"):
        monkeypatch.setattr(registry, name, deepcopy(getattr(registry, name)))
