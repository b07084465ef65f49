"""Training-free key scores against their papers' formulas, written again as float64 loops over one head at a time."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from tiny_models import tiny_model

from locret_kit.backbones.decoder_attention import Handler, Rope, Softmax, rotate
from locret_kit.backbones.intercept import attach
from locret_kit.backbones.libraries import CACHE
from locret_kit.cache.bounded import BoundedCache
from locret_kit.policies.base import Entry, Slots, rank_of
from locret_kit.policies.methods.compactor import Compactor, gaussian_sketch
from locret_kit.policies.methods.expected_attention import ExpectedAttention
from locret_kit.policies.methods.keydiff import KeyDiff
from locret_kit.policies.methods.knorm import KNorm
from locret_kit.policies.methods.lagkv import LagKV

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


def softmax(x):
    e = [math.exp(a - max(x)) for a in x]
    return [a / sum(e) for a in e]


def dot(a, b):
    return sum(float(x) * float(y) for x, y in zip(a, b, strict=True))


def norm(a):
    return math.sqrt(dot(a, a))


def spin(x, position):
    """RoPE of one vector, half-split."""
    half = len(x) // 2
    out = [0.0] * len(x)
    for j in range(half):
        angle = position * 10000.0 ** (-2 * j / len(x))
        out[j] = x[j] * math.cos(angle) - x[j + half] * math.sin(angle)
        out[j + half] = x[j + half] * math.cos(angle) + x[j] * math.sin(angle)
    return out


def paper_lagkv(k, v, sinks, lag):
    """Ranks in each partition that has a complete next one; what follows is kept, and so are the sinks, first of all."""
    n, scores = len(k), [2.0] * sinks + [1.0] * (len(k) - sinks)
    for p in range((n - sinks) // lag - 1):
        own = range(sinks + p * lag, sinks + (p + 1) * lag)
        summed = [0.0] * lag
        for x in (k, v):
            deviations = []
            for t in own:
                relative = []
                for d in range(len(x[0])):
                    reference = [x[u + lag][d] for u in own]
                    relative.append((x[t][d] - min(reference)) / (max(reference) - min(reference)))
                mean = sum(relative) / len(relative)
                deviations.append(math.sqrt(sum((r - mean) ** 2 for r in relative) / (len(relative) - 1)))
            summed = [a + b for a, b in zip(summed, softmax(deviations), strict=True)]
        for i, t in enumerate(own):
            scores[t] = sum(other < summed[i] for other in summed) / lag
    return scores


def paper_expected(qs, k, v, sinks, future, epsilon, value_norm, start):
    """``qs``: raw queries of each head of the group; ``k`` rotated."""
    n, size = len(k), len(k[0])
    turn = np.zeros((size, size))
    for t in range(start, start + future):
        for d in range(size):
            turn[:, d] += np.array(spin(list(np.eye(size)[d]), t)) / future
    received = np.zeros(n)
    for q in qs:
        q = np.array(q)[sinks:]
        mean = q.mean(0)
        covariance = sum(np.outer(row - mean, row - mean) for row in q) / len(q)
        mean, covariance = turn @ mean, turn @ covariance @ turn.T
        keys = k[sinks:n]
        logits = [float(mean @ x) / math.sqrt(size) + float(x @ covariance @ x) / (2 * size) for x in keys]
        received[sinks:] += np.array(softmax(logits)) / len(qs)
    if value_norm:
        received = np.array([(received[t] + epsilon) * norm(v[t]) for t in range(n)])
    return received


def paper_compactor_attention(qs, k, v, first, last, block):
    """Non-causal block attention times the value's norm, mean of 3; ``qs`` and ``k`` rotated."""
    n, raw = len(k), {}
    for start in range(first, n - last, block):
        own = range(start, min(start + block, n - last))
        for s in own:
            raw[s] = 0.0
        for q in qs:
            for i in own:
                for s, weight in zip(own, softmax([dot(q[i], k[s]) for s in own]), strict=True):
                    raw[s] += weight / len(qs) * norm(v[s])
    return {s: (raw.get(s - 1, 0.0) + raw[s] + raw.get(s + 1, 0.0)) / 3 for s in raw}


def paper_leverage(k, sketch, ridge=1e-2):
    x = np.array(k) @ np.array(sketch)
    x = x - x.mean(0)
    inverse = np.linalg.inv(x.T @ x + ridge * np.eye(x.shape[1]))
    return [float(row @ inverse @ row) for row in x]


def z(values):
    values = np.array(values)
    return (values - values.mean()) / values.std(ddof=1)


# ---- one eviction after the whole prompt is the published method ----------------------------------------------------------


def test_knorm_counts_the_factor_on_cos_and_sin_where_a_part_of_the_key_is_turned():
    """Phi-4-mini's keys: LongRoPE on three quarters of a head."""
    q, k, v = random_qkv(2, 2, 21)
    rope = Rope(ROPE.inv_freq[:3], scaling=1.2)
    layer = Layer(KNorm(), q, k, v, rope=rope)
    layer.feed(21)
    torch.testing.assert_close(layer.entered, -turned(k, rope).norm(dim=-1).float())


@pytest.mark.parametrize(("Q", "H"), HEADS)
@pytest.mark.parametrize("tokens", [7, 19, 20, 41, 47])
def test_lagkv_is_the_papers(Q, H, tokens):
    q, k, v = random_qkv(Q, H, tokens)
    expected = [paper_lagkv(turned(k)[0, h].tolist(), v[0, h].tolist(), 4, 8) for h in range(H)]
    torch.testing.assert_close(one_shot(LagKV(sinks=4, lag=8), q, k, v, 5)[0], torch.tensor(expected))


@pytest.mark.parametrize(("Q", "H"), HEADS)
@pytest.mark.parametrize(("value_norm", "epsilon"), [(True, 0.0), (True, 0.02), (False, 0.0)])
def test_expected_attention_is_the_papers(Q, H, value_norm, epsilon):
    q, k, v = random_qkv(Q, H, 29)
    part = ExpectedAttention(sinks=3, future=11, epsilon=epsilon, value_norm=value_norm)
    mine = one_shot(part, q, k, v, 5)[0]
    for h in range(H):
        group = q[0, h * (Q // H) : (h + 1) * (Q // H)].tolist()
        keys = [np.array(row) for row in turned(k)[0, h].tolist()]
        expected = paper_expected(group, keys, v[0, h].tolist(), 3, 11, epsilon, value_norm, start=29)
        np.testing.assert_allclose(mine[h, 3:], expected[3:], rtol=1e-4)
        assert float(mine[h, :3].min()) > float(mine[h, 3:].max())


@pytest.mark.parametrize(("Q", "H"), HEADS)
@pytest.mark.parametrize(("tokens", "block"), [(40, 8), (41, 8), (45, 8), (30, 64)])
def test_compactor_is_the_papers(Q, H, tokens, block):
    q, k, v = random_qkv(Q, H, tokens)
    first, last, keep, G = 5, 3, 10, Q // H
    mine = one_shot(Compactor(block=block, sketch=6, first=first, last=last), q, k, v, keep)[0]
    inside = range(first, tokens - last)
    sketch = gaussian_sketch(H, D, 6, 0)
    attention, leverage = [], []
    for h in range(H):
        group = turned(q)[0, h * G : (h + 1) * G].tolist()
        pooled = paper_compactor_attention(group, turned(k)[0, h].tolist(), v[0, h].tolist(), first, last, block)
        attention.append([pooled[s] for s in inside])
        leverage.append(paper_leverage(k[0, h, first : tokens - last].tolist(), sketch[h].tolist()))
    expected = z(attention) + (1 - keep / tokens) * z(leverage)
    np.testing.assert_allclose(mine[:, first : tokens - last], expected, rtol=2e-4, atol=2e-5)
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
        rows = held[0, h].tolist()
        keys = [np.array(turned(k)[0, h, t].tolist()) for t in rows if t >= 2]
        values = [v[0, h, t].tolist() for t in rows if t >= 2]
        group = q[0, 2 * h : 2 * h + 2, 2:].tolist()
        expected = paper_expected(group, keys, values, 0, 7, 0.0, True, start=50)
        np.testing.assert_allclose(scores[0, h][held[0, h] >= 2], expected, rtol=1e-4)


def test_compactor_attention_after_evictions_is_that_of_the_slots_own_block():
    """Blocks end at evictions; a kept slot keeps the attention that it received in its block, with both neighbours."""
    q, k, v = random_qkv(2, 1, 44)
    layer = Layer(Compactor(block=6, sketch=4, first=2, last=1), q, k, v)
    for end in (20, 44):
        layer.feed(end - layer.seen)
        layer.cut(9 if end == 20 else 33)
    raw, edges = {}, [2, 8, 14, 19, 25, 31, 37, 43]  # token 19, held back at the first eviction, opens a block
    for a, b in pairwise(edges):
        own = slice(a, b)
        raw.update(zip(range(a, b), block_rows(turned(q)[0, :, own], turned(k)[0, 0, own], v[0, 0, own]), strict=True))
    for position, entered in zip(layer.held[0, 0].tolist(), layer.entered[0, 0].tolist(), strict=True):
        if position in raw:
            expected = sum(raw.get(position + d, 0.0) for d in (-1, 0, 1)) / 3
            assert entered == pytest.approx(expected, rel=1e-4), position


def block_rows(q_GTD, k_TD, v_TD):
    weights = torch.softmax(q_GTD @ k_TD.T, -1).mean(0).sum(0)
    return (weights * v_TD.norm(dim=-1)).tolist()


# ---- properties ------------------------------------------------------------------------------------------------------------


def test_a_text_of_equal_keys_and_values_scores_without_error():
    q, k, v = (torch.ones(1, 2, 40, D) for _ in range(3))
    for part in PARTS:
        layer = Layer(part, q, k, v)
        layer.feed(40)
        layer.cut(10)


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
