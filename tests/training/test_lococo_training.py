"""LoCoCo's pool in training: its gradients and its loss, its resumed runs, and what the command lines make of it."""

import json
import math

import pytest
import torch
from policy_runs import backbone, make, tokens

from locret_kit import attach
from locret_kit.backbones.libraries import CACHE
from locret_kit.cli.train import main as train
from locret_kit.config.recipes import known_recipes, load_config, read_recipe
from locret_kit.policies.methods.lococo import load_pool, save_pool
from locret_kit.training.fit import read_curves
from locret_kit.training.pool import PoolTraining


def training(*more: str) -> PoolTraining:
    """A pool of 4 slots of a budget of 16, in training on the tiny backbone in float64."""
    given = {"infer.budget": 16, "infer.chunk": 8, "infer.stabilizers": 2, "pool.slots": 4, "pool.kernel": 5}
    given |= dict(text.split("=", 1) for text in more)
    model = backbone()
    torch.manual_seed(5)
    cfg = load_config(["recipe=lococo-smollm2-135m", "backbone.model=tiny", *(f"{k}={v}" for k, v in given.items())])
    return PoolTraining(model, cfg)


@pytest.mark.parametrize("policy", ["h2o", "score=mas allocation=pyramid(3)"])
def test_training_reads_as_inference_does(policy, tmp_path):
    module, ids = training(f"pool.policy={policy}"), tokens(60)
    with attach(module.backbone):
        total, counted = module.read(ids, module.new_cache(), lambda loss: loss.backward())
        save_pool(module.pool, tmp_path, torch.float32)
        given = dict(length=None, chunk=8, stabilizers=2, local_len=0, positions="compact")
        cache = make(f"{policy} merge=lococo({tmp_path})", 16, **given)
        with torch.no_grad():
            pieces = (torch.tensor([ids[i : i + 8]]) for i in range(0, 59, 8))
            logits = torch.cat([module.backbone(input_ids=x, **{CACHE: cache}).logits[0] for x in pieces])
    want = torch.nn.functional.cross_entropy(logits[24:59], torch.tensor(ids[25:]), reduction="sum")
    assert counted == 35 and total == pytest.approx(float(want), rel=1e-6)
    assert all(x.grad is not None and bool(x.grad.abs().sum() > 0) for x in module.pool[0].parameters())
    assert all(x.grad is None for x in module.backbone.parameters())


def test_gradients_are_those_of_finite_differences():
    """Of a text with one eviction, where nothing is truncated; along each layer's own gradient."""
    module = training()
    module.pool.double()
    ids = tokens(33)
    with attach(module.backbone):
        module.read(ids, module.new_cache(), lambda loss: loss.backward())
        for layer in module.pool.layers:
            weights = list(layer.parameters())
            length = math.sqrt(sum(float(x.grad.square().sum()) for x in weights))
            losses = []
            for step in (0.002, -0.004):
                with torch.no_grad():
                    for x in weights:
                        x += step / length * x.grad
                    total, counted = module.read(ids, module.new_cache())
                losses.append(total / counted)
            with torch.no_grad():
                for x in weights:
                    x += 0.002 / length * x.grad
            assert length > 1e-3 and (losses[0] - losses[1]) / 0.004 == pytest.approx(length, rel=5e-3)


@pytest.mark.parametrize("name", [name for name in known_recipes() if read_recipe(name).values.get("trains") == "pool"])
def test_every_recipe_of_a_pool_can_be_trained(name):
    PoolTraining(backbone(), load_config([f"recipe={name}", "backbone.model=tiny"]))


# ---- the command lines ----------------------------------------------------------------------------------------------------

SETTINGS = [
    "recipe=lococo-smollm2-135m", "data.max_tokens=420", "data.val_samples=1", "trainer.accelerator=cpu", "pool.slots=8",
    "infer.budget=96", "infer.chunk=64", "infer.stabilizers=8", "optim.warmup_steps=1", "optim.lr=0.02",
    "trainer.val_every=2", "trainer.save_every=2",
]  # fmt: skip


def test_a_run_exports_its_pool_and_its_curves(backbone, tmp_path):
    out = tmp_path / "run"
    assert train([*SETTINGS, f"backbone.model={backbone}", f"out={out}", "optim.steps=4"]) == 0
    curves = read_curves(out)
    assert set(curves["loss"]) == {1, 2, 3, 4} and set(curves["val/loss"]) == {2, 4}
    assert {"train/gate", "train/lr", "tok/s", "memory/peak_MiB", "val/loss_without_pool"} <= set(curves)
    config = load_pool(out / "pool").config
    assert (config.backbone, config.slots, config.kernel, config.policy) == (str(backbone), 8, 21, "h2o")
    assert config.inference["budget"] == 96
    assert json.loads((out / "pool" / "training.json").read_text())["trains"] == "pool"
    assert (out / "pool" / "curves.csv").exists() and not (out / "best").exists()


def test_steps_that_teach_nothing_are_said_once(backbone, tmp_path, capsys):
    changed = {"infer.budget": "250", "data.lengths": "[256]", "data.val_samples": "0", "optim.steps": "2"}
    given = dict(word.split("=", 1) for word in SETTINGS) | {"backbone.model": str(backbone), "out": str(tmp_path)}
    assert train([f"{key}={value}" for key, value in (given | changed).items()]) == 0
    said = "warning: step 1 teaches nothing: infer.budget=250 and infer.chunk=64 evict nothing of its texts, "
    err = capsys.readouterr().err
    assert err.count("teaches nothing") == 1 and said in err
