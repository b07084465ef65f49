"""Padded batches, loader workers, accumulation, precisions and a backbone that is spread over devices: none of them changes what
a step learns.

Without a GPU, layers on the disk stand for what does not fit: accelerate brings them in, layer by layer, as from the CPU.
"""

import random
from pathlib import Path

import pytest
import torch
from tiny_models import FAMILIES, tiny_model

from locret_kit.backbones.intercept import attach
from locret_kit.backbones.load import load_backbone
from locret_kit.cli.train import main
from locret_kit.config.recipes import load_config
from locret_kit.samples import Sample
from locret_kit.training.fit import read_curves
from locret_kit.training.module import HeadTraining

LENGTHS = (90, 41, 57)  # LongRoPE's long factors start at 64
SETTINGS = ["recipe=tiny", "data.max_tokens=384", "data.val_samples=1", "trainer.accelerator=cpu"]


def train(backbone: Path, out: Path, *more: str) -> dict[str, dict[int, float]]:
    assert main([*SETTINGS, f"backbone.model={backbone}", f"out={out}", *more]) == 0
    return read_curves(out)


def samples(lengths: tuple[int, ...]) -> list[Sample]:
    rng = random.Random(1)
    return [
        Sample(tuple(rng.randrange(97) for _ in range(n)), ((n // 2, n // 2 + 4), (n - 7, n - rng.randint(0, 2))))
        for n in lengths
    ]


def observed(module: HeadTraining, batches: list[list[Sample]]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """``[samples, 3]`` figures, and the gradient of every weight of the heads that are trained."""
    module.heads.zero_grad(set_to_none=True)
    figures = []
    for batch in batches:
        figures += [one.mean(1) for one in module.observe(batch, lambda loss: loss.backward())]
    return torch.stack(figures), [weight.grad for weight in module.heads.parameters() if weight.grad is not None]


@pytest.mark.parametrize(
    ("family", "kind"),
    [("llama", "logit"), *((family, "log_prob") for family in FAMILIES if not family.endswith("-window"))],
)
def test_a_padded_batch_is_its_samples_one_by_one(family, kind):
    model = tiny_model(family)
    more = [f"target.kind={kind}", "target.lead=2", "loss.smoothing=0.05"]
    torch.manual_seed(3)
    module = HeadTraining(model, load_config(["recipe=tiny", "backbone.model=some/model", *more]))
    batch = samples(LENGTHS)
    with attach(model) as module._attachment:
        figures, gradients = observed(module, [batch])
        wanted, slow = observed(module, [[sample] for sample in batch])
    assert torch.allclose(figures, wanted, rtol=1e-5, atol=1e-6)
    for mine, theirs in zip(gradients, slow, strict=True):
        assert (mine - theirs).abs().max() <= 2e-5 * theirs.abs().max()
    assert len(slow) == 2 * sum(window is None for window in module.spec.windows) and all(grad.any() for grad in slow)


def test_heads_that_nothing_trains_are_zeros():
    module = HeadTraining(tiny_model("gemma3"), load_config(["recipe=tiny", "backbone.model=some/model"]))
    windows = module.spec.windows
    assert {None} < set(windows)
    for head, window in zip(module.heads.layers, windows, strict=True):
        assert all(bool(weight.any()) == (window is None) for weight in head.parameters())


def test_a_backbone_of_windows_alone_has_nothing_to_train():
    with pytest.raises(ValueError, match="every layer of some/model has a window, and is never evicted from"):
        HeadTraining(tiny_model("mistral-window"), load_config(["recipe=tiny", "backbone.model=some/model"]))


def test_batches_and_workers_make_the_same_curve(backbone, tmp_path):
    more = ["optim.steps=3", "optim.accumulate=4", "heads.dtype_saved=float32"]
    plain = train(backbone, tmp_path / "plain", *more)
    quick = train(backbone, tmp_path / "quick", *more, "data.batch=2", "data.num_workers=2")
    for tag in ("loss", "recall", "val/loss"):
        assert plain[tag].keys() == quick[tag].keys()
        assert list(plain[tag].values()) == pytest.approx(list(quick[tag].values()), rel=1e-5)


def test_accumulated_samples_count_as_their_mean(backbone, tmp_path):
    """AdamW's first moment after one step is a tenth of the step's gradient."""
    more = ["optim.lr=1e-20", "optim.clip_value=0", "trainer.save_every=1"]
    states, losses = {}, {}
    for name, accumulate, steps in (("first", 1, 1), ("two", 1, 2), ("mean", 2, 1)):
        settings = [*more, f"optim.accumulate={accumulate}", f"optim.steps={steps}"]
        losses[name] = list(train(backbone, tmp_path / name, *settings)["loss"].values())
        (file,) = (tmp_path / name / "state").iterdir()
        states[name] = torch.load(file, weights_only=True)["optimizer_states"][0]["state"]
    assert losses["mean"] == pytest.approx([sum(losses["two"]) / 2], rel=1e-5)
    for i, state in states["mean"].items():
        first = states["first"][i]["exp_avg"] / 0.1
        second = states["two"][i]["exp_avg"] / 0.1 - 0.9 * first
        mean = state["exp_avg"] / 0.1
        assert mean.any() and torch.allclose(mean, (first + second) / 2, rtol=1e-3, atol=1e-5 * float(mean.abs().max()))


def test_a_backbone_of_half_precision_follows_the_curve(backbone, tmp_path):
    """The heads stay in float32, so nothing has to be scaled against underflow."""
    kinds = ("float32", "bfloat16")
    exact, half = (train(backbone, tmp_path / one, "optim.steps=4", f"backbone.dtype={one}") for one in kinds)
    assert exact["loss"] != half["loss"]
    for tag in ("loss", "val/loss"):
        assert list(half[tag].values()) == pytest.approx(list(exact[tag].values()), rel=0.02)


SPREAD = {
    "model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk",
    "model.layers.2": "disk", "model.norm": "disk", "lm_head": "disk",
}  # fmt: skip


def gradients(backbone: Path, device_map) -> list[torch.Tensor]:
    model, _ = load_backbone(str(backbone), dtype="float32", device="cpu", device_map=device_map)
    assert any(weight.is_meta for weight in model.parameters()) == (device_map is not None)
    torch.manual_seed(0)
    module = HeadTraining(model, load_config(["recipe=tiny", "backbone.model=some/model"]))
    sample = Sample(tuple(range(5, 65)), ((50, 60),))
    with attach(model) as module._attachment:
        module.observe([sample], lambda loss: loss.backward())
    return [weight.grad for weight in module.heads.parameters()]


def test_layers_that_are_brought_in_give_the_same_gradients(backbone):
    for mine, theirs in zip(gradients(backbone, SPREAD), gradients(backbone, None), strict=True):
        assert mine.any() and torch.equal(mine, theirs)


def test_an_adapter_cannot_be_merged_into_weights_that_are_elsewhere(backbone):
    with pytest.raises(ValueError, match=r"adapter='some/lora' cannot be merged into weights that device_map="):
        load_backbone(str(backbone), dtype="float32", device="cpu", device_map=SPREAD, adapter="some/lora")
