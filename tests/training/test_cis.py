"""Targets and loss against Python loops in float64, and the observer against one joint autograd pass."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import FAMILIES, tiny_model

from locret_kit import HeadsConfig, RetainingHeads, attach
from locret_kit.backbones.handlers import Handler
from locret_kit.backbones.probe import describe
from locret_kit.backbones.rope import rotate
from locret_kit.backbones.spec import spec_of
from locret_kit.cis import FLOOR, SmoothL1, cis_loss, cis_target, top_recall
from locret_kit.training.module import Observed, Observer


def brute_target(q, k, positions, scaling, kind, floor):
    """``max over answer queries and group`` of the logit (or log-probability) of each slot, one number at a time."""
    B, Q, _, _ = q.shape
    _, H, S, _ = k.shape
    out = [[[-math.inf] * S for _ in range(H)] for _ in range(B)]
    for b in range(B):
        for query_head in range(Q):
            h = query_head // (Q // H)
            for t, position in enumerate(positions):
                logits = [
                    scaling * sum(x * y for x, y in zip(q[b, query_head, t].tolist(), k[b, h, s].tolist(), strict=True))
                    for s in range(min(S, position + 1))
                ]
                top = max(logits)
                norm = top + math.log(sum(math.exp(x - top) for x in logits)) if kind == "log_prob" else 0.0
                for s, x in enumerate(logits):
                    out[b][h][s] = max(out[b][h][s], x - norm)
    if kind == "log_prob":
        out = [[[max(x, floor) for x in row] for row in head] for head in out]
    return torch.tensor(out)


@pytest.mark.parametrize("kind", ["logit", "log_prob"])
@pytest.mark.parametrize(("H", "G"), [(1, 1), (2, 3), (3, 1), (1, 4)])
@pytest.mark.parametrize("spans", [[(9, 12)], [(3, 5), (8, 9), (11, 14)], [(0, 2)]])
def test_target_equals_loops(kind, H, G, spans):
    torch.manual_seed(H * 10 + G)
    positions = [t for a, b in spans for t in range(a, b)]
    q, k = torch.randn(2, H * G, len(positions), 4) * 3, torch.randn(2, H, 14, 4)
    want = brute_target(q, k, positions, 0.37, kind, -5.0)
    got = cis_target(q, k, torch.tensor(positions), 0.37, kind=kind, floor=-5.0)
    torch.testing.assert_close(got.double(), want.double(), rtol=1e-4, atol=1e-4)
    if kind == "log_prob":
        assert got.min() >= -5.0 and got.max() <= 1e-6


@given(st.integers(0, 999), st.integers(1, 3), st.integers(1, 30), st.sampled_from([0.5, 1.0, 2.0]))
def test_loss_is_the_papers_formula(seed, H, S, beta):
    generator = torch.Generator().manual_seed(seed)
    predicted, target = (3 * torch.randn(1, H, S, generator=generator) for _ in range(2))
    total, steps = 0.0, []
    for h in range(H):
        for s in range(S):
            d = abs(predicted[0, h, s].item() - target[0, h, s].item())
            total += 0.5 * d * d / beta if d < beta else d - 0.5 * beta
            if s + 1 < S:
                steps.append((predicted[0, h, s].item() - predicted[0, h, s + 1].item()) ** 2)
    regression, smooth = cis_loss(predicted, target, loss=SmoothL1(beta), smoothing=0.0025)
    assert regression.item() == pytest.approx(total / (H * S), rel=1e-4, abs=1e-6)
    assert smooth.item() == pytest.approx(0.0025 * sum(steps) / len(steps) if steps else 0.0, rel=1e-4, abs=1e-7)


@given(st.integers(0, 999), st.integers(1, 60), st.sampled_from([0.05, 0.1, 0.5, 1.0]))
def test_recall_against_sets(seed, S, fraction):
    generator = torch.Generator().manual_seed(seed)
    predicted, target = (torch.rand(1, 2, S, generator=generator) for _ in range(2))
    n = max(1, int(fraction * S))
    shares = []
    for h in range(2):
        orders = (sorted(range(S), key=lambda s, x=x, h=h: -x[0, h, s].item()) for x in (predicted, target))
        mine, true = (set(order[:n]) for order in orders)
        shares.append(len(mine & true) / n)
    assert top_recall(predicted, target, fraction).item() == pytest.approx(sum(shares) / 2)


# ---- the observer -----------------------------------------------------------------------------------------------


class Recorder(Handler):
    """Keeps q, k, v of every layer; attends over everything."""

    wants_unrotated = True

    def __init__(self, ropes):
        self.ropes, self.seen = ropes, []

    def attend(self, layer, q, k, v, softmax, x=None):
        scaling = softmax.scaling
        self.seen.append((q, k, v, scaling))
        cos, sin = self.ropes[layer].tables(torch.arange(q.shape[2]), q.dtype)
        return torch.nn.functional.scaled_dot_product_attention(
            rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True, scale=scaling, enable_gqa=True
        )


@pytest.mark.parametrize("kind", ["logit", "log_prob"])
@pytest.mark.parametrize("answers", [((30, 40),), ((10, 14), (30, 36))])
def test_observer_equals_one_joint_pass(kind, answers):
    model = tiny_model("llama")
    torch.manual_seed(2)
    heads = RetainingHeads(HeadsConfig.for_backbone(spec_of(model.config), "tiny", 16))
    ids = torch.randint(2, 97, (1, 40), generator=torch.Generator().manual_seed(0))
    ropes, loss = describe(model).ropes(model, 40), dict(smoothing=0.0025, top_fraction=0.1, top_weight=5.0)

    alive = []  # leaves that a layer's graph reaches

    def backward(value):
        value.backward()
        alive.append([i for i in range(3) if heads[i].fc1.weight.grad is not None])

    given = dict(kind=kind, lead=1, loss=partial(cis_loss, **loss), backward=backward)
    observer = Observer(heads, ropes, spec_of(model.config).layers, answers, **given)
    recorder = Recorder(ropes)
    with torch.no_grad(), attach(model) as attachment:
        logits = model(input_ids=ids).logits
        with attachment.handled_by(Observed([observer], [40])):
            assert (model(input_ids=ids, use_cache=False).logits - logits).abs().max() < 1e-4
        with attachment.handled_by(recorder):
            model(input_ids=ids, use_cache=False)
    assert alive == [[0], [0, 1], [0, 1, 2]]  # one backward a layer, which reaches that layer's head alone
    assert all(p.grad is None and not p.requires_grad for p in model.parameters())
    mine = [p.grad.clone() for p in heads.parameters()]
    heads.zero_grad()

    queries = torch.tensor(sorted({t for a, b in answers for t in range(a - 1, b)}))
    start, total = answers[-1][0], 0.0
    for head, rope, (q, k, v, scaling) in zip(heads.layers, ropes, recorder.seen, strict=True):
        cos, sin = rope.tables(torch.arange(40), q.dtype)
        target = brute_target(
            rotate(q, cos, sin)[:, :, queries], rotate(k, cos, sin), queries.tolist(), scaling, kind, -12.0
        )[..., :start]
        total = total + sum(cis_loss(head(q[:, :, :start], k[:, :, :start], v[:, :, :start]), target, **loss)) / 3
    total.backward()
    for got, parameter in zip(mine, heads.parameters(), strict=True):
        torch.testing.assert_close(got, parameter.grad, rtol=1e-3, atol=1e-6)
    regression, smooth, _ = torch.stack(observer.measures).mean(0)
    assert (regression + smooth).item() == pytest.approx(total.item(), rel=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_targets_are_the_backbones_own_attention(family):
    """The most that the answer's queries give a slot, by the probabilities that transformers returns."""
    model, eager = tiny_model(family), tiny_model(family)
    eager.set_attn_implementation("eager")
    spec, length, start = spec_of(model.config), 100, 90  # past the 64 tokens of LongRoPE's short factors
    heads, targets = RetainingHeads(HeadsConfig.for_backbone(spec, "tiny", 16)), []
    observer = Observer(
        heads, describe(model).ropes(model, length), spec.layers, ((start, length),), kind="log_prob", lead=1,
        watch=lambda predicted, target: targets.append(target),
    )  # fmt: skip
    ids = torch.randint(2, 97, (1, length), generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), attach(model) as attachment, attachment.handled_by(Observed([observer], [length])):
        model(input_ids=ids, use_cache=False)
    with torch.no_grad():
        attentions = eager(input_ids=ids, use_cache=False, output_attentions=True).attentions
    scored = [a for a, window in zip(attentions, spec.windows, strict=True) if window is None]
    assert len(scored) == len(targets) == spec.windows.count(None)
    for a_BQTS, target_BHS in zip(scored, targets, strict=True):
        grouped = a_BQTS[:, :, start - 1 :, :start].unflatten(1, (spec.n_kv_heads, -1))
        floor = math.exp(FLOOR)
        torch.testing.assert_close(target_BHS.exp(), grouped.amax(dim=(2, 3)).clamp_min(floor), rtol=1e-3, atol=1e-6)
