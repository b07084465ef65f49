"""LoCoCo's pool in training: its gradients and its loss, its resumed runs, and what the command lines make of it."""

from __future__ import annotations

import io
import json
import math
import sys
from pathlib import Path

import pytest
import torch
from policy_runs import backbone, make, tokens
from tiny_models import tiny_model
from tiny_tokenizer import save_tiny_backbone

from locret_kit import attach
from locret_kit.backbones.releases import CACHE
from locret_kit.cli.infer import main as infer
from locret_kit.cli.train import main as train
from locret_kit.config.recipes import load_config
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


@pytest.mark.parametrize("policy", ["h2o", "streaming", "snapkv(4,3)", "score=mas allocation=pyramid(3)"])
def test_training_reads_as_inference_does(policy, tmp_path):
    module, ids = training(f"pool.policy={policy}"), tokens(60)
    with attach(module.backbone):
        total, counted = module.read(ids, module.new_cache(), lambda loss: loss.backward())
        save_pool(module.pool, tmp_path, torch.float32)
        cache = make(
            f"{policy} merge=lococo({tmp_path})",
            16,
            length=None,
            chunk=8,
            stabilizers=2,
            local_len=0,
            positions="compact",
        )
        with torch.no_grad():
            logits = torch.cat(
                [
                    module.backbone(input_ids=torch.tensor([ids[i : i + 8]]), **{CACHE: cache}).logits[0]
                    for i in range(0, 59, 8)
                ]
            )
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


def test_twenty_steps_lower_the_loss_of_a_fixed_text():
    module, ids = training(), tokens(64)
    adamw = torch.optim.AdamW(module.pool.parameters(), lr=0.03)
    losses = []
    with attach(module.backbone):
        for _ in range(20):
            adamw.zero_grad()
            total, counted = module.read(ids, module.new_cache(), lambda loss: loss.backward())
            losses.append(total / counted)
            adamw.step()
        with torch.no_grad():
            total, counted = module.read(ids, module.new_cache())
    assert total / counted < losses[0] - 0.05, losses


def test_a_text_that_is_never_evicted_from_counts_nothing():
    module = training()
    with attach(module.backbone):
        assert module.read(tokens(24), module.new_cache()) == (0.0, 0)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("pool.policy=full", "pool.policy=full must evict"),
        ("pool.policy=ada-snapkv", "keep as many slots in every head"),
        ("pool.policy=merge", "merge nothing itself"),
        ("pool.policy=locret", "name them with pool.heads"),
        ("infer.positions=original", "infer.positions=original must be compact"),
        ("trainer.strategy=fsdp", "trainer.strategy=fsdp must be auto or ddp"),
        ("data.max_tokens=25", "data.max_tokens=25 must be above 25: infer.budget=16"),
        ("pool.kernel=4", "pool.kernel=4 must be odd"),
        ("pool.slots=16", "pool.slots=16 must be below infer.budget=16"),
        ("trains=pools", "trains=pools must be one of: heads, pool. Did you mean 'pool'?"),
    ],
)
def test_what_cannot_be_trained_is_said(given, said):
    with pytest.raises(ValueError) as caught:
        training(given)
    assert said in str(caught.value)


def test_a_backbone_with_windows_is_refused():
    cfg = load_config(["recipe=lococo-smollm2-135m", "backbone.model=tiny"])
    with pytest.raises(ValueError, match="has layers with a window"):
        PoolTraining(tiny_model("gemma3"), cfg)


# ---- the command lines ----------------------------------------------------------------------------------------------------

SETTINGS = [
    "recipe=lococo-smollm2-135m", "data.max_tokens=420", "data.val_samples=1", "trainer.accelerator=cpu", "pool.slots=8",
    "infer.budget=96", "infer.chunk=64", "infer.stabilizers=8", "optim.warmup_steps=1", "optim.lr=0.02",
    "trainer.val_every=2", "trainer.save_every=2",
]  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Path, Path]:
    """A tiny backbone and the run of its pool."""
    place = tmp_path_factory.mktemp("trained")
    model = save_tiny_backbone(place / "backbone")
    assert train([*SETTINGS, f"backbone.model={model}", f"out={place / 'run'}", "optim.steps=4"]) == 0
    return model, place / "run"


def test_a_run_exports_its_pool_and_its_curves(trained):
    model, out = trained
    curves = read_curves(out)
    assert set(curves["loss"]) == {1, 2, 3, 4} and set(curves["val/loss"]) == {2, 4}
    assert {"train/gate", "train/lr", "tok/s", "memory/peak_MiB", "val/loss_without_pool"} <= set(curves)
    config = load_pool(out / "pool").config
    assert (config.backbone, config.slots, config.kernel, config.policy) == (str(model), 8, 21, "h2o")
    assert config.inference["budget"] == 96
    assert json.loads((out / "pool" / "training.json").read_text())["trains"] == "pool"
    assert (out / "pool" / "curves.csv").exists() and not (out / "best").exists()


def test_a_run_that_goes_on_ends_as_one_that_was_not_interrupted(trained, tmp_path, monkeypatch):
    model, whole = trained
    step = PoolTraining.training_step

    def stop(self, *args):
        if self.global_step == 2:
            raise OSError("the power went")
        return step(self, *args)

    arguments = [*SETTINGS, f"backbone.model={model}", f"out={tmp_path}", "optim.steps=4"]
    with monkeypatch.context() as patch:
        patch.setattr(PoolTraining, "training_step", stop)
        assert train(arguments) == 1
    assert [file.name for file in (tmp_path / "state").iterdir()] == ["step=2.ckpt"]
    assert train([*arguments, "resume=auto"]) == 0
    one, other = read_curves(whole), read_curves(tmp_path)
    for tag in ("loss", "train/lr", "train/gate", "val/loss", "val/loss_without_pool"):
        assert one[tag] == other[tag], tag
    pools = [load_pool(run / "pool").state_dict() for run in (whole, tmp_path)]
    assert all(torch.equal(pools[0][name], pools[1][name]) for name in pools[0])


def answer(monkeypatch, capsys, *arguments: str) -> tuple[int, str, str]:
    monkeypatch.setattr(
        sys, "stdin", io.TextIOWrapper(io.BytesIO(b"The harbour was quiet when the boats came in. " * 30))
    )
    status = infer([*arguments, "--budget", "96", "--chunk", "64", "--max-new-tokens", "3"])
    out, err = capsys.readouterr()
    return status, out, err


def test_infer_reads_through_a_trained_pool(trained, tmp_path, monkeypatch, capsys):
    model, out = trained
    report = tmp_path / "report.json"
    flags = ["--model", str(model), "--policy", f"h2o merge=lococo({out / 'pool'})", "--report", str(report)]
    status, _, err = answer(monkeypatch, capsys, *flags)
    assert status == 0, err
    figures = json.loads(report.read_text())
    assert figures["evictions"] > 1 and figures["kept_rows"] == [96] * 3


def test_infer_says_what_is_wrong_with_a_pool_in_one_line(trained, tmp_path, monkeypatch, capsys):
    model, out = trained
    other = save_tiny_backbone(tmp_path / "other", num_hidden_layers=2)
    for named, folder, said in (
        ("no/such/model", "no/such/pool", "pool='no/such/pool' holds no pool"),
        (str(other), out / "pool", "n_layers: the pool has 3, the backbone has 2"),
        (str(model), out / "state", "holds no pool"),
    ):
        status, _, err = answer(
            monkeypatch, capsys, "--quiet", "--model", named, "--policy", f"h2o merge=lococo({folder})"
        )
        assert status == 1 and err.startswith("locret-infer: ") and said in err and len(err.splitlines()) == 1, err


def test_the_recipe_is_the_papers():
    cfg = load_config(["recipe=lococo-smollm2-135m"])
    assert (cfg.trains, cfg.pool.kernel, cfg.optim.steps, cfg.pool.policy) == ("pool", 21, 200, "h2o")
    assert cfg.infer.budget == 8 * cfg.pool.slots
    assert load_config(["recipe=tiny", "backbone.model=x"]).trains == "heads"
