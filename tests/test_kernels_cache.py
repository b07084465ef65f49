"""A cache whose statistics and moves of rows go through Triton (interpreted) equals one that uses the references."""

from __future__ import annotations

import pytest
import torch
from interpreted import tiles
from tiny_models import COMMON
from transformers import AutoConfig, AutoModelForCausalLM

from locret_kit import BoundedCache, attach
from locret_kit.runtime.session import prefill

LENGTH = 41


@pytest.fixture(scope="module")
def model():
    """Heads of 64, the smallest that the kernels take."""
    torch.manual_seed(0)
    settings = {**COMMON, "hidden_size": 64, "head_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = AutoConfig.for_model("llama", **{**settings, "num_key_value_heads": 1})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.mul_(6.0)
    return model


def run(model, policy: str, bits: int | None, backend: str) -> tuple[torch.Tensor, list[torch.Tensor]]:
    ids = torch.randint(2, 97, (LENGTH,), generator=torch.Generator().manual_seed(0)).tolist()
    kept = dict(chunk=13, prompt_length=LENGTH, stabilizers=4, local_len=5)
    cache = BoundedCache(16, policy, kv_bits=bits, backend=backend, **kept)
    with attach(model):
        logits = prefill(model, ids, cache)
    return logits, [torch.stack(list(cache.kept_positions(layer)[0])) for layer in range(2)]


@pytest.mark.parametrize(
    ("policy", "bits"), [("h2o", None), ("roco", 4), ("snapkv(6,3)", 2), ("ada-snapkv(6,3)", None)]
)
def test_backends_agree(model, policy, bits):
    assert tiles.INTERPRETED
    mine, theirs = (run(model, policy, bits, backend) for backend in ("triton", "reference"))
    torch.testing.assert_close(mine[0], theirs[0], rtol=1e-3, atol=1e-3)
    assert all(torch.equal(a, b) for a, b in zip(mine[1], theirs[1], strict=True))


def test_a_backend_that_is_not_there(model):
    with pytest.raises(ValueError, match="backend='cuda' must be one of: reference, triton"):
        run(model, "h2o", None, "cuda")
