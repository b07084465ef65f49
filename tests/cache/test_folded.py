"""Retaining heads folded into the projections before them: the same products, for the layers that allow it, of the weights that
there are now."""

import gzip
from copy import deepcopy
from pathlib import Path
from unittest import mock

import pytest
import torch
from checkout import BACKBONE, HEADS
from decoder_runs import plain
from interpreted import common  # noqa: F401  (before anything else imports the kernels)
from policy_runs import tokens
from tiny_heads import tiny_heads
from tiny_lora import adapted
from tiny_models import tiny_model
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from locret_kit import BoundedCache, RetainingHeads, attach
from locret_kit.backbones.fused_layers import REFERENCE
from locret_kit.backbones.probe import describe
from locret_kit.backbones.products import projections
from locret_kit.cache.backend import TritonBackend
from locret_kit.cache.folded import fold_heads, folded
from locret_kit.cache.pages import PagePool
from locret_kit.runtime.drivers.graph import GraphDriver
from locret_kit.runtime.session import prefill

PROJECT = Path(__file__).resolve().parents[2]
SIZES = dict(hidden_size=64, head_dim=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1)


def fold(model, heads=None):
    heads = tiny_heads(model, 24) if heads is None else heads
    return fold_heads(model, heads, describe(model))


@pytest.mark.parametrize("family", ["llama", "phi3", "qwen2"])
def test_equal_in_float64(family):
    """Projections apart, in one matrix, and with biases."""
    model = tiny_model(family, num_key_value_heads=2).double()
    heads, layer = tiny_heads(model, 24), 1
    attention, x = model.model.layers[layer].self_attn, torch.randn(1, 5, model.config.hidden_size).double()
    if family == "qwen2":
        for name in ("q_proj", "k_proj", "v_proj"):
            torch.nn.init.normal_(getattr(attention, name).bias)
    q, k, v = (one(x).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2) for one in projections(attention))
    made = folded(heads[layer], projections(attention)).product(x)
    torch.testing.assert_close(made.hidden_BTR, heads[layer].hidden(q, k, v), rtol=1e-12, atol=1e-12)
    assert made.scores().shape == (1, 2, 5) and None not in fold(model, heads)


def hooked(model):
    model.model.layers[0].self_attn.q_proj.register_forward_hook(lambda *given: None)
    return model


def wrapped(model):
    class Codes(torch.Tensor):
        pass

    weight = model.model.layers[0].self_attn.q_proj.weight
    model.model.layers[0].self_attn.q_proj.weight = torch.nn.Parameter(weight.detach().as_subclass(Codes))
    return model


@pytest.mark.parametrize(
    ("model", "layers"),
    [
        (lambda: tiny_model("llama"), [True, True]), (lambda: tiny_model("qwen3"), [False, False]),
        (lambda: tiny_model("gemma3_text"), [False, False]),
        (lambda: adapted(tiny_model("llama")).base_model.model, [False, False]),
        (lambda: hooked(tiny_model("llama")), [False, True]), (lambda: wrapped(tiny_model("llama")), [False, True]),
    ],
    ids=["plain", "norms", "other norms", "adapters", "a hook", "weights of another kind"],
)  # fmt: skip
def test_what_is_not_folded(model, layers):
    made = model()
    assert [one is not None for one in fold(made)][:2] == layers


def test_weights_that_change_are_folded_anew():
    """However they are written to; and what has not changed is made once."""
    model = tiny_model("llama")
    heads = tiny_heads(model, 24)
    before = fold(model, heads)
    assert fold(model, heads) is before
    for weight in (model.model.layers[1].self_attn.v_proj.weight, heads[0].fc1.weight):
        weight.data[2, 3] += 1
        after = fold(model, heads)
        assert after is not before and not all(
            torch.equal(a.weight_RC, b.weight_RC) for a, b in zip(before, after, strict=True)
        )
        before = after


@pytest.fixture
def on_a_card(monkeypatch):
    """A CPU that takes a card's way."""
    monkeypatch.setattr(TritonBackend, "folds", lambda self, device: True)
    monkeypatch.setattr(TritonBackend, "operations", lambda self, x: REFERENCE)


def run(model, heads, way: str, backend: str = "triton") -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Logits of the last tokens, and the scores of what is kept then."""
    caches = [
        BoundedCache(16, "locret", heads, backend=backend, chunk=13, prompt_length=22 + n, stabilizers=4, local_len=5)
        for n in range(1 if way == "graph" else 2)
    ]  # fmt: skip
    pool = PagePool(len(caches))
    with attach(model), torch.inference_mode():
        for n, cache in enumerate(caches):
            prefill(model, tokens(22 + n), cache)
            if way == "pages":
                pool.enter(cache)
            assert deepcopy(cache).context.folded is cache.context.folded, "beams share them"
        step = GraphDriver(model, caches[0]) if way == "graph" else plain(model)
        logits = torch.stack([step(caches, [token] * len(caches)) for token in (5, 6, 7)])
    return logits, [rows.slots("scores") for cache in caches for rows in cache.bounded]


@pytest.mark.parametrize("way", ["graph", "texts", "pages"])
def test_scores_are_those_of_the_heads(way, on_a_card):
    model = tiny_model("llama", **SIZES)
    heads = tiny_heads(model, 24)
    with mock.patch.object(type(heads[0]), "hidden", lambda *given: pytest.fail("a head was asked")):
        logits, scores = run(model, heads, way)
    expected, own = run(model, heads, way, "reference")
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    assert all(x.abs().max() > 1e-3 for x in scores)
    for mine, theirs in zip(scores, own, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_the_demos_slots_in_bfloat16():
    """As a card computes: products summed in float32 and rounded once. Of the tokens of a real text each head keeps an eighth."""
    model = AutoModelForCausalLM.from_pretrained(PROJECT / BACKBONE, dtype=torch.float32).eval()
    heads = RetainingHeads.from_pretrained(PROJECT / HEADS).float()
    with gzip.open(PROJECT / "data/jargon.txt.gz", "rt") as text:
        ids = AutoTokenizer.from_pretrained(PROJECT / BACKBONE)(text.read(32000)[20000:]).input_ids[:1024]
    inputs: list[torch.Tensor] = []
    for layer in model.model.layers:
        layer.self_attn.q_proj.register_forward_pre_hook(lambda module, given: inputs.append(given[0]))

    def rounded(x):
        return x.bfloat16().float()

    def slots(score_HT):  # the newer one of equals
        order = (score_HT.double() + 1e-9 * torch.arange(score_HT.shape[-1])).topk(len(ids) // 8).indices
        return torch.zeros(score_HT.shape, dtype=torch.bool).scatter_(-1, order, True)

    def score(hidden_TR, fc2):
        return rounded(rounded(F.silu(rounded(hidden_TR))) @ rounded(fc2).T).T

    alike, errors = [], []
    with torch.no_grad():
        model.model(torch.tensor([ids]))
        for layer, head, x in [*zip(model.model.layers, heads.layers, inputs, strict=True)][::3]:
            products, fc1, fc2 = projections(layer.self_attn), head.fc1.weight, head.fc2.weight
            weight, exact = folded(head, products).weight_RC, torch.cat([one.weight for one in products])
            line = rounded(rounded(x[0]) @ rounded(exact).T)
            own, mine = score(line @ rounded(fc1).T, fc2), score(rounded(x[0]) @ rounded(weight).T, fc2)
            true = (F.silu(x[0].double() @ exact.double().T @ fc1.double().T) @ fc2.double().T).T
            alike.append((slots(own) & slots(mine)).sum() / slots(own).sum())
            errors.append([((one - true).square().mean().sqrt() / true.std()).item() for one in (own, mine)])
    unfolded, of_folded = torch.tensor(errors).mean(0)
    assert torch.stack(alike).mean() >= 0.9975, alike
    assert of_folded <= 1.02 * unfolded < 0.01, errors
