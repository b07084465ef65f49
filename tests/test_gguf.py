"""Backbones out of GGUF files."""

from __future__ import annotations

import pytest
import torch
from tiny_gguf import SCALED, tiny_source, write_gguf

from locret_kit.backbones.identity import first_difference, identity_of
from locret_kit.backbones.load import load_backbone

IDS = torch.arange(2, 42)[None]


def same_logits(path, model) -> None:
    loaded, _ = load_backbone(str(path), device="cpu", dtype="float32")
    with torch.inference_mode():
        own, wanted = (one(input_ids=IDS).logits for one in (loaded, model))
    assert (own - wanted).abs().max() < 1e-4 * wanted.abs().max()
    assert first_difference(identity_of(model)["config"], identity_of(loaded)["config"]) is None


@pytest.mark.parametrize("form", ["F16", "Q8_0", "Q4_0"])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "phi3", "gemma3", "smollm3"])
def test_a_file_gives_the_logits_of_its_source(family, form, tmp_path):
    model = tiny_source(family)
    same_logits(write_gguf(tmp_path / f"{family}.gguf", model, form), model)


@pytest.mark.parametrize("scaling", SCALED)
def test_scalings_of_the_rotation_are_restored(scaling, tmp_path):
    family, changes = SCALED[scaling]
    model = tiny_source(family, **changes)
    same_logits(write_gguf(tmp_path / "scaled.gguf", model, "Q8_0"), model)
