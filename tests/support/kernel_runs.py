"""Pieces that several tests of kernels cache share."""

import pytest
import torch
from policy_runs import logits_of, tokens
from tiny_models import tiny_model

from locret_kit import BoundedCache

LENGTH = 30


DECODED = 4


@pytest.fixture(scope="module")
def model(request):
    """Heads of 64, the smallest that the kernels take; two layers, or as many as a parameter says."""
    heads = dict(head_dim=64, num_attention_heads=2, num_key_value_heads=1)
    return tiny_model("llama", hidden_size=64, num_hidden_layers=getattr(request, "param", 2), **heads)


def run(
    model, policy: str, bits: int | None, backend: str, positions: str = "compact", heads=None
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    kept = dict(chunk=13, prompt_length=LENGTH, stabilizers=4, local_len=5)
    cache = BoundedCache(16, policy, heads, kv_bits=bits, backend=backend, positions=positions, **kept)
    logits = logits_of(cache, tokens(LENGTH), range(5, 5 + DECODED), model)
    return logits, [torch.cat(list(cache.kept_positions(layer)[0])) for layer in range(len(cache.layers))]
