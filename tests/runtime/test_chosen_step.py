"""Width, length and batch that are chosen for a model and a device."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from locret_kit.cli.plan import resolve, shipped_configs
from locret_kit.config import recipes
from locret_kit.config.recipes import choose_for_device
from locret_kit.planning import fitting_settings
from locret_kit.planning.fitting_settings import (
    LONGEST,
    SHARE,
    WIDTHS,
    DoesNotFit,
    TrainSetting,
    choose_step,
    choose_width,
    plan_training,
)
from locret_kit.planning.inference_plan import BackboneSizes, head_parameters

GIB = 2**30


def backbone(name):
    return BackboneSizes.of(resolve(name)[0])


@pytest.mark.parametrize("name", shipped_configs())
def test_the_width_is_the_largest_within_its_share(name):
    own = backbone(name)
    width = choose_width(own)
    assert head_parameters(own.spec, width) <= SHARE * own.parameters
    assert width == WIDTHS[-1] or head_parameters(own.spec, 2 * width) > SHARE * own.parameters


@pytest.mark.parametrize("memory", [17, 20, 24, 80])
def test_the_longest_samples_then_the_most_of_them(memory):
    own, cap = backbone("llama3.1-8b"), memory * GIB
    setting = TrainSetting(LONGEST, d_hidden=1024)
    try:
        step = choose_step(own, setting, cap, tokens=None, batch=None, samples=4)
    except DoesNotFit as error:
        assert plan_training(own, replace(setting, tokens=256)).peak > cap and "backbone.weight_bits=4" in str(error)
        return
    assert plan_training(own, step).peak <= cap and step.tokens % 256 == 0 and 4 % step.batch == 0
    assert step.tokens == LONGEST or plan_training(own, replace(step, tokens=step.tokens + 256)).peak > cap
    assert step.batch == 4 or plan_training(own, replace(step, batch=2 * step.batch)).peak > cap


def test_a_number_that_is_given_stays():
    own, setting = backbone("llama3.1-8b"), TrainSetting(LONGEST, d_hidden=1024)
    step = choose_step(own, setting, 24 * GIB, tokens=1000, batch=None, samples=6)
    assert (step.tokens, step.batch) == (1000, 6)
    step = choose_step(own, setting, 24 * GIB, tokens=None, batch=3, samples=6)
    assert step.batch == 3 and plan_training(own, step).peak <= 24 * GIB
    with pytest.raises(DoesNotFit, match="a training step of 10000 tokens, 64 of them the answer needs"):
        choose_step(own, setting, 16 * GIB, tokens=10000, batch=None, samples=1)


def test_a_container_s_bound_is_its_memory(monkeypatch, tmp_path):
    monkeypatch.setattr(fitting_settings, "CGROUP", tmp_path)
    whole = recipes.machine_memory()
    for words, memory in (("max\n", whole), (f"{GIB // 4}\n", GIB // 4), (f"{2**60}\n", whole)):
        (tmp_path / "memory.max").write_text(words)
        assert recipes.machine_memory() == memory
        assert 0 < (fitting_settings.free_memory(torch.device("cpu")) or 1) <= memory


def test_it_says_what_it_chose(monkeypatch, capsys, tmp_path):
    config, _ = resolve("smollm2-135m")
    config.save_pretrained(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(recipes, "machine_memory", lambda: 16 * GIB)
    values = {"recipe": "auto", "backbone.model": str(tmp_path), "backbone.dtype": "float32", "optim.accumulate": 2}
    chosen = choose_for_device(values, ["heads.d_hidden", "data.max_tokens", "data.batch"])
    assert chosen == {"heads.d_hidden": 256, "data.max_tokens": 2048, "data.batch": 2}
    said = capsys.readouterr().err
    assert (
        "0.13e9 parameters, float32) on this CPU (16.00 GiB): chose heads.d_hidden=256 data.max_tokens=2048 data.batch=2; "
        in said
    )
    assert choose_for_device(values | {"data.max_tokens": 512}, ["data.batch"]) == {"data.batch": 2}
    assert "chose data.batch=2;" in capsys.readouterr().err
