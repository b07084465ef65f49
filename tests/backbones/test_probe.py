"""What the probe measures, what it leaves as it was, and what it refuses."""

import pytest
import torch
from strangers import tokens
from tiny_decoders.needed import Sizes
from tiny_decoders.rows import rows
from tiny_decoders.shrink import tiny_decoder
from tiny_models import FAMILIES, tiny_model

from locret_kit import BoundedCache, attach
from locret_kit.backbones import probe
from locret_kit.backbones.libraries import ASKED_FOR_STATES, CACHE
from locret_kit.backbones.probe import describe
from locret_kit.backbones.spec import UnsupportedArchitecture, spec_of, text_config
from locret_kit.cache.batch import BatchCache
from locret_kit.planning.backbone_sizes import BackboneSizes


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_measured_is_what_the_configuration_says(family):
    model = tiny_model(family)
    found = describe(model)
    assert found.spec == spec_of(text_config(model)) and found.unlike_llama is None and found.skips_rotation
    assert [(call.layer, call.shared) for call in found.calls] == [(n, False) for n in range(found.spec.n_layers)]


WITH_STATES = ["qwen3_5", "granitemoehybrid"] if ASKED_FOR_STATES else []


@pytest.mark.parametrize("name", ["jetmoe", "mimo_v2_flash", "moshi", "gemma4_text shared", *WITH_STATES])
def test_a_configuration_alone_gives_what_is_measured(name):
    """Experts of attention, heads that differ from layer to layer, a window that no mask has, states, shared keys."""
    model = tiny_decoder(*rows(Sizes())[name])
    spec, measured = BackboneSizes.of(text_config(model)).spec, describe(model).spec
    assert spec == measured and (spec.states, spec.state_sizes) == (measured.states, measured.state_sizes)


@pytest.mark.parametrize("name", ["gpt2", "opt", "gptj", "bart", "llama"])
def test_a_text_beyond_a_table_of_positions_is_refused(name):
    """A refusal where positions are looked up, and none where they are computed."""
    model, ids = tiny_decoder(name, {}, sizes := Sizes(layers=1, context=32)), torch.full((1, 34), 5)
    assert describe(model).places == (None if name == "llama" else sizes.context)
    with attach(model), torch.no_grad():
        cache = BoundedCache(16, "h2o", chunk=8, local_len=2, positions="original")
        model(ids[:, :32], **{CACHE: cache})
        batch = BatchCache(16, "h2o", chunk=8, local_len=2)
        if name in ("gpt2", "opt"):
            model(ids[:, :32], **{CACHE: batch})
        long = BoundedCache(16, "h2o", chunk=8, local_len=2, prompt_length=33)
        for one in (cache, long, *([batch] if batch.texts else [])) if name != "llama" else ():
            with pytest.raises(
                ValueError, match=r"a text of 33 tokens must have at most 32, the positions in the model's"
            ):
                model(ids[:, :1], **{CACHE: one})


def test_norms_after_the_rotation_are_found_once_they_have_weights():
    """Untrained ones leave the rotation what it is, and another model of the class is asked again."""
    plain, trained = (tiny_decoder(*rows(Sizes())["hunyuan_v1_dense"]) for _ in range(2))
    for layer in plain.model.layers:
        layer.self_attn.query_layernorm.weight.fill_(1.0)
        layer.self_attn.key_layernorm.weight.fill_(1.0)
    assert not describe(plain).has_weighted_rotations and describe(plain).unlike_llama is None
    assert describe(trained).has_weighted_rotations


def test_a_window_below_the_probes_text_loses_nothing():
    sizes = Sizes(window=4)
    model = tiny_decoder(*rows(sizes)["gemma4_text shared"], sizes)
    assert describe(model).spec.windows == (4, None, 4, None)


def test_it_is_measured_once_and_leaves_nothing(monkeypatch):
    model, calls = tiny_model("llama", rms_norm_eps=3e-6), []
    plain = probe._measured
    monkeypatch.setattr(probe, "_measured", lambda *args: calls.append(args) or plain(*args))
    before = [(name, module.training) for name, module in model.train().named_modules()]
    implementation, state = model.config._attn_implementation, torch.get_rng_state()
    found = describe(model)
    assert found.fuses_layers and describe(tiny_model("llama", rms_norm_eps=3e-6)) is found and len(calls) == 1
    assert [(name, module.training) for name, module in model.named_modules()] == before
    assert model.config._attn_implementation == implementation and torch.equal(torch.get_rng_state(), state)
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_refusal_names_the_reason():
    """Others are in ``test_architectures.py``."""
    model = tiny_model("llama", model_type="gemma", use_bidirectional_attention=True)
    with pytest.raises(UnsupportedArchitecture, match="model_type='gemma'.*tokens of a prompt see those after them"):
        attach(model)
    assert model.config._attn_implementation != "locret"


def test_attention_that_goes_elsewhere_is_an_error():
    model, ids = tiny_model("llama", rms_norm_eps=4e-6), tokens(20)
    with attach(model):
        attention = model.model.layers[2].self_attn
        attention.forward = lambda hidden_states, **rest: (torch.zeros_like(hidden_states), None)
        try:
            with pytest.raises(ValueError, match="some attention did not reach the cache"):
                model(input_ids=ids, **{CACHE: BoundedCache(40, "streaming")}, use_cache=True)
        finally:
            del attention.forward


def test_positions_are_found_beside_channels_that_are_far_larger(monkeypatch):
    """Biases of trained models are hundreds. Half precision rounds what they are by more than all else is."""
    monkeypatch.setattr(probe, "_KNOWN", {})
    model = tiny_model("qwen2", rms_norm_eps=5e-6).bfloat16()
    for layer in model.model.layers:
        for linear in (layer.self_attn.q_proj, layer.self_attn.k_proj):
            linear.bias.view(-1, 8)[:, 3] = 500.0  # the slowest of the channels that turn
    assert describe(model).rotations == describe(tiny_model("qwen2", rms_norm_eps=6e-6)).rotations
    learned = tiny_decoder(*rows(Sizes())["gpt2"]).bfloat16()
    learned.transformer.ln_f.bias[0] = 500.0
    assert describe(learned).takes_positions


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_hides_nothing(dtype, monkeypatch):
    """A rotation within the attention itself, and states in modules, that no cache holds."""
    monkeypatch.setattr(probe, "_KNOWN", {})
    turns, keeps = (tiny_decoder(*rows(Sizes())[name]).to(dtype) for name in ("gptj", "recurrent_gemma"))
    assert "rotates queries and keys in a way that the kit does not know" in describe(turns).unknown_rotation
    with pytest.raises(UnsupportedArchitecture, match="its modules keep the state of a text"):
        describe(keeps)
