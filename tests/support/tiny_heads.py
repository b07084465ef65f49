"""Random retaining heads of a tiny backbone."""

from pathlib import Path

import torch
from tiny_tokenizer import save_tiny_backbone
from transformers import AutoConfig, PreTrainedModel

from locret_kit import HeadsConfig, RetainingHeads
from locret_kit.backbones.spec import spec_of

INFERENCE = {"budget": 64, "chunk": 32, "stabilizers": 8, "local_len": 8, "positions": "compact"}


def tiny_heads(model: PreTrainedModel, hidden: int, seed: int = 0, **more: str) -> RetainingHeads:
    """Frozen heads in the dtype of ``model``."""
    torch.manual_seed(seed)
    config = HeadsConfig.for_backbone(spec_of(model.config), "tiny", hidden, **more)
    return RetainingHeads(config).requires_grad_(False).to(model.dtype)


def save_tiny_heads(
    folder: Path, hidden: int = 8, *, seed: int = 1, inference: dict = INFERENCE, backbone: Path | None = None,
    name: str = "heads", said: str | None = None,
) -> Path:  # fmt: skip
    """Heads in ``folder/name``, which name their ``backbone``, or what is ``said``; without one it is saved beside them."""
    backbone = backbone or save_tiny_backbone(folder / "backbone")
    spec = spec_of(AutoConfig.from_pretrained(backbone))
    torch.manual_seed(seed)
    heads = RetainingHeads(HeadsConfig.for_backbone(spec, said or str(backbone), hidden, inference=inference))
    heads.save_pretrained(folder / name)
    return folder / name
