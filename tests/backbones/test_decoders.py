"""What every decoder keeps to: the logits, rows and counts of the plain forward, and a reason where it does not take a cache."""

from __future__ import annotations

import pytest
import torch
from policy_runs import backbone, held, make, tokens

from locret_kit import attach
from locret_kit.backbones.releases import CACHE
from locret_kit.runtime.cpu_decoder import CpuDecoder
from locret_kit.runtime.decoders import Decoding, DynamicDecoder, GraphDecoder
from locret_kit.runtime.session import prefill

STEPS = 12
DECODERS = {
    "dynamic": lambda model, cache: DynamicDecoder(model),
    "cpu": lambda model, cache: CpuDecoder(model),
    "graph": GraphDecoder,
}


@pytest.mark.parametrize("name", DECODERS)
def test_logits_are_those_of_the_plain_forward(name):
    model, caches = backbone(), [make("h2o", chunk=5) for _ in range(2)]
    with attach(model), torch.inference_mode():
        for cache in caches:
            prefill(model, tokens(), cache)
        decoder = DECODERS[name](model, caches[0])
        assert decoder.name == name and decoder.takes(caches[0]) is None
        for token in tokens(STEPS, seed=1):
            assert decoder.ready(caches[0])
            logits_1V = decoder([caches[0]], [token])
            plain = model(input_ids=torch.tensor([[token]]), **{CACHE: caches[1]}).logits[:, -1].float()
            torch.testing.assert_close(logits_1V, plain, rtol=0, atol=3e-6)
    assert held(caches[0]) == held(caches[1]) and caches[0].counters.evictions == caches[1].counters.evictions >= 2
    assert caches[0].get_seq_length() == caches[1].get_seq_length()


@pytest.mark.parametrize("name", ["cpu", "graph"])
def test_a_cache_that_is_not_taken(name):
    model, cache = backbone(), make("sirllm")
    cache.bind(model)
    assert "policy='sirllm'" in DECODERS[name](model, cache).takes(cache)


@pytest.mark.parametrize(
    ("settings", "decoding"),
    [(dict(policy="h2o"), "cpu"), (dict(policy="h2o", backend="reference"), "dynamic: backend='reference'")],
)
def test_the_choice_is_noted(settings, decoding):
    model, cache = backbone(), make(**settings)
    cache.bind(model)
    Decoding(model, cache)
    assert cache.counters.decoding == decoding
