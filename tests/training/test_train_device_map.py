"""A backbone that is spread over devices trains the heads that one in one place trains.

Without a GPU, layers on the disk stand for what does not fit: accelerate brings them in, layer by layer, as from the CPU.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_tokenizer import save_tiny_backbone

from locret_kit import RetainingHeads
from locret_kit.backbones.intercept import attach
from locret_kit.backbones.load import load_backbone
from locret_kit.cli.train import main
from locret_kit.config.recipes import load_config
from locret_kit.samples.sample import Sample
from locret_kit.training.module import HeadTraining

TINY = ["recipe=tiny", "backbone.model=some/model"]
SPREAD = {
    "model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk",
    "model.layers.2": "disk", "model.norm": "disk", "lm_head": "disk",
}  # fmt: skip


@pytest.fixture(scope="module")
def backbone(tmp_path_factory) -> Path:
    return save_tiny_backbone(tmp_path_factory.mktemp("backbone"))


def gradients(backbone: Path, device_map) -> list[torch.Tensor]:
    model, _ = load_backbone(str(backbone), dtype="float32", device="cpu", device_map=device_map)
    assert any(weight.is_meta for weight in model.parameters()) == (device_map is not None)
    torch.manual_seed(0)
    module = HeadTraining(model, load_config(TINY))
    sample = Sample(tuple(range(5, 65)), ((50, 60),))
    with attach(model) as module._attachment:
        module.observe([sample], lambda loss: loss.backward())
    return [weight.grad for weight in module.heads.parameters()]


def test_layers_that_are_brought_in_give_the_same_gradients(backbone):
    for mine, theirs in zip(gradients(backbone, SPREAD), gradients(backbone, None), strict=True):
        assert mine.any() and torch.equal(mine, theirs)


def test_a_training_with_a_map(backbone, tmp_path):
    for name, more in (("one", []), ("spread", ["backbone.device_map=auto", "backbone.gpu_memory=1GiB"])):
        settings = ["recipe=tiny", f"backbone.model={backbone}", f"out={tmp_path / name}", "trainer.accelerator=cpu"]
        assert main([*settings, "data.max_tokens=384", "optim.steps=2", "heads.dtype_saved=float32", *more]) == 0
    mine, theirs = (RetainingHeads.from_pretrained(str(tmp_path / name / "heads")) for name in ("one", "spread"))
    assert all(torch.equal(x, y) for x, y in zip(mine.parameters(), theirs.parameters(), strict=True))


def test_an_adapter_cannot_be_merged_into_weights_that_are_elsewhere(backbone):
    with pytest.raises(ValueError, match=r"adapter='some/lora' cannot be merged into weights that device_map="):
        load_backbone(str(backbone), dtype="float32", device="cpu", device_map=SPREAD, adapter="some/lora")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["backbone.device_map=auto", "trainer.strategy=ddp"], "backbone.device_map=auto spreads one process's backbone, "),
        (["backbone.device_map=auto", "trainer.strategy=deepspeed_stage_3"], "choose trainer.strategy=auto, or fsdp or "),
        (["backbone.device_map=balance"], "backbone.device_map=balance must be one of: auto, balanced, "),
        (["backbone.gpu_memory=18GiB"], "backbone.gpu_memory=18GiB needs a backbone.device_map, such as auto"),
        (["backbone.device_map=auto", "backbone.gpu_memory=18"], "gpu_memory=18 is 18 bytes; with a unit: backbone.gpu"),
        (["trainer.strategy=deepspeed"], "trainer.strategy=deepspeed must be one of: auto, ddp, fsdp, deepspeed_stage_2, "),
        (["data.batch=2"], "optim.accumulate=1 must be a multiple of data.batch=2"),
    ],
)  # fmt: skip
def test_settings_that_do_not_go_together(more, said):
    with pytest.raises(ValueError) as caught:
        load_config([*TINY, *more])
    assert said in str(caught.value) and "\n" not in str(caught.value)
