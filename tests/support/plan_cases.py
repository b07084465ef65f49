"""Pieces that several tests of plan share."""

import json
from functools import cache
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from locret_kit.planning.backbone_sizes import BackboneSizes

CONFIGS = Path(__file__).resolve().parents[2] / "recipes" / "configs"


NAMES = sorted(file.stem for file in CONFIGS.glob("*.json"))


def configuration(name: str, layers: int | None = None):
    raw = json.loads((CONFIGS / f"{name}.json").read_text())
    raw.pop("_name_or_path")
    if layers:
        raw["num_hidden_layers"] = layers
        if "layer_types" in raw:
            raw["layer_types"] = raw["layer_types"][-layers:]
    return AutoConfig.for_model(raw.pop("model_type"), **raw)


def on_meta(config):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval().requires_grad_(False)


@cache
def backbone(name: str) -> BackboneSizes:
    return BackboneSizes.of(configuration(name))
