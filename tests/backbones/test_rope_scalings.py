"""Scaled rotary frequencies at both position schemes, against an oracle in float64 from the papers' formulas."""

import numpy as np
import pytest
import tiny_models
import torch
from pairwise import pairs
from rope_oracle import frequencies, logits
from tiny_decoders.checks import forced
from tiny_decoders.simulation import Plan
from tiny_models import tiny_model

from locret_kit import BoundedCache
from locret_kit.backbones.probe import describe

ORIGINAL, CONTEXT = 64, 256
"""Tokens of the original training, and those that the scaling is for."""
LONGROPE = tiny_models.LONGROPE["rope_parameters"]
SHORT, LONG = LONGROPE["short_factor"], LONGROPE["long_factor"]
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL}
SCALINGS = {
    "default": ("llama", {"rope_type": "default"}),
    "linear": ("llama", {"rope_type": "linear", "factor": 4.0}),
    "dynamic": ("llama", {"rope_type": "dynamic", "factor": 4.0}),
    "yarn": ("llama", YARN),
    "yarn with a factor on cos and sin": ("llama", {**YARN, "attention_factor": 0.7, "beta_fast": 16.0, "beta_slow": 2.0}),
    "llama3": (
        "llama",
        {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": ORIGINAL,
        },
    ),
    "longrope": ("llama", LONGROPE),
    "longrope of a fused projection": ("phi3", LONGROPE),
    "part of a head": ("phi3", {"rope_type": "default", "partial_rotary_factor": 0.5}),
    "longrope of part of a head": (
        "phi3", {**LONGROPE, "short_factor": SHORT[:2], "long_factor": LONG[:2], "partial_rotary_factor": 0.5},
    ),
}  # fmt: skip
NEW = 3


def tiny(name):
    family, rope = SCALINGS[name]
    context = ORIGINAL if rope["rope_type"] == "dynamic" else CONTEXT
    original = {"original_max_position_embeddings": ORIGINAL} if family == "phi3" else {}
    rope = {"rope_theta": 10000.0, **rope}
    return tiny_model(family, max_position_embeddings=context, rope_parameters=rope, **original).double()


@pytest.mark.parametrize(
    ("prompt", "budget", "name", "positions"),
    pairs([(48, 56), (160, 168), (160, 40)], SCALINGS, ["compact", "original"]),
)
def test_a_scaling_is_the_formula(name, prompt, budget, positions):
    model, chunk, tail = tiny(name), 32, 8
    ids = torch.randint(2, 97, (prompt + NEW,), generator=torch.Generator().manual_seed(prompt)).tolist()
    want = logits(model, ids, Plan("streaming", budget, chunk, tail, prompt), positions)
    cache = BoundedCache(
        budget, "streaming", chunk=chunk, local_len=tail, prompt_length=prompt, positions=positions, backend="reference"
    )  # fmt: skip
    off = (forced(model, ids[:prompt], cache, ids[prompt:]) - want[prompt - 1 :]).abs().max() / want.std()
    assert off < 1e-4


@pytest.mark.parametrize("name", SCALINGS)
def test_the_oracle_without_a_cache_is_transformers(name):
    """The oracle itself: a text that nothing is evicted from, read at once by the model alone."""
    model = tiny(name)
    ids = torch.randint(2, 97, (1, 100), generator=torch.Generator().manual_seed(0))
    want = logits(model, ids[0].tolist(), Plan("full", 100, 100, 0, 100), "original")
    off = (model(ids).logits[0] - want).abs().max() / want.std()
    assert off < 1e-4


def test_scalings_differ():
    """Every scaling turns otherwise than the plain frequencies, for a text beyond the original length."""
    plain, _ = frequencies({"rope_type": "default", "rope_theta": 10000.0}, 8, CONTEXT, 160)
    for name, (_, rope) in SCALINGS.items():
        if rope["rope_type"] != "default":
            rates, factor = frequencies({"rope_theta": 10000.0, **rope}, 8, ORIGINAL, 160)
            assert len(rates) != len(plain) or np.abs(rates - plain).max() > 1e-3 or factor != 1.0, name


def test_a_fixed_stretch_that_is_called_dynamic():
    """Hunyuan's, as older releases of transformers name it: frequencies are the model's own at any length."""
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 1.0, "alpha": 1000.0}
    rotary = (model := tiny_model("hunyuan_v1_dense", head_dim=8, rope_parameters=rope)).model.rotary_emb
    rotary.rope_type = "dynamic"
    for one in describe(model).ropes(model, 100):
        assert torch.equal(one.inv_freq, rotary.inv_freq)
