"""Files of retaining heads: a folder (safetensors and config.json), one ``.pt`` file, the published flat ``.bin``, the Hub.

From a name to weights and configuration as they stand in the file; ``heads`` checks them and builds the module.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor
from typing_extensions import Unpack

from . import hub
from .backbones import demo
from .files import CONFIG, WEIGHTS, read_folder, read_json, read_weights, write_beside, write_folder

FORMAT = "locret_kit.heads.v1"
PUBLISHED: dict[str, tuple[str, dict[str, object]]] = {
    "hyx21/Locret-phi-3-mini-128K": (
        "microsoft/Phi-3-mini-128k-instruct",
        {"budget": 6000, "chunk": 3072, "stabilizers": 2500, "local_len": 100, "positions": "compact"},
    ),
    "hyx21/Locret-llama-3.1-8B-instruct": (
        "meta-llama/Llama-3.1-8B-Instruct",
        {"budget": 16384, "chunk": 1024, "stabilizers": 2500, "local_len": 100, "positions": "compact"},
    ),
}
"""Repositories of the paper's authors, whose files say nothing of them: backbone, and the settings of the paper's experiments."""

EMBEDDING = "model.embed_tokens.weight"
HEAD = re.compile(r"model\.layers\.\d+\.self_attn\.fc\d\.weight")
"""Names of weights in a checkpoint of the authors' training: of the backbone's first, and of a head."""


@dataclass(frozen=True)
class Stored:
    """A checkpoint as it was read, not yet checked."""

    state: dict[str, Tensor]
    """Weights by their published names."""
    path: Path
    """The file or folder, for messages."""
    config: object = None
    """The configuration's fields by name; None where the file says nothing of its backbone."""
    backbone: str | None = None
    """The backbone of a repository that is known by name, whose file says nothing."""
    inference: dict[str, object] = field(default_factory=dict)
    """The settings of such a repository."""


def write_checkpoint(target: Path, config: dict[str, object], state: dict[str, Tensor]) -> None:
    """Write a folder, or one file where ``target`` ends in ``.pt``; atomically."""
    config = {"format": FORMAT, **config}
    if target.suffix == ".pt":
        write_beside(target, lambda path: torch.save({"config": config, "state": state}, path))
    else:
        write_folder(target, config, state)


def read_checkpoint(source: Path | str, **access: Unpack[hub.Access]) -> Stored:
    """Read a folder, a ``.pt``, ``.bin`` or ``.safetensors`` file, or a repository of the Hub (with ``access``).

    Raises:
        FileNotFoundError: nothing is there. ValueError: it is no checkpoint of heads, or damaged.
    """
    path = Path(source)
    if str(source) == demo.HEADS and not path.exists():
        path = demo.heads_folder()
    if path.is_dir():
        config, state = read_folder(path, "heads")
        return Stored(state, path, config)
    if path.is_file():
        beside = path.with_name(CONFIG)
        if path.suffix == ".safetensors":
            return Stored(read_weights(path), path, read_json(beside) if beside.exists() else None)
        return _read_torch_file(path)
    name = str(source)
    if path.suffix in (".pt", ".bin", ".safetensors") or name.startswith((".", "/")) or name.count("/") != 1:
        raise FileNotFoundError(f"ckpt={name!r}: no such file or folder")

    def choose(names: list[str]) -> list[str]:
        if WEIGHTS in names:
            return [WEIGHTS, *(name for name in names if name == CONFIG)]
        bins = [name for name in names if name.endswith(".bin")]
        if len(bins) != 1:
            raise ValueError(f"{source} holds neither {WEIGHTS} nor one .bin file")
        return bins

    file = hub.pull(name, choose, **access)[0]
    if file.name == WEIGHTS:
        return read_checkpoint(file.parent)
    backbone, inference = PUBLISHED.get(name, (None, {}))
    return replace(_read_torch_file(file), backbone=backbone, inference=inference)


def _read_torch_file(path: Path) -> Stored:
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        foreign = "weights_only" in str(error).lower()
        reason = "it holds more than tensors" if foreign else "it is truncated or no torch file"
        raise ValueError(f"ckpt={str(path)!r} cannot be read safely: {reason}") from error
    if isinstance(loaded, dict) and isinstance(loaded.get("config"), dict) and "state" in loaded:
        return Stored(loaded["state"], path, loaded["config"])
    if not isinstance(loaded, dict) or not any(str(name).endswith(".self_attn.fc1.weight") for name in loaded):
        raise ValueError(f"ckpt={str(path)!r} is not a heads checkpoint: no model.layers.*.self_attn.fc1.weight in it")
    if EMBEDDING in loaded:  # a complete model, as the paper's training writes it
        loaded = {name: weight for name, weight in loaded.items() if HEAD.fullmatch(str(name))}
    return Stored(loaded, path)
