"""Pieces that several tests of plan train share."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM

from locret_kit.backbones.intercept import attach
from locret_kit.config.recipes import load_config
from locret_kit.planning.fitting_settings import TrainSetting
from locret_kit.samples import Sample
from locret_kit.training.module import HeadTraining

LARGER = dict(
    hidden_size=256, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4
)


def allocated(work: Callable[[], object]) -> tuple[int, int]:
    """``(most, left)``: bytes alive at once while ``work`` runs and after it, beside what was alive before."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most, now


def measured(config, setting: TrainSetting, backbone=None) -> tuple[int, int]:
    """``(all, heads)``: bytes at the peak of an optimiser step, those of a given backbone left out, and of the heads with
    gradients and moments."""
    torch.manual_seed(0)
    arguments = ["backbone.model=some/model", f"heads.d_hidden={setting.d_hidden}", "target.kind=log_prob"]
    cfg = load_config(["recipe=tiny", *arguments, "loss.top_weight=20"])
    made: list[torch.nn.Module] = [] if backbone is None else [backbone]
    model_bytes = 0
    if backbone is None:
        model_bytes = allocated(lambda: made.append(AutoModelForCausalLM.from_config(config, dtype=torch.float32)))[1]
    heads_bytes = allocated(lambda: made.append(HeadTraining(made[0], cfg)))[1]
    model, module = made[0].eval().requires_grad_(False), made[1]
    rng, answer = random.Random(0), (setting.tokens - setting.answer, setting.tokens)
    samples = [Sample(tuple(rng.randrange(97) for _ in range(setting.tokens)), (answer,)) for _ in range(setting.batch)]
    optimiser = torch.optim.AdamW(module.heads.parameters(), weight_decay=0.1)

    def step() -> None:
        module.observe(samples, lambda loss: loss.backward())
        optimiser.step()
        optimiser.zero_grad()

    with attach(model) as module._attachment:
        step()
        moments = sum(tensor.nbytes for state in optimiser.state.values() for tensor in state.values())
        trained = sum(weight.nbytes for weight in optimiser.state)
        step_bytes, left = allocated(step)
    assert left < 0.001 * step_bytes, "a step keeps nothing"
    return model_bytes + heads_bytes + moments + step_bytes, heads_bytes + moments + trained
