"""Keys of the commands for weights in few bits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_bits import TINY
from tiny_tokenizer import save_tiny_backbone

from locret_kit import BoundedCache, attach
from locret_kit.backbones.load import load_backbone
from locret_kit.cli.eval import main as evaluate
from locret_kit.cli.train import main as train
from locret_kit.config.eval_options import load_eval_config
from locret_kit.config.recipes import load_config
from locret_kit.runtime.decoders import GraphDecoder
from locret_kit.runtime.session import prefill


@pytest.fixture(scope="module")
def backbone(tmp_path_factory) -> Path:
    return save_tiny_backbone(tmp_path_factory.mktemp("bits") / "backbone", **TINY)


def test_heads_train_on_few_bits_and_rows_say_so(backbone, tmp_path):
    settings = ["recipe=tiny", f"backbone.model={backbone}", "trainer.accelerator=cpu", "backbone.weight_bits=4"]
    out = tmp_path / "rows"
    assert train([*settings, "data.max_tokens=384", "optim.steps=2", f"out={tmp_path / 'run'}"]) == 0
    assert json.loads((tmp_path / "run/heads/training.json").read_text())["backbone"]["weight_bits"] == 4
    rows = [
        "tasks=[passkey]",
        "lengths=[300]",
        "samples=1",
        "policies=[locret]",
        "budgets=[64]",
        "device=cpu",
        f"out={out}",
    ]
    assert (
        evaluate([*rows, f"ckpt={tmp_path / 'run/heads'}", "dtype=float32", "weight_bits=8", "max_new_tokens=2"]) == 0
    )
    (file,) = out.glob("rows.*.jsonl")
    assert json.loads(file.read_text().splitlines()[0])["dtype"] == "float32, 8-bit weights"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["backbone.weight_bits=3"], "backbone.weight_bits=3 must be one of: 8, 4"),
        (["backbone.weight_bits=4", "trainer.strategy=fsdp"], "weights, which trainer.strategy=fsdp would shard"),
        (["backbone.weight_bits=8", "trainer.strategy=deepspeed_stage_3"], "choose auto, ddp or deepspeed_stage_2"),
    ],
)
def test_training_refuses(settings, message):
    with pytest.raises(ValueError, match=message):
        load_config(["recipe=tiny", "backbone.model=some/model", *settings])
    assert load_config(["recipe=tiny", "backbone.model=some/model"]).backbone.weight_bits is None


def test_an_evaluation_refuses():
    with pytest.raises(ValueError, match="weight_bits=2 must be one of: 8, 4"):
        load_eval_config(["tasks=[passkey]", "out=x", "weight_bits=2"])


@pytest.mark.parametrize("bits", [8, 4])
def test_only_weights_of_8_bits_are_against_a_graph(backbone, bits):
    model, _ = load_backbone(str(backbone), device="cpu", dtype="float32", weight_bits=bits)
    cache = BoundedCache(24, "h2o", chunk=16, prompt_length=90)
    with attach(model):
        prefill(model, range(90), cache)
    reason = GraphDecoder(model, cache).takes(cache)
    assert (reason is None) if bits == 4 else ("weights of 8 bits" in reason)
