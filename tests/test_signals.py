"""Training signals: every part against its formula in float64, one number at a time, and together in training."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import tiny_model
from tiny_tokenizer import tiny_tokenizer

from locret_kit import HeadsConfig, RetainingHeads, attach
from locret_kit.backbones.probe import describe
from locret_kit.backbones.spec import spec_of
from locret_kit.cis import attention_mass, boundary_loss, cis_loss, cis_target, drawn_budgets
from locret_kit.config.recipes import load_config
from locret_kit.heads import FORMS
from locret_kit.policies.base import Entry
from locret_kit.policies.methods.locret import Cis
from locret_kit.samples.replay import FIRST, NEXT, QUOTED, with_replay
from locret_kit.samples.sample import Sample
from locret_kit.training.observer import Observer
from locret_kit.training.trial import unit_of
from locret_kit.training.values import ValueNorms

B, H, G, S, D = 2, 2, 3, 14, 4
POSITIONS = [3, 4, 9, 12, 13]


def drawn(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    return torch.randn(B, H * G, len(POSITIONS), D) * 3, torch.randn(B, H, S, D)


def weight(q, k, b, head, t, s) -> float:
    """Attention of a query to a slot: softmax over the slots up to its position."""
    if s > POSITIONS[t]:
        return 0.0
    logits = [0.37 * float(q[b, head, t].double() @ k[b, head // G, u].double()) for u in range(POSITIONS[t] + 1)]
    top = max(logits)
    return math.exp(logits[s] - top) / math.fsum(math.exp(x - top) for x in logits)


def mass(q, k, b, head, s, window) -> float:
    """Mean attention of the queries more than ``window`` tokens after the slot."""
    later = [t for t, position in enumerate(POSITIONS) if position - s > window]
    return math.fsum(weight(q, k, b, head, t, s) for t in later) / len(later) if later else 0.0


@pytest.mark.parametrize("window", [0, 4])
def test_mass_is_the_mean_after_the_window(window):
    q, k = drawn(0)
    got = attention_mass(q, k, torch.tensor(POSITIONS), 0.37, window)
    want = [[[mass(q, k, b, head, s, window) for s in range(S)] for head in range(H * G)] for b in range(B)]
    torch.testing.assert_close(got.double(), torch.tensor(want).double(), rtol=1e-5, atol=1e-7)
    assert (got[..., 13 - window :] == 0).all()  # nobody asks later
    target = cis_target(q, k, torch.tensor(POSITIONS), 0.37, kind="log_mass", window=window, floor=-6.0)
    best = torch.tensor(want).double().view(B, H, G, S).amax(2).clamp_min(1e-30).log().clamp_min(-6.0)
    torch.testing.assert_close(target.double(), best, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["log_prob", "log_mass"])
def test_value_aware_targets_are_products(kind):
    """``max`` over the group of attention (largest or mean) times the norm of the projected value."""
    q, k = drawn(1)
    norms = torch.rand(B, H * G, S) * 5 + 0.1
    got = cis_target(q, k, torch.tensor(POSITIONS), 0.37, kind=kind, floor=-40.0, norms_BQS=norms)
    for b in range(B):
        for h in range(H):
            for s in range(S):
                of = [
                    (
                        max(weight(q, k, b, head, t, s) for t in range(5))
                        if kind == "log_prob"
                        else mass(q, k, b, head, s, 0)
                    )
                    * float(norms[b, head, s])
                    for head in range(h * G, h * G + G)
                ]
                assert got[b, h, s].item() == pytest.approx(math.log(max(of)) if max(of) else -40.0, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("family", ["llama", "phi3", "gemma3"])
def test_norms_are_those_of_the_output_projection(family):
    model = tiny_model(family)
    spec, layer = spec_of(model.config), 1
    project = model.model.layers[layer].self_attn.o_proj.weight.detach().double()  # [E, Q * D]
    v = torch.randn(1, spec.n_kv_heads, 5, spec.head_dim)
    got = ValueNorms(model)(layer, v, spec.n_heads)
    for head in range(spec.n_heads):
        mine = project[:, head * spec.head_dim : (head + 1) * spec.head_dim]
        for s in range(5):
            want = (mine @ v[0, head // (spec.n_heads // spec.n_kv_heads), s].double()).norm()
            assert got[0, head, s].item() == pytest.approx(want.item(), rel=1e-4)


# ---- losses ------------------------------------------------------------------------------------------------------------


@given(st.integers(0, 999), st.integers(3, 25), st.sampled_from([0.5, 1.0, 3.0]))
@settings(max_examples=20)
def test_boundary_is_a_pairwise_logistic_loss(seed, n, temperature):
    generator = torch.Generator().manual_seed(seed)
    predicted, target = (torch.randn(1, 2, n, generator=generator) for _ in range(2))
    keeps, terms = [1, n - 1, n // 2], []
    for k in keeps:
        for h in range(2):
            order = sorted(range(n), key=lambda s, h=h: -target[0, h, s].item())
            cut = order[k - 1]
            for place, s in enumerate(order):
                if s != cut:
                    apart = (predicted[0, h, s] - predicted[0, h, cut]).item() / temperature
                    terms.append(math.log1p(math.exp(-apart if place < k else apart)))
    got = boundary_loss(predicted, target, keeps, temperature)
    assert got.item() == pytest.approx(math.fsum(terms) / len(terms), rel=1e-4)


def test_budgets_are_drawn_between_a_sixteenth_and_a_half():
    torch.manual_seed(0)
    drawn = drawn_budgets(1600, 2000)
    assert min(drawn) >= 100 and max(drawn) <= 800
    assert sum(k < 283 for k in drawn) / 2000 == pytest.approx(0.5, abs=0.05)  # uniform in the logarithm
    assert set(drawn_budgets(2, 9)) == {1}


@pytest.mark.parametrize("kind", ["mse", "bce_rank", "bce_mass"])
@pytest.mark.parametrize("top_weight", [1.0, 7.0])
def test_losses_of_a_slot(kind, top_weight):
    torch.manual_seed(2)
    predicted, target = torch.randn(1, 2, 20), -torch.rand(1, 2, 20) * 6
    terms, weights = [], []
    for h in range(2):
        order = sorted(range(20), key=lambda s, h=h: target[0, h, s].item())
        for s in range(20):
            x, y = predicted[0, h, s].item(), target[0, h, s].item()
            wanted = order.index(s) / 19 if kind == "bce_rank" else math.exp(y)
            share = 1 / (1 + math.exp(-x))
            entropy = -wanted * math.log(share) - (1 - wanted) * math.log(1 - share)
            weights.append(top_weight if order.index(s) >= 18 else 1.0)
            terms.append(((x - y) ** 2 if kind == "mse" else entropy) * weights[-1])
    got, smooth = cis_loss(predicted, target, kind=kind, top_fraction=0.1, top_weight=top_weight, smoothing=0.0)
    assert got.item() == pytest.approx(math.fsum(terms) / math.fsum(weights), rel=1e-4) and smooth == 0


def test_refusals():
    x = torch.zeros(1, 1, 4)
    with pytest.raises(
        ValueError, match="loss='hinge' is unknown; known: smooth_l1, mse, bce_rank, bce_mass, boundary"
    ):
        cis_loss(x, x, kind="hinge")
    with pytest.raises(ValueError, match="keeps=4 must be at least 1 and below the 4 slots"):
        boundary_loss(x, x, [4])
    tiny = ["recipe=tiny", "backbone.model=any"]
    for words, said in (
        (["target.window=8"], "target.window=8 has no effect on target.kind=log_prob"),
        (["target.kind=log_mass", "target.window=600"], "target.window=600 must be below data.max_tokens=512"),
        (["loss.kind=bce_mass", "target.values=true"], "loss.kind=bce_mass needs probabilities"),
        (["trains=pool", "data.queries=replay"], "data.queries=replay has no effect on trains=pool"),
    ):
        with pytest.raises(ValueError, match=said):
            load_config([*tiny, *words])


# ---- heads -------------------------------------------------------------------------------------------------------------


def config_of(form: str) -> HeadsConfig:
    return HeadsConfig.for_backbone(spec_of(tiny_model("llama").config), "tiny", 6, form=form)


def test_a_sink_head_is_attention_to_itself_among_sinks():
    config = config_of("sink")
    torch.manual_seed(3)
    head = FORMS["sink"](config, config.layers[0])
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn_like(parameter))
    Q, K, r = config.n_heads, config.n_kv_heads, 6
    q, k, v = (torch.randn(1, n, 3, config.head_dim) for n in (Q, K, K))
    got = torch.sigmoid(head(q, k, v).double())
    w = {name: parameter.detach().double() for name, parameter in head.named_parameters()}

    def normed(x, scale):
        return x / (x.square().mean() + 1e-6).sqrt() * scale

    for t in range(3):
        x = torch.cat([*q[0, :, t], *k[0, :, t], *v[0, :, t]]).double()
        a = (w["query.weight"] @ x + w["query.bias"]).view(Q, r)
        b = (w["key.weight"] @ x).view(K, r)
        for h in range(K):
            own = normed(b[h], w["key_norm.weight"])
            shares = []
            for g in range(h * (Q // K), (h + 1) * (Q // K)):
                ask = normed(a[g], w["query_norm.weight"])
                logit = (ask @ own / math.sqrt(r) + w["bias"][g]).item()
                shares.append(
                    1 / (1 + sum(math.exp((ask @ sink).item() / math.sqrt(r) - logit) for sink in w["sinks"][h]))
                )
            assert got[0, h, t].item() == pytest.approx(sum(shares) / len(shares), rel=1e-3, abs=2e-6)


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_saved_and_loaded(form, tmp_path):
    heads = RetainingHeads(config_of(form))
    heads.save_pretrained(tmp_path / "heads")
    again = RetainingHeads.from_pretrained(tmp_path / "heads")
    assert again.config == heads.config
    assert all(torch.equal(a, b) for a, b in zip(heads.parameters(), again.parameters(), strict=True))
    Q, K, D = (getattr(heads.config, name) for name in ("n_heads", "n_kv_heads", "head_dim"))
    assert heads[0](*(torch.randn(2, n, 5, D) for n in (Q, K, K))).shape == (2, K, 5)


def test_decay_lowers_a_score_by_its_age():
    """Kept is what is largest of ``score - decay * age``, whenever it is looked at."""
    scores = torch.tensor([[[3.0, 1.0, 2.5, 0.0, 2.6]]])
    head = type("Head", (torch.nn.Module,), {"forward": lambda self, q, k, v, linear: scores[..., : q.shape[2]]})()
    x = torch.zeros(1, 1, 5, 2)
    made = Cis(decay=0.2).score_new_tokens(Entry(0, 100, x, x, x, head, 0))
    for now in (105, 900):
        aged = [scores[0, 0, i].item() - 0.2 * (now - 100 - i) for i in range(5)]
        assert made[0, 0].argsort(descending=True).tolist() == sorted(range(5), key=lambda i, aged=aged: -aged[i])
    assert torch.equal(Cis().score_new_tokens(Entry(0, 100, x, x, x, head, 0)), scores)


# ---- queries -----------------------------------------------------------------------------------------------------------


def test_a_replay_repeats_the_prompt_after_requests():
    tokenizer = tiny_tokenizer()
    sample = Sample(tuple(range(20, 60)), ((10, 12), (33, 40)))
    first, following = (tokenizer(text, add_special_tokens=False).input_ids for text in (FIRST, NEXT))
    for answers in (True, False):
        made = with_replay(tokenizer, sample, 16, answers=answers)
        begin = 40 if answers else 33
        own = sample.answers if answers else ()
        assert made.scored == 33 and made.ids[:begin] == sample.ids[:begin] and made.answers[: len(own)] == own
        spans = made.answers[len(own) :]
        assert [made.ids[a:b] for a, b in spans] == [sample.ids[:16], sample.ids[16:32], sample.ids[32:33]]
        assert list(made.ids[begin : spans[0][0]]) == first
        assert list(made.ids[spans[0][1] : spans[1][0]]) == [*following, *sample.ids[16 - QUOTED : 16]]


def test_parts_go_together_in_an_observed_forward():
    """Mass after a window, value-aware, asked by a replay, for sink heads, at the boundary: every layer gets gradients."""
    model = tiny_model("llama")
    heads, norms = RetainingHeads(config_of("sink")), ValueNorms(model)
    sample = with_replay(tiny_tokenizer(), Sample(tuple(range(5, 65)), ((50, 60),)), 32, answers=True)
    ids = torch.tensor([[token % 97 for token in sample.ids]])
    seen = []
    observer = Observer(
        heads, describe(model).ropes(model, len(sample.ids)), describe(model).spec.layers, sample.answers, kind="log_mass",
        floor=-12.0, lead=1, window=8,
        loss=partial(cis_loss, kind="boundary"), slots=sample.scored, norms=norms, backward=lambda loss: loss.backward(),
        watch=lambda predicted, target: seen.append((predicted, target)),
    )  # fmt: skip
    with torch.no_grad(), attach(model) as attachment, attachment.handled_by(observer):
        model(input_ids=ids, use_cache=False)
    assert {pair[1].shape[-1] for pair in seen} == {50} and all(pair[1].isfinite().all() for pair in seen)
    for head in heads.layers:
        assert all(p.grad is not None and p.grad.isfinite().all() and p.grad.abs().sum() > 0 for p in head.parameters())


def test_the_unit_of_scores_is_said():
    units = {
        words: unit_of(load_config(["recipe=tiny", "backbone.model=any", *words.split()]))
        for words in (
            "target.kind=logit",
            "target.kind=log_mass",
            "loss.kind=mse",
            "loss.kind=boundary",
            "loss.kind=bce_rank",
        )
    }
    assert list(units.values()) == ["logit", "log_prob", "log_prob", "logit", "logit"]
