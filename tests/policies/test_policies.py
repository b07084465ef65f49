"""Policies in the cache: pieces, windows, one eviction, EasyKV's decoding, entropy."""

import pytest
import torch
from policy_runs import LENGTH, POLICIES, backbone, by_kind, held, logits_of, make, run, tokens, turn
from tiny_models import tiny_model

from locret_kit import attach
from locret_kit.backbones.libraries import CACHE
from locret_kit.cache.due import PIECE
from locret_kit.policies.methods.sirllm import SLICE
from locret_kit.runtime.session import prefill

# ---- the cache ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", by_kind(POLICIES))
def test_pieces_do_not_matter(policy):
    """Neither those shorter than a block nor those that cross several boundaries."""
    model, whole, pieces = backbone(), make(policy), make(policy)
    cuts = turn(policy, [40, 41], [5, 13, 50], [1, 2, 79, 80], [])
    # No token twice: keys and scores of the first layer are those of the token alone, and rounding would decide between equals.
    ids = 2 + torch.randperm(95, generator=torch.Generator().manual_seed(0))[None, :LENGTH]
    with attach(model), torch.no_grad():
        want = prefill(model, ids[0].tolist(), whole)
        for a, b in zip([0, *cuts], [*cuts, LENGTH], strict=True):
            got = model(input_ids=ids[:, a:b], **{CACHE: pieces}).logits
            assert got.shape[1] == b - a
    assert held(pieces) == held(whole)
    assert (got[0, -1] - want).abs().max() < 1e-4


@pytest.mark.parametrize("policy", ["pyramidkv(6,3)", "ada-pyramid(6,3)", "h2o", "sirllm"])
def test_layers_with_a_window_take_no_part(policy):
    cache = run(policy, family="gemma3")
    full = [layer for layer in cache.layers if layer.window is None]
    assert 0 < len(full) < 6 and cache.counters.evictions > 1
    assert sum(layer.rows for layer in full) == len(full) * (24 + 4)
    assert sum(cache.context.budgets) == 24 * len(full)
    assert all(layer.statistics == layer.recent == 0 for layer in cache.layers if layer.window is not None)


def test_one_shot_reads_in_pieces():
    model, ids = backbone(), tokens(PIECE + 90)
    cache, done = make("snapkv", budget=40, length=len(ids), one_shot=True), []
    with attach(model), torch.no_grad():
        prefill(model, ids, cache, lambda at, total: done.append((at, cache.kept_rows[0])))
    assert done == [(PIECE, PIECE), (len(ids), 40)]


def test_easykv_decoding_keeps_the_prompt_and_evicts_of_the_answer():
    """EasyKV's mode 'decoding': the prompt stays whole, the answer has a budget of its own; by the newest token's attention
    here, among the answer's tokens alone."""
    model, P = backbone(), 20
    cache = make("tova", P + 8, length=P, chunk=1, stabilizers=0, local_len=0, decode_every=1)
    cache.pin(0, P)
    with attach(model), torch.no_grad():
        prefill(model, tokens(P), cache)
        for token in range(15):
            model(input_ids=torch.tensor([[5 + token]]), **{CACHE: cache})
            generated = min(token + 1, 8)
            for head in (head for layer in held(cache) for head in layer):
                assert head[:P] == list(range(P)) and len(head) == P + generated
    assert any(head[P:] != list(range(P + 7, P + 15)) for layer in held(cache) for head in layer)
    assert cache.counters.evictions == 15 - 8


# ---- token entropy ----------------------------------------------------------------------------------------------------------


SCALED = {
    "granite": dict(model_type="granite", logits_scaling=4.0),
    "cohere": dict(model_type="cohere", logit_scale=0.25),
    "gemma3": dict(model_type="gemma3_text", head_dim=8, final_logit_softcapping=2.0),
}


@pytest.mark.parametrize(
    "name, length", [*(("llama", n) for n in (1, 2, SLICE, SLICE + 2, LENGTH)), *((n, 9) for n in SCALED)]
)
def test_entropy_is_the_backbones_own(name, length):
    """While nothing is evicted: ``-log P`` of the full forward, in slices of logits, whatever is done to them at the end."""
    model, ids = tiny_model("llama", **SCALED.get(name, {})).double(), tokens(length)
    cache = make("sirllm", budget=100, length=length)
    widths = []
    hook = model.lm_head.register_forward_hook(lambda module, args, output: widths.append(output.shape[1]))
    try:
        logits_of(cache, ids, model=model)
    finally:
        hook.remove()
    logp = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
    want = [0.0, *(-logp[i, token].item() for i, token in enumerate(ids[1:]))]
    for layer in cache.layers:
        assert torch.allclose(layer.slots("scores")[0], torch.tensor(want), atol=1e-5)
    assert max(widths) <= SLICE


def test_entropy_needs_token_ids():
    model = backbone()
    with attach(model), pytest.raises(ValueError, match="give input_ids, not inputs_embeds"):
        model(inputs_embeds=torch.zeros(1, 4, 48, dtype=torch.double), **{CACHE: make("sirllm")})
    with attach(model), torch.no_grad():  # and the model is whole afterwards
        assert model(input_ids=torch.tensor([tokens(5)])).logits.shape == (1, 5, 97)
