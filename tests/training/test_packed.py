"""Heads trained on packed backbones: curves beside those of the unpacked weights, and what needs float weights."""

from pathlib import Path

import pytest
import torch
from tiny_gguf import tiny_source, write_gguf

from locret_kit import RetainingHeads
from locret_kit.backbones.demo import unpack
from locret_kit.cli.infer import main as infer
from locret_kit.cli.train import main
from locret_kit.config.recipes import load_config, with_recipe
from locret_kit.training.fit import read_curves

SETTINGS = ("recipe=tiny", "trainer.accelerator=cpu", "heads.dtype_saved=float32", "backbone.dtype=float32")


def train(model: Path, out: Path, *more: str) -> dict[str, dict[int, float]]:
    """The curves of a run that ends well."""
    assert main([*SETTINGS, f"backbone.model={model}", f"out={out}", *more]) == 0
    return read_curves(out)


def test_the_curve_is_that_of_the_unpacked_weights(tmp_path, capsys):
    """Integer products round activations to 8 bits; nothing else differs."""
    torch.manual_seed(0)
    file = write_gguf(tmp_path / "tiny.Q4_1.gguf", tiny_source("gemma3"), "Q4_1")
    more = ("optim.steps=20", "optim.lr=0.02", "trainer.val_every=10")
    packed = train(file, tmp_path / "packed", *more)
    plain = train(unpack(file, tmp_path / "plain", "tiny"), tmp_path / "beside", *more)
    for tag in ("loss", "val/loss", "val/recall"):
        assert packed[tag] == pytest.approx(plain[tag], rel=0.1), tag
    values = list(packed["val/loss"].values())
    assert values[-1] < 0.95 * packed["loss"][1]
    heads = RetainingHeads.from_pretrained(tmp_path / "packed" / "heads")
    assert heads.config.backbone == str(file)
    (tmp_path / "text.txt").write_text("The harbour was quiet. The pass key is 12345. " * 20)
    capsys.readouterr()
    words = ("--ckpt", str(tmp_path / "packed" / "heads"), "--max-new-tokens", "3", "--budget", "96", "--device", "cpu")
    assert infer([str(tmp_path / "text.txt"), *words]) == 0


@pytest.mark.parametrize(
    ("model", "out"),
    [
        ("Qwen/Qwen3-4B", "qwen3-4b"), ("folder/Tiny/", "tiny"), ("lab/Tiny-GGUF:Q4_K_M", "tiny"), ("a/Tiny.Q8_0.gguf", "tiny"),
    ],
)  # fmt: skip
def test_a_run_without_a_recipe_has_the_models_folder(model, out):
    assert with_recipe({"backbone.model": model})["out"] == f"runs/{out}"


@pytest.mark.parametrize("model", ["folder/tiny.Q8_0.gguf", "lab/Tiny-GGUF:Q4_K_M"])
@pytest.mark.parametrize(
    "needy",
    [
        "backbone.adapter=lora", "backbone.weight_bits=4", "backbone.device_map=auto", "trains=pool", "trainer.strategy=fsdp",
        "trainer.strategy=deepspeed_stage_3", "trainer.strategy=deepspeed_stage_3_offload",
    ],
)  # fmt: skip
def test_float_weights_are_needed(needy, model, capsys):
    words = ["recipe=tiny", f"backbone.model={model}"]
    with pytest.raises(ValueError, match=f"{needy} needs float weights, and backbone.model='{model}'"):
        load_config([*words, needy])
    assert main([*words, needy]) == 1 and "needs float weights" in capsys.readouterr().err
    for strategy in ("auto", "ddp", "deepspeed_stage_2"):
        assert load_config([*words, f"trainer.strategy={strategy}"]).trainer.strategy == strategy
