"""What every decoder keeps to: the logits, rows and counts of the plain forward, and a reason where it does not take a cache."""

from __future__ import annotations

import pytest
from decoder_runs import same
from policy_runs import backbone, make, tokens

from locret_kit.runtime.drivers import PlainDriver
from locret_kit.runtime.drivers.cpu import CpuDriver
from locret_kit.runtime.drivers.graph import GraphDriver

DECODERS = {
    "dynamic": lambda model, cache: PlainDriver(model),
    "cpu": lambda model, cache: CpuDriver(model),
    "graph": GraphDriver,
}


@pytest.mark.parametrize("name", DECODERS)
def test_logits_are_those_of_the_plain_forward(name):
    caches = [make("h2o", chunk=5) for _ in range(2)]
    assert same(backbone(), caches, tokens(), DECODERS[name], steps=12).name == name
    assert caches[0].counters.evictions >= 2


@pytest.mark.parametrize("name", ["cpu", "graph"])
def test_a_cache_that_is_not_taken(name):
    model, cache = backbone(), make("sirllm")
    cache.bind(model)
    assert "policy='sirllm'" in DECODERS[name](model, cache).refusal(cache)
