"""Retaining heads as a press of kvpress, with and without kvpress: scores are those by which our cache keeps slots."""

import pytest
import torch
from tiny_heads import tiny_heads
from tiny_models import tiny_model
from transformers import DynamicCache

from locret_examples.press import LocretPress
from locret_kit import BoundedCache, attach
from locret_kit.backbones.libraries import CACHE
from locret_kit.heads import RetainingHeads
from locret_kit.runtime.session import prefill


@pytest.mark.parametrize("lookahead", [0, 3])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "phi3"])
def test_the_best_of_its_scores_are_what_our_cache_keeps(family, lookahead):
    """Ours reads q, k and v within attention; the press makes them of the layer's input, as kvpress hands it over."""
    model = tiny_model(family).double()
    press = LocretPress(heads=tiny_heads(model, 8, seed=2), stabilizers=5, lookahead=lookahead)
    press.post_init_from_model(model)
    ids = torch.randperm(97, generator=torch.Generator().manual_seed(1))[:60].tolist()  # no two alike: no equal scores
    cache, found = DynamicCache(), []

    def hook(module, args, given, output):
        keys, values = cache.layers[module.layer_idx].keys, cache.layers[module.layer_idx].values
        found.append(press.score(module, given["hidden_states"], keys, values, None, given))

    for layer in model.model.layers:
        layer.self_attn.register_forward_hook(hook, with_kwargs=True)
    model(torch.tensor([ids]), **{CACHE: cache})
    for layer in model.model.layers:
        layer.self_attn._forward_hooks.clear()
    policy = f"score=cis(lookahead={lookahead}) scope=window(5)"
    ours = BoundedCache(20, policy, press.heads, prompt_length=len(ids), positions="original", one_shot=True)
    with attach(model):
        prefill(model, ids, ours)
    for layer, score_BHT in enumerate(found):
        best_HS = score_BHT[0].topk(20).indices.sort(-1).values
        assert torch.equal(best_HS, ours.kept_positions(layer)[0].sort(-1).values.long())


def test_what_it_refuses(tmp_path):
    model = tiny_model("llama")
    with pytest.raises(ValueError, match="heads=... is missing"):
        LocretPress(0.5)
    with pytest.raises(ValueError, match="stabilizers=-1 must be at least 0"):
        LocretPress(0.5, tiny_heads(model, 8, seed=2), stabilizers=-1)
    with pytest.raises(ValueError, match="lookahead=-1 must be at least 0"):
        LocretPress(0.5, tiny_heads(model, 8, seed=2), lookahead=-1)
    with pytest.raises(ValueError, match="these heads are for tiny: n_kv_heads"):
        LocretPress(0.5, tiny_heads(model, 8, seed=2)).post_init_from_model(tiny_model("llama-mqa"))
    tiny_heads(model, 8, seed=2).save_pretrained(tmp_path / "heads")
    named = LocretPress(0.5, str(tmp_path / "heads"))
    with pytest.raises(ValueError, match="are not loaded"):
        named.score(model.model.layers[0].self_attn, torch.zeros(1, 2, 48), None, None, None, {})
    named.post_init_from_model(model)
    assert isinstance(named.heads, RetainingHeads)
