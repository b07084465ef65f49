"""The plan of a training step against the bytes that PyTorch's CPU allocator hands out while whole steps run.

In float32, where a CPU's matrix products take no scratch. Half precision is counted on the meta device in test_plan.py.
"""

from __future__ import annotations

import pytest
import torch
from equal_runs import refused
from training_plans import LARGER, measured
from transformers import AutoConfig

from locret_kit.cli import train
from locret_kit.planning.fitting_settings import TrainSetting, plan_training
from locret_kit.planning.inference_plan import BackboneSizes
from locret_kit.training.module import HeadTraining

SMALL = dict(hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=2)
WIDE = {**SMALL, "intermediate_size": 1024}
WINDOWS = dict(sliding_window=100, layer_types=["sliding_attention", "full_attention", "full_attention"], head_dim=16)


@pytest.mark.parametrize(
    ("kind", "sizes", "tokens", "answer", "d_hidden", "batch"),
    [
        ("llama", LARGER, 1024, 64, 256, 2),
        ("llama", {**SMALL, "head_dim": 64}, 512, 32, 16, 1),
        ("phi3", SMALL, 512, 150, 64, 2),  # more answer queries than one block
        ("gemma3_text", {**SMALL, **WINDOWS}, 512, 32, 64, 2),
        ("llama", WIDE, 2048, 32, 64, 3),
    ],
)
def test_the_peak_of_a_whole_step(kind, sizes, tokens, answer, d_hidden, batch):
    config = AutoConfig.for_model(kind, vocab_size=97, max_position_embeddings=2048, pad_token_id=0, **sizes)
    setting = TrainSetting(tokens, answer, batch, "float32", d_hidden)
    plan = plan_training(BackboneSizes.of(config), setting)
    peak, heads = measured(config, setting)
    assert plan.peak == pytest.approx(peak, rel=0.02)
    assert plan.heads == pytest.approx(heads, rel=0.001)  # beside a step count a weight


SAID = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.56 GiB of which 1.25 GiB is free. "
    "Including non-PyTorch memory, this process has 22.31 GiB memory in use. Of the allocated memory {held} is "
    "allocated by PyTorch, and 512.00 MiB is reserved by PyTorch but unallocated.\nMore lines."
)


def test_out_of_memory_in_a_run_is_one_line(backbone, tmp_path, monkeypatch, capsys):
    def full(*args, **more):
        raise torch.OutOfMemoryError(SAID.format(held="1.00 GiB"))

    monkeypatch.setattr(HeadTraining, "observe", full)
    settings = ["recipe=tiny", f"backbone.model={backbone}", "trainer.accelerator=cpu", f"out={tmp_path / 'run'}"]
    assert refused(capsys, *settings).startswith("locret-train: CUDA out of memory. Tried")


def test_a_cpu_without_memory_is_one_line(monkeypatch, capsys):
    def fit(*args):
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:124] . DefaultCPUAllocator: can't allocate memory: 9 bytes")

    monkeypatch.setattr("locret_kit.training.fit.fit", fit)
    assert train.main(["recipe=tiny", "backbone.model=x"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("locret-train: out of memory") and "memory: 9 bytes" in err and err.count("\n") == 1
