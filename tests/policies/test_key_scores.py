"""Training-free key scores against their papers' formulas, written again as float64 loops over one head at a time."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from policy_oracle import rotated, softmax
from tiny_models import tiny_model

from locret_kit.backbones.handlers import Handler, Softmax
from locret_kit.backbones.intercept import attach
from locret_kit.backbones.libraries import CACHE
from locret_kit.backbones.rope import Rope, rotate
from locret_kit.cache.bounded import BoundedCache
from locret_kit.policies.base import Entry, Slots, rank_of
from locret_kit.policies.grammar import parse_policy
from locret_kit.policies.methods.compactor import Compactor, gaussian_sketch, leverage_scores
from locret_kit.policies.methods.expected_attention import ExpectedAttention
from locret_kit.policies.methods.keydiff import KeyDiff
from locret_kit.policies.methods.knorm import KNorm
from locret_kit.policies.methods.lagkv import LagKV
from locret_kit.policies.methods.rkv import redundancy

HEADS = [(3, 3), (6, 2), (4, 1)]  # query heads, key/value heads: MHA, GQA, MQA
D = 8
ROPE = Rope(10000.0 ** (-torch.arange(0, D, 2) / D))


class Layer:
    """One layer of a bounded run at original positions: tokens enter in pieces, ``cut`` keeps the best ``keep`` slots."""

    def __init__(self, score, q, k, v, rope=ROPE):
        self.part, self.q, self.k, self.v, self.rope = score, q, k, v, rope
        self.B, self.H = k.shape[:2]
        self.state: dict = {}
        self.seen = self.last = 0
        self.held = torch.zeros(self.B, self.H, 0, dtype=torch.int64)
        self.entered = torch.zeros(self.B, self.H, 0)

    def feed(self, tokens):
        new = slice(self.seen, self.seen + tokens)
        q, k, v = self.q[:, :, new], self.k[:, :, new], self.v[:, :, new]
        entry = Entry(0, self.seen, q, k, v, None, 0, rope=self.rope, state=self.state)
        entered = self.part.score_new_tokens(entry)
        entered = torch.zeros(k.shape[:3]) if entered is None else entered
        assert entered.shape == k.shape[:3] and entered.dtype == torch.float32
        self.entered = torch.cat((self.entered, entered), 2)
        self.held = torch.cat((self.held, torch.arange(new.start, new.stop).expand(self.B, self.H, -1)), 2)
        self.seen += tokens

    def rows(self, x_BHTD):
        return x_BHTD.gather(2, self.held[..., None].expand(-1, -1, -1, x_BHTD.shape[-1]))

    def slots(self, keep, pad=0, **over):
        def padded(x):
            return torch.cat((torch.zeros(*x.shape[:2], pad, *x.shape[3:], dtype=x.dtype), x), 2)

        keys = turned(self.k, self.rope) if self.rope is not None else self.k
        settings = dict(
            layer=0, layers=1, keep=keep, stabilizers=0, chunk=self.seen - self.last, since_eviction=self.seen - self.last,
            seen=self.seen, positions=padded(self.held.to(torch.int32)), valid=padded(torch.ones_like(self.held)).bool(),
            entry_scores=padded(self.entered) if pad else self.entered, stats={}, keys=lambda: padded(self.rows(keys)),
            values=lambda: padded(self.rows(self.v)), raw_keys=lambda: padded(self.rows(self.k)),
            softmax=Softmax(self.k.shape[-1] ** -0.5),
            rope=self.rope, next_position=torch.full((self.B, self.H), self.seen), state=self.state,
        )  # fmt: skip
        return Slots(**{**settings, **over})

    def cut(self, keep):
        scores = self.part.score_slots(self.slots(keep))
        assert scores.shape == self.held.shape and scores.dtype == torch.float32 and bool(scores.isfinite().all())
        before, held = scores.clone(), self.held
        stay = rank_of(scores, torch.zeros_like(scores).bool(), torch.ones_like(scores).bool()) < keep
        self.held, self.entered = (x[stay].view(self.B, self.H, -1) for x in (self.held, self.entered))
        self.last = self.seen
        return held, before


def turned(x, rope=ROPE):
    cos, sin = rope.tables(torch.arange(x.shape[2]), x.dtype)
    return rotate(x, cos, sin)


def random_qkv(Q, H, T, seed=0, B=1):
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(B, n, T, D, generator=g, dtype=torch.float64) for n in (Q, H, H))
    return q + torch.randn(1, Q, 1, D, generator=g), k + torch.randn(1, H, 1, D, generator=g), v


def one_shot(part, q, k, v, keep):
    layer = Layer(part, q, k, v)
    layer.feed(k.shape[2])
    return part.score_slots(layer.slots(keep))


# ---- the papers' formulas, one head, plain loops -------------------------------------------------------------------------


def paper_lagkv(k, v, sinks, lag):
    """Ranks in each partition that has a complete next one; what follows is kept, and so are the sinks, first of all."""
    scores = np.array([2.0] * sinks + [1.0] * (len(k) - sinks))
    for start in range(sinks, len(k) - 2 * lag + 1, lag):
        own, summed = slice(start, start + lag), np.zeros(lag)
        for x in (k, v):
            low, high = (edge(x[start + lag : start + 2 * lag], axis=0) for edge in (np.min, np.max))
            summed += softmax(((x[own] - low) / (high - low)).std(1, ddof=1))
        scores[own] = [(summed < one).sum() / lag for one in summed]
    return scores


def paper_expected(qs, k, v, sinks, future, epsilon, value_norm, start):
    """``qs``: raw queries of each head of the group; ``k`` rotated."""
    size, keys, received = k.shape[1], k[sinks:], np.zeros(len(k))
    turn = np.mean([[rotated(one, t, 10000.0) for one in np.eye(size)] for t in range(start, start + future)], 0).T
    for q in qs[:, sinks:]:
        mean, covariance = turn @ q.mean(0), turn @ np.cov(q.T, bias=True) @ turn.T
        logits = keys @ mean / math.sqrt(size) + [x @ covariance @ x / (2 * size) for x in keys]
        received[sinks:] += softmax(logits) / len(qs)
    return (received + epsilon) * np.linalg.norm(v, axis=1) if value_norm else received


def paper_compactor_attention(qs, k, v, edges):
    """Non-causal attention within blocks between edges, times the value's norm, mean of 3; ``qs`` and ``k`` rotated."""
    raw = np.zeros(len(k))
    for own in (slice(*edge) for edge in pairwise(edges)):
        for q in qs:
            raw[own] += sum(softmax(logits) for logits in q[own] @ k[own].T) / len(qs)
    return np.convolve(raw * np.linalg.norm(v, axis=1), np.ones(3) / 3, "same")


def paper_leverage(k, sketch, ridge=1e-2):
    x = (k - k.mean(0)) @ sketch
    inverse = np.linalg.inv(x.T @ x + ridge * np.eye(x.shape[1]))
    return [row @ inverse @ row for row in x]


def z(values):
    return (values - np.mean(values)) / np.std(values, ddof=1)


# ---- one eviction after the whole prompt is the published method ----------------------------------------------------------


@pytest.mark.parametrize(
    "rope", [Rope(ROPE.inv_freq[:3], scaling=1.2), Rope(ROPE.inv_freq, weight_R=torch.linspace(0.3, 2, D))]
)
def test_knorm_is_the_norm_that_attention_sees(rope):
    """Phi-4-mini's keys: LongRoPE on three quarters of a head. Hunyuan's: a norm's weights after the rotation."""
    q, k, v = random_qkv(2, 2, 21)
    layer = Layer(KNorm(), q, k, v, rope=rope)
    layer.feed(21)
    torch.testing.assert_close(layer.cut(5)[1], -turned(k, rope).norm(dim=-1).float())


@pytest.mark.parametrize(("Q", "H"), HEADS)
@pytest.mark.parametrize("tokens", [7, 19, 20, 41, 47])
def test_lagkv_is_the_papers(Q, H, tokens):
    q, k, v = random_qkv(Q, H, tokens)
    expected = [paper_lagkv(turned(k)[0, h].numpy(), v[0, h].numpy(), 4, 8) for h in range(H)]
    np.testing.assert_allclose(one_shot(LagKV(sinks=4, lag=8), q, k, v, 5)[0], expected, rtol=1e-6)


@pytest.mark.parametrize(("Q", "H"), HEADS)
@pytest.mark.parametrize(("value_norm", "epsilon"), [(True, 0.0), (True, 0.02), (False, 0.0)])
def test_expected_attention_is_the_papers(Q, H, value_norm, epsilon):
    q, k, v = random_qkv(Q, H, 29)
    part = ExpectedAttention(sinks=3, future=11, epsilon=epsilon, value_norm=value_norm)
    mine = one_shot(part, q, k, v, 5)[0]
    for h in range(H):
        group, keys, values = q[0].unflatten(0, (H, -1))[h].numpy(), turned(k)[0, h].numpy(), v[0, h].numpy()
        expected = paper_expected(group, keys, values, 3, 11, epsilon, value_norm, start=29)
        np.testing.assert_allclose(mine[h, 3:], expected[3:], rtol=1e-4)
        assert float(mine[h, :3].min()) > float(mine[h, 3:].max())


@pytest.mark.parametrize(("Q", "H"), HEADS)
@pytest.mark.parametrize(("tokens", "block"), [(40, 8), (41, 8), (45, 8), (30, 64)])
def test_compactor_is_the_papers(Q, H, tokens, block):
    q, k, v = random_qkv(Q, H, tokens)
    first, last, keep = 5, 3, 10
    mine = one_shot(Compactor(block=block, sketch=6, first=first, last=last), q, k, v, keep)[0]
    inside, sketch, attention, leverage = slice(first, tokens - last), gaussian_sketch(H, D, 6, 0).numpy(), [], []
    edges = [*range(first, tokens - last, block), tokens - last]
    for h, group in enumerate(turned(q)[0].unflatten(0, (H, -1)).numpy()):
        pooled = paper_compactor_attention(group, turned(k)[0, h].numpy(), v[0, h].numpy(), edges)
        attention.append(pooled[inside])
        leverage.append(paper_leverage(k[0, h, inside].numpy(), sketch[h]))
    expected = z(attention) + (1 - keep / tokens) * z(leverage)
    np.testing.assert_allclose(mine[:, inside], expected, rtol=2e-4, atol=2e-5)
    outside = torch.cat((mine[:, :first], mine[:, tokens - last :]), 1)
    assert float(outside.min()) > expected.max()


# ---- chunked and bounded ---------------------------------------------------------------------------------------------------

PARTS = [KNorm(), KeyDiff(), LagKV(2, 6), ExpectedAttention(2, 9), Compactor(block=5, sketch=4, first=2, last=1)]


@pytest.mark.parametrize("part", PARTS, ids=lambda p: type(p).__name__)
def test_padding_on_the_left_changes_nothing(part):
    q, k, v = random_qkv(4, 2, 40)
    plain, padded = Layer(part, q, k, v), Layer(part, q, k, v)
    for layer in (plain, padded):
        layer.feed(40)
    expected = part.score_slots(plain.slots(10))
    torch.testing.assert_close(part.score_slots(padded.slots(10, pad=7))[..., 7:], expected, rtol=1e-4, atol=1e-5)


def test_a_constant_reference_channel_counts_as_nothing():
    q, k, v = random_qkv(1, 1, 24)
    k[..., 8:, 0] = 3.0
    scores = one_shot(LagKV(sinks=0, lag=8), q, k, v, 5)
    assert bool(scores.isfinite().all()) and sorted(scores[0, 0, :8].tolist()) == [i / 8 for i in range(8)]


def test_expected_attention_after_evictions_uses_queries_of_all_the_text():
    q, k, v = random_qkv(4, 2, 50)
    layer = Layer(ExpectedAttention(sinks=2, future=7), q, k, v)
    for end in (20, 35, 50):
        layer.feed(end - layer.seen)
        held, scores = layer.cut(12)
    for h in range(2):
        rows = held[0, h][held[0, h] >= 2]
        group, keys, values = (x.numpy() for x in (q[0, 2 * h :][:2, 2:], turned(k)[0, h, rows], v[0, h, rows]))
        expected = paper_expected(group, keys, values, 0, 7, 0.0, True, start=50)
        np.testing.assert_allclose(scores[0, h][held[0, h] >= 2], expected, rtol=1e-4)


def test_compactor_attention_after_evictions_is_that_of_the_slots_own_block():
    """Blocks end at evictions; a kept slot keeps the attention that it received in its block, with both neighbours."""
    q, k, v = random_qkv(2, 1, 44)
    layer = Layer(Compactor(block=6, sketch=4, first=2, last=1), q, k, v)
    for end in (20, 44):
        layer.feed(end - layer.seen)
        layer.cut(9 if end == 20 else 33)
    edges = [2, 8, 14, 19, 25, 31, 37, 43]  # token 19, held back at the first eviction, opens a block
    expected = paper_compactor_attention(*(x.numpy() for x in (turned(q)[0], turned(k)[0, 0], v[0, 0])), edges)
    for position, entered in zip(layer.held[0, 0].tolist(), layer.entered[0, 0].tolist(), strict=True):
        if edges[0] <= position < edges[-1]:
            assert entered == pytest.approx(expected[position], rel=1e-4), position


# ---- properties ------------------------------------------------------------------------------------------------------------


def test_the_newest_of_equal_keys_is_the_least_redundant_of_them():
    torch.manual_seed(0)
    keys = torch.cat((torch.randn(1, 2, 6, D), torch.randn(1, 2, 1, D).expand(1, 2, 4, D)), 2)
    equal = redundancy(keys, torch.ones(1, 2, 10, dtype=torch.bool), 0.5)[..., 6:]
    assert (equal[..., :3] > equal[..., 3:]).all()


def test_a_text_of_equal_keys_and_values_scores_without_error():
    q, k, v = (torch.ones(1, 2, 40, D) for _ in range(3))
    for part in PARTS:
        layer = Layer(part, q, k, v)
        layer.feed(40)
        layer.cut(10)


def test_leverage_of_few_different_keys_is_that_of_float64():
    """Digits or blank lines have such keys in the first layer: products of long keys round by more than the ridge."""
    draw = torch.Generator().manual_seed(0)
    kinds = 100 * torch.nn.functional.normalize(torch.randn(64, 4, 64, generator=draw), dim=-1)
    keys = kinds[:, torch.randint(4, (64,), generator=draw)]
    among, sketch = torch.ones(1, 64, 64, dtype=torch.bool), gaussian_sketch(64, 64, 48, 0)
    found = leverage_scores(keys[None], among, sketch)[0].numpy()
    for mine, k, own in zip(found, keys.double().numpy(), sketch.numpy(), strict=True):
        assert mine == pytest.approx(paper_leverage(k, own), rel=1e-2)


def test_queries_that_see_themselves_alone_leave_the_window_safe():
    """Weights of all older slots are 0 in float32."""
    torch.manual_seed(0)
    policy, q, k = parse_policy("defensivekv(4)"), torch.randn(1, 2, 40, D), torch.randn(1, 1, 40, D)
    q[:, :, -1] = k[:, :, -1] = 100.0
    layer = Layer(policy.score, q, k, k, rope=None)
    layer.feed(40)
    slots = layer.slots(20, queries=lambda: q[:, :, -4:])
    assert policy.scores(slots).isfinite().all() and policy.choose(slots)[..., -4:].all()


# ---- in the cache ----------------------------------------------------------------------------------------------------------

EXPRESSIONS = [
    "score=knorm", "score=keydiff", "score=lagkv(2,6)", "score=expected-attention(2,9)", "score=compactor(5,4,1.0,2,1)",
]  # fmt: skip


class Recorder(Handler):
    """Handler of a plain forward that keeps the first layer's q, k and v, which no eviction can change."""

    wants_unrotated = True

    def attend(self, layer, q, k, v, softmax, x=None):
        if layer == 0:
            self.q, self.k, self.v = q, k, v
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def read_in(model, cache, ids, piece):
    with attach(model):
        for start in range(0, ids.shape[1], piece):
            model(ids[:, start : start + piece], **{CACHE: cache}, use_cache=True)


@pytest.mark.parametrize("expression", EXPRESSIONS)
@pytest.mark.parametrize("run", ["chunked", "one-shot", "decoding"])
def test_a_bounded_run_keeps_what_the_scores_say(expression, run):
    """First layer, original positions, against a run of the score alone."""
    model = tiny_model("llama").double()
    ids = torch.randint(3, 97, (1, 103), generator=torch.Generator().manual_seed(3))
    length = 60 if run == "decoding" else 103
    chunks = {"one_shot": True} if run == "one-shot" else {"chunk": 16, "local_len": 6, "stabilizers": 0}
    cache = BoundedCache(20, expression, prompt_length=length, positions="original", **chunks)
    read_in(model, cache, ids[:, :length], 7)
    read_in(model, cache, ids[:, length:], 1)
    recorder = Recorder()
    with attach(model) as attached, attached.handled_by(recorder):
        model(ids, use_cache=False)
    alone = Layer(cache.policy.score, recorder.q, recorder.k, recorder.v, rope=cache.context.ropes[0])
    events = [(seen, keep) for seen, keep, _ in cache.schedule.evictions(length, 20)]
    if run == "decoding":  # full at budget + chunk = 36 rows: 20 after the prompt, so at 76 and 92 tokens
        events += [(76, 20), (92, 20)]
    for seen, keep in events:
        alone.feed(seen - alone.seen)
        alone.cut(keep)
    alone.feed(103 - alone.seen)
    assert cache.kept_positions(0).tolist() == alone.held.tolist()
    assert len(events) > (run != "one-shot")
