"""MLPs in slices: what they give, how many rows they see, where they are left whole, and that nothing of it stays."""

import accelerate
import pytest
import torch
from strangers import tokens
from tiny_models import FAMILIES, tiny_model
from torch import nn

from locret_kit import attach
from locret_kit.backbones import mlp_slices
from locret_kit.backbones.decoder_modules import decoder_of
from locret_kit.backbones.probe import describe


@pytest.fixture(autouse=True)
def short(monkeypatch) -> int:
    """Slices of 7 rows, which divide no length below."""
    monkeypatch.setattr(mlp_slices, "SLICE", 7)
    return mlp_slices.SLICE


def last_product(model) -> nn.Module:
    describe(model)  # reads a few tokens, once
    return decoder_of(model).layers[1].mlp.down_proj


def rows_seen(module: nn.Module) -> list[int]:
    """A list that grows by the rows of every call of ``module``."""
    seen: list[int] = []
    module.register_forward_hook(lambda module, args, out: seen.append(args[0].numel() // args[0].shape[-1]))
    return seen


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_slices_give_what_the_whole_gives(family):
    model, ids = tiny_model(family).double(), tokens(19, batch=2)
    want = model(input_ids=ids).logits
    seen = rows_seen(last_product(model))
    with attach(model):
        got = model(input_ids=ids).logits
        assert seen == [7] * 5 + [3]
        model(input_ids=ids[:, :1])
        assert seen[6:] == [2], "a decoded token is one call"
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    assert torch.equal(model(input_ids=ids).logits, want)
    assert seen[7:] == [38], "and after it the model is as it was"


def test_an_mlp_of_another_form_is_left_alone():
    model, ids = tiny_model("gpt_neox", num_key_value_heads=6), tokens(30)
    describe(model)
    want, seen = model(input_ids=ids).logits, rows_seen(model.gpt_neox.layers[-1].mlp)
    with attach(model):
        assert torch.equal(model(input_ids=ids).logits, want)
    assert seen == [30]


# ---- left whole ----------------------------------------------------------------------------------------------------


def test_a_graph_keeps_everything_anyway():
    model = tiny_model("llama")
    embedded, seen = model.get_input_embeddings()(tokens(30)), rows_seen(last_product(model))
    with attach(model):
        model(inputs_embeds=embedded.requires_grad_()).logits.sum().backward()
        assert seen == [30] and embedded.grad.any()
        with torch.no_grad():
            model(inputs_embeds=embedded)
    assert seen[1:] == [7, 7, 7, 7, 2]


@torch.no_grad()
def test_weights_that_come_anew_for_every_call():
    """accelerate brings in what lies elsewhere; ZeRO-3 gathers, and then every process must call as often."""
    model, ids = tiny_model("llama"), tokens(30)
    want = model(input_ids=ids).logits
    model.model.layers[1].mlp.gate_proj.weight.ds_id = 3  # as ZeRO-3 marks what it has sharded
    seen = [rows_seen(layer.mlp.down_proj) for layer in model.model.layers]
    with attach(model):
        model(input_ids=ids)
    assert [len(calls) for calls in seen] == [5, 1, 5]
    accelerate.cpu_offload(model, torch.device("cpu"))
    assert model.model.layers[0].mlp.up_proj.weight.is_meta
    with attach(model):
        assert torch.equal(model(input_ids=ids).logits, want)
    assert [calls[-1] for calls in seen] == [30, 30, 30]
