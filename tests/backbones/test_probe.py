"""What the probe measures, what it leaves as it was, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from tiny_decoders.needed import Sizes
from tiny_decoders.rows import rows
from tiny_decoders.shrink import tiny_decoder
from tiny_models import FAMILIES, tiny_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from locret_kit import BoundedCache, HeadsConfig, RetainingHeads, attach
from locret_kit.backbones import probe
from locret_kit.backbones.decoder_attention import Rotation
from locret_kit.backbones.probe import describe
from locret_kit.backbones.releases import ASKED_FOR_STATES, CACHE
from locret_kit.backbones.spec import UnsupportedArchitecture, spec_of, text_config
from locret_kit.planning.backbone_sizes import BackboneSizes
from locret_kit.runtime.session import prefill

SIZES = dict(
    vocab_size=97, hidden_size=48, intermediate_size=64, num_hidden_layers=4, num_attention_heads=6, num_key_value_heads=2,
    max_position_embeddings=512, bos_token_id=1, eos_token_id=None, pad_token_id=0, head_dim=8,
)  # fmt: skip


def made(model_type, implementation="sdpa", **changes):
    """A tiny random model."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **{**SIZES, **changes})
    model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.mul_(6.0)
    return model


def tokens(length, seed=0):
    return torch.randint(2, 97, (1, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_measured_is_what_the_configuration_says(family):
    model = tiny_model(family)
    found = describe(model)
    assert found.spec == spec_of(text_config(model)) and found.unlike_llama is None and found.skips_rotation
    assert [call.layer for call in found.calls] == [*range(found.spec.n_layers)] and not any(
        call.shared for call in found.calls
    )


WITH_STATES = ["qwen3_5", "granitemoehybrid"] if ASKED_FOR_STATES else []


@pytest.mark.parametrize("name", ["jetmoe", "mimo_v2_flash", "moshi", "gemma4_text shared", *WITH_STATES])
def test_a_configuration_alone_gives_what_is_measured(name):
    """Experts of attention, heads that differ from layer to layer, a window that no mask has, states, shared keys."""
    model = tiny_decoder(*rows(Sizes())[name])
    spec, measured = BackboneSizes.of(text_config(model)).spec, describe(model).spec
    assert spec == measured and (spec.states, spec.state_sizes) == (measured.states, measured.state_sizes)


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


@pytest.mark.parametrize("window", [16, 100, 511])
def test_windows_are_read_off_the_mask(window):
    model = made("mistral", sliding_window=window)
    assert describe(model).spec.windows == (window,) * 4
    assert describe(made("mistral", sliding_window=512)).spec.windows == (None,) * 4, "as long as the trained context"


@pytest.mark.parametrize("size", [32, 100])
def test_chunks_are_read_off_the_mask(size):
    model = made(
        "llama4_text", attention_chunk_size=size, layer_types=["chunked_attention", "full_attention"] * 2,
        num_local_experts=2, intermediate_size_mlp=64,
    )  # fmt: skip
    layers = describe(model).spec.layers
    assert [(layer.window, layer.chunked) for layer in layers] == [(size, True), (None, False)] * 2


def test_a_rotation_of_neighbours_is_an_order_of_channels():
    order = describe(made("cohere")).rotations[0].order
    assert order == (0, 2, 4, 6, 1, 3, 5, 7)
    half = describe(made("glm4", partial_rotary_factor=0.5)).rotations[0].order
    assert half == (0, 2, 1, 3, 4, 5, 6, 7)


def test_layers_without_positions():
    found = describe(made("smollm3", no_rope_layers=[1, 1, 1, 0]))
    assert found.rotations[3] == Rotation() and found.rotations[0].module == "rotary_emb"


def test_a_rotation_by_other_means_is_not_none():
    """A layer whose queries turn with the position, though no rotary module is asked."""
    model = made("gpt2", n_embd=48, num_hidden_layers=2, n_head=6, n_positions=64)
    assert describe(model).rotations == (Rotation(),) * 2

    class Turning(nn.Module):
        def __init__(self, own):
            super().__init__()
            self.own = own

        def forward(self, x):
            qkv = self.own(x).unflatten(-1, (-1, 8))
            at = torch.arange(x.shape[1]).float()[:, None, None]
            even, odd = qkv[..., 0::2], qkv[..., 1::2]
            turned = torch.stack((even * at.cos() - odd * at.sin(), even * at.sin() + odd * at.cos()), -1).flatten(-2)
            out = qkv.clone()
            out[..., :12, :] = turned[..., :12, :]
            return out.flatten(-2)

    model.transformer.wpe.weight.zero_()
    for block in model.transformer.h:
        block.attn.c_attn = Turning(block.attn.c_attn)
    assert "rotates queries and keys in a way that the kit does not know" in describe(model).rotations


def test_it_is_measured_once_and_leaves_nothing(monkeypatch):
    model, calls = made("llama", rms_norm_eps=3e-6), []
    plain = probe._measured
    monkeypatch.setattr(probe, "_measured", lambda *args: calls.append(args) or plain(*args))
    before = [(name, module.training) for name, module in model.train().named_modules()]
    implementation, state = model.config._attn_implementation, torch.get_rng_state()
    found = describe(model)
    assert found.fuses_layers and describe(made("llama", rms_norm_eps=3e-6)) is found and len(calls) == 1
    assert [(name, module.training) for name, module in model.named_modules()] == before
    assert model.config._attn_implementation == implementation and torch.equal(torch.get_rng_state(), state)
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_residual_with_a_factor_is_not_fused():
    """Granite as it is published: a fused layer adds the residual without its factor."""
    assert describe(made("granite", residual_multiplier=1.0)).fuses_layers
    model = made("granite", residual_multiplier=0.22)
    assert not describe(model).fuses_layers
    ids = tokens(60)
    want = model(input_ids=ids).logits[0, -1]
    with attach(model):
        got = prefill(model, ids[0].tolist(), BoundedCache(80, "streaming", chunk=16, prompt_length=60))
    assert (got - want).abs().max() < 1e-4 * want.abs().max()


@pytest.mark.parametrize(
    ("model_type", "changes", "why"),
    [
        ("bloom", dict(n_layer=2, n_head=6), "not behind transformers' interface"),
        ("doge", {}, "a mask of the model's own"),
        ("mamba", dict(state_size=8), "no attention call"),
        ("diffllama", {}, "layers.0"),
        ("gemma", {"use_bidirectional_attention": True}, "tokens of a prompt see those after them"),
    ],
)
def test_refusals_name_the_reason(model_type, changes, why):
    model = made(model_type, "eager", **changes)
    with pytest.raises(UnsupportedArchitecture, match=f"model_type='{model_type}'.*{why}"):
        attach(model)
    assert model.config._attn_implementation != "locret"


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_a_plain_call_is_the_models_own_attention(implementation):
    """With sinks, which PyTorch's own attention does not know."""
    if implementation == "sdpa":
        model = made("llama", implementation)
    else:
        model = made("gpt_oss", implementation, num_local_experts=2, num_experts_per_tok=1, sliding_window=8)
        for layer in model.model.layers:
            layer.self_attn.sinks.normal_()
    ids = tokens(40)
    want = model(input_ids=ids).logits
    with attach(model):
        assert torch.equal(model(input_ids=ids).logits, want)


def test_attention_that_goes_elsewhere_is_an_error():
    model, ids = made("llama", rms_norm_eps=4e-6), tokens(20)
    with attach(model):
        attention = model.model.layers[2].self_attn
        attention.forward = lambda hidden_states, **rest: (torch.zeros_like(hidden_states), None)
        try:
            with pytest.raises(ValueError, match="some attention did not reach the cache"):
                model(input_ids=ids, **{CACHE: BoundedCache(40, "streaming")}, use_cache=True)
        finally:
            del attention.forward


def test_heads_have_the_sizes_of_their_layers():
    """Latent attention: values have other channels than keys."""
    model = made(
        "deepseek_v3", head_dim=4, num_key_value_heads=6, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4,
        v_head_dim=10, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, moe_intermediate_size=16,
        n_shared_experts=1, first_k_dense_replace=1,
    )  # fmt: skip
    spec = describe(model).spec
    config = HeadsConfig.for_backbone(spec, "tiny", 4)
    assert config.sizes == [[6, 6, 12, 10]] * 4 and spec == spec_of(model.config)
    heads = RetainingHeads(config)
    assert heads[0].fc1.in_features == 2 * 6 * 12 + 6 * 10
    heads.check_backbone(spec)
    with pytest.raises(ValueError, match="sizes: heads have"):
        heads.check_backbone(describe(made("llama")).spec)
