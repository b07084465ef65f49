"""A later turn: many tokens behind the prompt in one forward."""

import pytest
import torch
from pairwise import pairs
from policy_runs import backbone, distinct_texts
from tiny_heads import tiny_heads

from locret_kit import BoundedCache, attach
from locret_kit.backbones.libraries import CACHE
from locret_kit.cache.step import read_block

POLICIES = ("locret", "streaming", "h2o", "tova", "ada-snapkv", "knorm", "sirllm", "full")


def positions(cache: BoundedCache) -> list[list[int]]:
    """What each head of each layer without a window holds. A window forgets when it needs the room."""
    layers = [i for i, rows in enumerate(cache.bounded) if rows.window is None]
    return [[int(at) for at in head] for i in layers for head in cache.kept_positions(i)[0]]


@pytest.mark.parametrize(("policy", "family", "decode_every"), pairs(POLICIES, ["llama", "gemma3"], [None, 5]))
def test_one_piece_equals_token_by_token(monkeypatch, policy, family, decode_every):
    model, ids = backbone(family), distinct_texts(130, seed=5)
    heads = tiny_heads(model, 32) if policy == "locret" else None
    calls, one = [], read_block
    monkeypatch.setattr(
        "locret_kit.cache.step.read_block", lambda cache, *args: calls.append(args[1].shape[2]) or one(cache, *args)
    )
    runs = []
    for pieces in ([1] * 70, [33, 1, 36]):
        cache = BoundedCache(
            24, policy, heads, chunk=16, prompt_length=60, stabilizers=4, local_len=6, decode_every=decode_every
        )
        with attach(model):
            model(input_ids=ids[:, :60], **{CACHE: cache})
            calls.clear()
            logits = [model(input_ids=piece, **{CACHE: cache}).logits for piece in ids[:, 60:].split(pieces, 1)]
        runs.append((torch.cat(logits, 1), positions(cache), len(calls)))
    (alone, kept_alone, many), (together, kept_together, few) = runs
    assert (alone - together).abs().max() < 1e-9
    assert kept_alone == kept_together
    assert few == many if policy == "sirllm" else few <= many / 3
