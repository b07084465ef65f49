"""Heads on disk: a folder (safetensors and config.json), one ``.pt`` file, or the published flat ``.bin``."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from .files import CONFIG, WEIGHTS, read_json, write_beside, write_folder
from .heads import HeadsConfig, RetainingHeads

FORMAT = "locret_kit.heads.v1"
_PUBLISHED = re.compile(r"^model\.layers\.(\d+)\.self_attn\.(fc[12])\.weight$")


def state_of(heads: RetainingHeads, dtype: torch.dtype) -> dict[str, Tensor]:
    """Weights by their published names, contiguous, in ``dtype``, on the CPU."""
    return {name: weight.detach().to("cpu", dtype).contiguous() for name, weight in _named(heads).items()}


def _named(heads: RetainingHeads) -> dict[str, Tensor]:
    """Weights by their published names."""
    return {
        f"model.layers.{i}.self_attn.{name}.weight": getattr(head, name).weight
        for i, head in enumerate(heads.layers)
        for name in ("fc1", "fc2")
    }


def lossless_dtype(heads: RetainingHeads) -> torch.dtype:
    """bfloat16 where that loses nothing, else float32."""
    exact = all(torch.equal(weight.to(torch.bfloat16).to(weight.dtype), weight) for weight in heads.parameters())
    return torch.bfloat16 if exact else torch.float32


def save_heads(heads: RetainingHeads, target: str | Path, dtype: torch.dtype | None = None) -> None:
    """Write a folder, or one file where ``target`` ends in ``.pt``; by default nothing is rounded (`lossless_dtype`)."""
    target, state = Path(target), state_of(heads, dtype or lossless_dtype(heads))
    config = {"format": FORMAT, **heads.config.to_dict()}
    if target.suffix == ".pt":
        write_beside(target, lambda path: torch.save({"config": config, "state": state}, path))
    else:
        write_folder(target, config, state)


def load_heads(
    source: str | Path,
    *,
    revision: str | None = None,
    config: HeadsConfig | None = None,
    backbone: str | None = None,
    **hub: Any,
) -> RetainingHeads:
    """Heads from a folder, a ``.pt`` file, a published ``.bin`` or a Hub repository id.

    A ``.bin`` says nothing of its backbone: ``config`` does, or ``backbone`` (a folder or Hub id) whose configuration
    gives the sizes, or a ``config.json`` beside the file (which, beside a ``.safetensors`` file, comes before ``backbone``);
    those of the paper's authors are known by name (`PUBLISHED`).
    ``hub``: token, cache_dir and local_files_only, as ``huggingface_hub`` takes them.

    Raises:
        FileNotFoundError: nothing there. ValueError: not a heads checkpoint, or names and shapes do not fit; each is named.
    """
    path = Path(source)
    if path.is_dir():
        if not (path / CONFIG).exists() or not (path / WEIGHTS).exists():
            raise FileNotFoundError(f"{path} holds no heads: it needs {CONFIG} and {WEIGHTS}")
        return _build(_read_safetensors(path / WEIGHTS), _config(read_json(path / CONFIG), path / CONFIG), path)
    if path.is_file():
        if path.suffix == ".safetensors":
            state = _read_safetensors(path)
            if config is None and backbone is not None and not path.with_name(CONFIG).exists():
                config = _config_of_backbone(backbone, state)
            return _build(state, config or _config_beside(path), path)
        return _from_torch_file(path, config, backbone)
    if (
        path.suffix in (".pt", ".bin", ".safetensors")
        or str(source).startswith((".", "/"))
        or str(source).count("/") != 1
    ):
        raise FileNotFoundError(f"ckpt={str(source)!r}: no such file or folder")
    return _from_hub(str(source), revision, config, backbone, hub)


PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
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


def _from_hub(
    repo: str, revision: str | None, config: HeadsConfig | None, backbone: str | None, hub: dict[str, Any]
) -> RetainingHeads:
    from .hub import pull

    def choose(names: list[str]) -> list[str]:
        if WEIGHTS in names:
            return [WEIGHTS, *(name for name in names if name == CONFIG)]
        bins = [name for name in names if name.endswith(".bin")]
        if len(bins) != 1:
            raise ValueError(f"{repo} holds neither {WEIGHTS} nor one .bin file")
        return bins

    file = pull(repo, choose, revision=revision, **hub)[0]
    if file.name == WEIGHTS:
        return load_heads(file.parent)
    known, settings = PUBLISHED.get(repo, (None, {}))
    heads = load_heads(file, config=config, backbone=backbone or known)
    if known is not None and config is None:
        heads.config = replace(heads.config, backbone=known, inference=settings)
    return heads


def _from_torch_file(path: Path, config: HeadsConfig | None, backbone: str | None) -> RetainingHeads:
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        reason = (
            "it holds more than tensors" if "weights_only" in str(error).lower() else "it is truncated or no torch file"
        )
        raise ValueError(f"ckpt={str(path)!r} cannot be read safely: {reason}") from error
    if isinstance(loaded, dict) and isinstance(loaded.get("config"), dict) and "state" in loaded:
        return _build(loaded["state"], _config(loaded["config"], path), path)
    if not isinstance(loaded, dict) or not any(_PUBLISHED.match(str(key)) for key in loaded):
        raise ValueError(f"ckpt={str(path)!r} is not a heads checkpoint: no model.layers.*.self_attn.fc1.weight in it")
    if config is None and backbone is not None:
        config = _config_of_backbone(backbone, loaded)
    return _build(loaded, config or _config_beside(path), path)


def _config_of_backbone(backbone: str, state: dict[str, Tensor]) -> HeadsConfig:
    """Sizes from the backbone's configuration, the heads' width from their weights."""
    from .backbones.families import spec_of
    from .backbones.load import load_config

    spec = spec_of(load_config(backbone))
    width = next((weight.shape[0] for name, weight in state.items() if name.endswith("fc1.weight")), 1)
    return HeadsConfig.for_backbone(spec, backbone, width)


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"ckpt={str(path)!r} is truncated or no safetensors file: {error}") from error


def _config_beside(path: Path) -> HeadsConfig:
    beside = path.with_name(CONFIG)
    if not beside.exists():
        raise ValueError(f"{path} says nothing of its backbone: name it (--model, or backbone=)")
    return _config(read_json(beside), beside)


def _config(raw: dict[str, Any], path: Path) -> HeadsConfig:
    if not isinstance(raw, dict):
        raise ValueError(f"{path} is not a configuration of heads")
    raw = {k: v for k, v in raw.items() if k != "format"}
    known = {f.name for f in fields(HeadsConfig)}
    if unknown := sorted(set(raw) - known):
        raise ValueError(f"{path}: unknown configuration fields {', '.join(unknown)}")
    try:
        config = HeadsConfig(**raw)
        config.check()
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error
    return config


def _build(state: dict[str, Tensor], config: HeadsConfig, path: Path) -> RetainingHeads:
    """Strict: every head there, none extra, every shape right."""
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise ValueError(f"{path} holds something else than tensors by name")
    if config.n_layers > len(state):  # before anything of the size that a file names is built
        raise ValueError(f"{path} holds {len(state)} tensors: most of its n_layers={config.n_layers} heads are missing")
    try:
        with torch.device("meta"):
            heads = RetainingHeads(config)
    except (KeyError, TypeError, RuntimeError) as error:
        raise ValueError(f"{path}: its configuration builds no heads: {error}") from error
    wanted = _named(heads)
    wrong = [f"{name} is missing" for name in wanted if name not in state]
    wrong += [f"{name} is not expected" for name in state if name not in wanted]
    wrong += [
        f"{name} is {tuple(state[name].shape)}, expected {tuple(weight.shape)}"
        for name, weight in wanted.items()
        if name in state and state[name].shape != weight.shape
    ]
    wrong += [f"{name} is not finite" for name in wanted if name in state and not state[name].isfinite().all()]
    if wrong:
        more = f" (and {len(wrong) - 4} more)" if len(wrong) > 4 else ""
        raise ValueError(f"{path} does not fit {config.backbone}: " + "; ".join(wrong[:4]) + more)
    heads.to_empty(device="cpu")
    with torch.no_grad():
        for name, weight in _named(heads).items():
            weight.copy_(state[name])
    return heads
