"""Heads trained end to end: soft evictions against the cache's own, gradients against differences, runs that go on."""

from __future__ import annotations

import json
import math
import random
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import tiny_model
from tiny_tokenizer import save_tiny_backbone

from locret_kit import BoundedCache, HeadsConfig, RetainingHeads, attach
from locret_kit.backbones import probe
from locret_kit.backbones.releases import CACHE
from locret_kit.backbones.spec import spec_of
from locret_kit.card import describe
from locret_kit.cli.train import main
from locret_kit.config.recipes import load_config
from locret_kit.samples.sample import Sample
from locret_kit.training.end_to_end import EndToEndTraining, divergence
from locret_kit.training.gates import Eviction, Gated, attend_gated, drawn_eviction, threshold
from locret_kit.training.scalars import read_curves


def heads_of(model, seed: int = 1, **changes) -> RetainingHeads:
    torch.manual_seed(seed)
    heads = RetainingHeads(HeadsConfig.for_backbone(spec_of(model.config), "tiny", 8, **changes))
    for weight in heads.parameters():
        torch.nn.init.normal_(weight, std=0.5)
    return heads


def text(tokens: int, seed: int = 0) -> list[int]:
    """No token twice: scores of the first layer would tie."""
    return random.Random(seed).sample(range(3, 97), k=tokens)


@given(st.lists(st.floats(-30, 30), min_size=2, max_size=40), st.data(), st.sampled_from([0.05, 0.5, 4.0]))
@settings(max_examples=60, deadline=None)
def test_gates_sum_to_what_is_kept(scores, data, temperature):
    keep = data.draw(st.integers(1, len(scores) - 1))
    row = torch.tensor([scores], dtype=torch.float64)
    found = float(threshold(row, keep, temperature))
    total = math.fsum(1 / (1 + math.exp(min(700, (found - s) / temperature))) for s in scores)
    assert total == pytest.approx(keep, abs=1e-6)


def test_the_thresholds_gradient_is_that_of_the_equation():
    torch.manual_seed(0)
    scores = torch.randn(3, 9, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda s: threshold(s, 4, 0.7), (scores,), eps=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="keep=9 must be at least 1 and below the 9 elements"):
        threshold(scores, 9, 1.0)


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3", "gemma3"])
@pytest.mark.parametrize("newest", [0, 5])
@pytest.mark.parametrize(("hard", "temperature"), [(True, 1.0), (False, 1e-7)])
def test_hard_gates_are_the_caches_evictions(family, newest, hard, temperature):
    """Logits are those of the bounded cache that reads in the same chunks, at true positions; of soft gates near a temperature
    of 0."""
    model, ids, chunk, keep = tiny_model(family).double(), text(61), 10, 12
    heads = heads_of(model).double()
    eviction = Eviction((*range(0, 61, chunk), 61), keep, newest, temperature)
    cache = BoundedCache(
        budget=keep + newest, heads=heads, chunk=chunk, stabilizers=newest, local_len=0, positions="original",
        prompt_length=61,
    )  # fmt: skip
    with attach(model) as attachment, torch.no_grad():
        gated = Gated(heads, probe.describe(model).ropes(model, 61), spec_of(model.config).layers, eviction, hard=hard)
        with attachment.handled_by(gated):
            mine = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
        pieces = [ids[i : i + chunk] for i in range(0, 61, chunk)]
        want = torch.cat([model(input_ids=torch.tensor([part]), **{CACHE: cache}).logits[0] for part in pieces])
        whole = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    torch.testing.assert_close(mine, want, rtol=1e-5, atol=1e-5)
    assert (mine - whole).abs().max() > 1e-3  # something was evicted


@given(st.integers(12, 400), st.integers(1, 60), st.integers(0, 2**30))
@settings(max_examples=60, deadline=None)
def test_drawn_evictions_cover_the_text_in_order(prompt, answer, seed):
    one = drawn_eviction(
        random.Random(seed), prompt + answer, prompt, share=[0.05, 0.5], chunks=[16, 40], newest=0.6, tail=20,
        temperature=1.0,
    )  # fmt: skip
    assert one.bounds[0] == 0 and one.bounds[-1] == prompt + answer
    assert all(a < b for a, b in pairwise(one.bounds))
    assert one.bounds[-2] == prompt - min(20, prompt // 2)  # the tail is read after the last eviction
    assert one.keep >= 1 and one.keep + one.newest <= max(2, round(0.5 * prompt)) and one.newest <= 0.6 * prompt
    assert not one.first < one.bounds[-1] or one.first - one.newest > one.keep


def training(*more: str, model=None) -> EndToEndTraining:
    model = (model or tiny_model("llama")).double()
    keys = ["gates.shares=[0.2,0.3]", "gates.chunks=[8]", "gates.text_tokens=7", "infer.local_len=6", *more]
    module = EndToEndTraining(
        model, load_config(["recipe=tiny", "trains=end_to_end", "backbone.model=tiny", "infer.budget=64", *keys])
    )
    module.heads.double()
    for weight in module.heads.parameters():
        torch.nn.init.normal_(weight, std=0.4)
    return module


@pytest.mark.parametrize("kind", ["forward", "reverse"])
def test_gradients_are_those_of_the_loss(kind):
    """A step along the gradient changes the loss by as much as differences say. What a layer's scores do to the inputs of later
    heads is not followed: those heads score everything alike here."""
    module = training(f"gates.divergence={kind}", "gates.forward=soft")
    sample = Sample(tuple(text(70)), ((60, 70),))
    with attach(module.backbone) as module._attachment:

        def loss() -> torch.Tensor:
            answers, rest = module.divergence(sample, random.Random(3), 0.8)
            return answers + 0.5 * rest

        torch.manual_seed(1)
        for layer in reversed(module.heads.layers):
            module.heads.zero_grad()
            loss().backward()
            assert all(weight.grad is None for weight in module.backbone.parameters())
            for weight in layer.parameters():
                assert weight.grad is not None
                way, h = torch.randn_like(weight), 1e-3
                with torch.no_grad():
                    weight += h * way
                    more = float(loss())
                    weight -= 2 * h * way
                    less = float(loss())
                    weight += h * way
                slope = float((weight.grad * way).sum())
                assert abs(slope) > 1e-6 and slope == pytest.approx((more - less) / (2 * h), rel=1e-2)
            torch.nn.init.zeros_(layer.fc2.weight)


def test_a_closed_gates_gradient_is_what_opening_it_would_change():
    """Attention with gates is differentiable in every gate, those of 0 too, and equals its definition, number by number."""
    torch.manual_seed(4)
    q, k, v = (torch.randn(1, heads, rows, 3, dtype=torch.float64) for heads, rows in ((4, 2), (2, 6), (2, 6)))
    gates = torch.tensor([[[0.0, 1, 0.3, 0, 1, 1], [1, 0, 0, 0.7, 1, 1]]], dtype=torch.float64, requires_grad=True)
    out = attend_gated(q, k, v, gates, 0.6)
    for head in range(4):
        for t in range(2):
            weights = [
                float(gates.detach()[0, head // 2, s])
                * math.exp(0.6 * float(q[0, head, t] @ k[0, head // 2, s]))
                * (s <= 4 + t)
                for s in range(6)
            ]
            want = [math.fsum(w * float(v[0, head // 2, s, d]) for s, w in enumerate(weights)) for d in range(3)]
            assert out[0, head, t].tolist() == pytest.approx([x / math.fsum(weights) for x in want], rel=1e-9)
    assert torch.autograd.gradcheck(lambda g: attend_gated(q, k, v, g, 0.6), (gates,), eps=1e-6, atol=1e-6)


def test_evictions_forward_leave_every_head_a_gradient():
    """Straight through: nothing is soft in the loss, and all weights of all layers learn."""
    module = training("gates.temperatures=[1.0,1.0]")
    sample = Sample(tuple(text(70)), ((60, 70),))
    with attach(module.backbone) as module._attachment:
        answers, _ = module.divergence(sample, random.Random(3), 1.0)
        answers.backward()
    for layer in module.heads.layers:
        assert all(bool(weight.grad.abs().sum() > 0) for weight in layer.parameters())


def test_the_distributions_are_the_models_own():
    """A scaling of its logits counts: scaled down to nothing, they all say the same."""
    found = []
    for scaling in (1.0, 1e9):
        kind = {"model_type": "granite", "logits_scaling": scaling, "attention_multiplier": 0.25}
        module = training(model=tiny_model("llama", **kind))
        with attach(module.backbone) as module._attachment, torch.no_grad():
            found.append(float(module.divergence(Sample(tuple(text(70)), ((60, 70),)), random.Random(3), 1.0)[0]))
    assert found[0] > 1e-3 and found[1] < 1e-9


def test_divergence_is_the_definitions():
    torch.manual_seed(2)
    mine, wanted = torch.randn(4, 11).double() * 3, torch.randn(4, 11).double() * 3

    def shares(row):
        parts = [math.exp(x) for x in row.tolist()]
        return [x / math.fsum(parts) for x in parts]

    for kind, pairs in (("forward", (wanted, mine)), ("reverse", (mine, wanted))):
        for t, got in enumerate(divergence(mine, wanted, kind).tolist()):
            p, q = shares(pairs[0][t]), shares(pairs[1][t])
            assert got == pytest.approx(math.fsum(a * math.log(a / b) for a, b in zip(p, q, strict=True)), rel=1e-9)


def test_the_command_trains_goes_on_and_says_what_scores_are(tmp_path, monkeypatch):
    """Resumed after two of four steps, weights and curves are those of the whole run."""
    backbone = save_tiny_backbone(tmp_path / "backbone")
    shared = [
        "recipe=tiny", "trains=end_to_end", f"backbone.model={backbone}", "data.max_tokens=256", "trainer.accelerator=cpu",
        "data.val_samples=1", "optim.lr=0.01", "optim.steps=4", "optim.warmup_steps=0", "trainer.val_every=2",
        "trainer.save_every=2", "optim.accumulate=2", "heads.dtype_saved=float32",
    ]  # fmt: skip
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert main([*shared, f"out={whole}"]) == 0
    step = EndToEndTraining.training_step

    def cut_off(self, *args):
        if self.global_step == 2:
            raise SystemError("cut off")
        return step(self, *args)

    with monkeypatch.context() as patched, pytest.raises(SystemError):
        patched.setattr(EndToEndTraining, "training_step", cut_off)
        main([*shared, f"out={cut}"])
    assert main([*shared, f"out={cut}", "resume=auto"]) == 0
    mine, theirs = (RetainingHeads.from_pretrained(folder / "heads") for folder in (whole, cut))
    assert mine.config.target == "logit"
    said = describe(mine.config, 1, json.loads((whole / "heads" / "training.json").read_text()))
    assert "what its slot will be worth" in said and "end to end" in said and "beginning with random heads" in said
    assert all(torch.equal(a, b) for a, b in zip(mine.parameters(), theirs.parameters(), strict=True))
    curves = read_curves(whole)
    assert len(curves["train/answers"]) == 4 and len(curves["val/answers"]) == 2
    again = (
        tmp_path / "again"
    )  # heads begin with others, of another unit too; some budgets hold all that comes before the tail
    large = ["infer.local_len=100", "gates.shares=[0.2,0.95]"]
    assert main([*shared, *large, f"heads.init={whole}/heads", "target.kind=logit", f"out={again}"]) == 0
    assert not any(
        torch.equal(a, b)
        for a, b in zip(mine.parameters(), RetainingHeads.from_pretrained(again / "heads").parameters(), strict=True)
    )


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("gates.shares=[0.5,0.2]", r"gates.shares=\[0.5, 0.2\] must be two numbers above 0 and below 1"),
        ("gates.temperatures=[1.0]", r"gates.temperatures=\[1.0\] must be two numbers above 0"),
        ("data.queries=both", "data.queries=both has no effect on trains=end_to_end"),
        ("trainer.strategy=fsdp", "trainer.strategy=fsdp must be auto or ddp where trains=end_to_end"),
        ("trials.file=answers", "trials.file=answers needs trains=heads"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(key, said):
    with pytest.raises(ValueError, match=said):
        load_config(["recipe=tiny", "trains=end_to_end", "backbone.model=tiny", key])
