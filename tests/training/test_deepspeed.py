"""ZeRO stages 2 and 3 on two processes over gloo make the curve of one process, and share its state files.

The backbone computes in bfloat16, the heads in float32. A head has a weight of 7 elements, which do not divide by two, and
the second layer has a window, so that its head gets no gradient: one process leaves it alone, ZeRO decays it.
"""

import sys
from pathlib import Path

import pytest
import torch
from equal_runs import refused
from processes import same, train, train_to
from tiny_tokenizer import tiny_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

from locret_kit.training.strategy import import_deepspeed

SETTINGS = [
    "backbone.dtype=bfloat16", "heads.d_hidden=7", "data.max_tokens=384", "data.val_samples=1", "trainer.save_every=1",
    "optim.steps=4", "optim.weight_decay=0.1", "optim.clip_value=0.002",
]  # fmt: skip
TRAINED = "layers.0.", 1e-6
"""The layer that is trained, and how near its weights are."""


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """DeepSpeed, before a process is forked: each would take seconds for it."""
    import_deepspeed(torch.device("cpu"))


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


def same_state(alone: Path, out: Path) -> None:
    """Equal moments of the optimiser after the last step."""
    states = (torch.load(run / "state" / "step=4.ckpt", weights_only=True) for run in (alone, out))
    mine, theirs = (state["optimizer_states"][0] for state in states)
    assert mine["param_groups"] == theirs["param_groups"] and mine["state"].keys() == {0, 1}
    for i, moments in mine["state"].items():
        assert moments["step"] == theirs["state"][i]["step"] == 4
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.allclose(moments[key], theirs["state"][i][key], atol=1e-7, rtol=1e-3), (i, key)


def test_two_processes_make_the_curve_of_one(backbone, alone, tmp_path):
    train(SETTINGS, backbone, tmp_path / "two", 2, "trainer.strategy=deepspeed_stage_3_offload")
    same(alone, tmp_path / "two", *TRAINED)
    same_state(alone, tmp_path / "two")


def test_a_killed_run_goes_on_with_another_strategy(backbone, alone, tmp_path):
    """Step 1 on one process, 2 and 3 sharded weight by weight over two, 4 with the optimiser alone sharded."""
    out = tmp_path / "run"
    train_to(SETTINGS, backbone, out, (1, 1, "auto"), (3, 2, "deepspeed_stage_3"))
    train(SETTINGS, backbone, out, 2, "trainer.strategy=deepspeed_stage_2", "resume=auto")
    same(alone, out, *TRAINED)
    same_state(alone, out)


def test_without_deepspeed_one_line_names_the_extra(backbone, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    words = ["recipe=tiny", f"backbone.model={backbone}", f"out={tmp_path}", "trainer.strategy=deepspeed_stage_2"]
    said = "trainer.strategy=deepspeed_stage_2 needs DeepSpeed: in the clone, pip install -e '.[deepspeed]'"
    assert refused(capsys, *words) == f"locret-train: {said}"
