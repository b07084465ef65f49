"""ZeRO stages 2 and 3 on two processes over gloo make the curve of one process, and share its state files.

The backbone computes in bfloat16, the heads in float32. A head has a weight of 7 elements, which do not divide by two, and
the second layer has a window, so that its head gets no gradient: one process leaves it alone, ZeRO decays it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
from forked import ranks, start, status_of
from tiny_tokenizer import tiny_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

from locret_kit import RetainingHeads
from locret_kit.cli.train import main
from locret_kit.training import callbacks
from locret_kit.training.scalars import read_curves
from locret_kit.training.zero import import_deepspeed

import_deepspeed(torch.device("cpu"))  # here, since the forked processes would each take seconds for it
SETTINGS = [
    "recipe=tiny",
    "backbone.dtype=bfloat16",
    "heads.d_hidden=7",
    "data.max_tokens=384",
    "data.val_samples=1",
    "trainer.accelerator=cpu",
    "trainer.val_every=2",
    "trainer.save_every=2",
    "optim.steps=4",
    "optim.weight_decay=0.1",
    "optim.clip_value=0.002",
    "heads.dtype_saved=float32",
]
TAGS = ("loss", "recall", "train/regression", "val/loss", "val/recall")


@pytest.fixture(scope="module")
def backbone(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("backbone")
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen2", vocab_size=400, hidden_size=18, intermediate_size=32, num_hidden_layers=2, num_attention_heads=3,
        num_key_value_heads=1, use_sliding_window=True, sliding_window=64, max_window_layers=1,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def train(backbone: Path, out: Path, world: int, *more: str) -> None:
    """A training of 4 samples an optimiser step on ``world`` processes."""
    arguments = [*SETTINGS, f"backbone.model={backbone}", f"out={out}", f"optim.accumulate={4 // world}", *more]
    log = out.parent / f"{out.name}.log"
    if world == 1:
        statuses = [status_of(start(lambda: main(arguments), log))]
    else:
        statuses = ranks(lambda: main([*arguments, f"trainer.devices={world}"]), world, log)
    assert statuses == [0] * world, log.read_text()[-4000:]


def same(a: Path, b: Path) -> None:
    """Equal curves to 1e-5 and equal heads of the layer that is trained."""
    first, second = read_curves(a), read_curves(b)
    for tag in TAGS:
        assert first[tag].keys() == second[tag].keys(), tag
        for step in first[tag]:
            assert abs(first[tag][step] - second[tag][step]) < 1e-5 * max(1, abs(first[tag][step])), (tag, step)
    mine, theirs = (RetainingHeads.from_pretrained(str(path / "heads")).state_dict() for path in (a, b))
    assert mine.keys() == theirs.keys() >= {"layers.0.fc1.weight", "layers.0.fc2.weight"}
    trained = [name for name in mine if name.startswith("layers.0.")]
    assert all(torch.allclose(mine[name], theirs[name], atol=1e-6, rtol=1e-4) for name in trained)


@pytest.fixture(scope="module")
def alone(backbone, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("alone") / "run"
    train(backbone, out, 1)
    assert len(read_curves(out)["loss"]) == 4
    return out


@pytest.mark.parametrize("strategy", ["deepspeed_stage_2", "deepspeed_stage_3", "deepspeed_stage_3_offload"])
def test_two_processes_make_the_curve_of_one(backbone, alone, tmp_path, strategy):
    train(backbone, tmp_path / "two", 2, f"trainer.strategy={strategy}")
    same(alone, tmp_path / "two")
    states = [torch.load(run / "state" / "step=4.ckpt", weights_only=True) for run in (alone, tmp_path / "two")]
    mine, theirs = (state["optimizer_states"][0] for state in states)
    assert mine["param_groups"] == theirs["param_groups"] and mine["state"].keys() == {0, 1}
    for i, moments in mine["state"].items():
        assert moments["step"] == theirs["state"][i]["step"] == 4
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.allclose(moments[key], theirs["state"][i][key], atol=1e-7, rtol=1e-3), (i, key)


def test_one_process_that_keeps_its_weights_in_the_cpus_memory(backbone, alone, tmp_path):
    train(backbone, tmp_path / "one", 1, "trainer.strategy=deepspeed_stage_3_offload")
    same(alone, tmp_path / "one")


@pytest.mark.parametrize("strategies", [("auto", "deepspeed_stage_3"), ("deepspeed_stage_3", "deepspeed_stage_2")])
def test_a_killed_run_goes_on_with_another_strategy(backbone, alone, tmp_path, strategies):
    out, save = tmp_path / "run", callbacks.SaveEvery.on_train_batch_start

    def save_and_die(self, trainer, pl_module, *rest):
        save(self, trainer, pl_module, *rest)
        if trainer.global_step == 2:
            trainer.strategy.barrier()
            os._exit(9)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(callbacks.SaveEvery, "on_train_batch_start", save_and_die)
        with pytest.raises(AssertionError, match="9"):
            train(backbone, out, 1 if strategies[0] == "auto" else 2, f"trainer.strategy={strategies[0]}")
    assert [path.name for path in (out / "state").iterdir()] == ["step=2.ckpt"]
    train(backbone, out, 2, f"trainer.strategy={strategies[1]}", "resume=auto")
    same(alone, out)


def test_without_deepspeed_one_line_names_the_extra(backbone, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    more = [f"backbone.model={backbone}", f"out={tmp_path}", "trainer.strategy=deepspeed_stage_2"]
    assert main([*SETTINGS, *more]) == 1
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("locret-train:")]
    assert said == [
        "locret-train: trainer.strategy=deepspeed_stage_2 needs DeepSpeed: in the clone, pip install '.[deepspeed]'"
    ]
