"""The bounded cache against a definition written again from the paper: float64, Python lists, one token at a time.

Source: Locret, algorithm 1 (budget, chunk, stabilizers, local tail) and the two position conventions.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest
import torch
from doubled_caches import doubled, tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from pairwise import pairs
from tiny_heads import tiny_heads
from tiny_models import tiny_model

from locret_kit import BoundedCache, attach
from locret_kit.backbones.releases import CACHE
from locret_kit.cache.geometry.schedule import Schedule
from locret_kit.policies.base import Score, Slots, TopK
from locret_kit.policies.grammar import parse_policy
from locret_kit.policies.methods.locret import Cis
from locret_kit.policies.methods.streaming import Recency
from locret_kit.policies.policy import Policy
from locret_kit.policies.scopes import Sinks, Stabilizers
from locret_kit.runtime.session import Sampling, decode, prefill

pytestmark = pytest.mark.usefixtures("poisoned")

FEW = settings(max_examples=12)


@cache
def backbone(family: str):
    return tiny_model(family)


# ---- the definition ---------------------------------------------------------------------------------------------


def hashed(seed: int, layer: int, head: int, position: int) -> float:
    def mix(x: int) -> int:
        x &= 0x7FFFFFFF
        x = ((x ^ (x >> 16)) * 0x45D9F3B) & 0x7FFFFFFF
        x = ((x ^ (x >> 15)) * 0x2C1B3C6D) & 0x7FFFFFFF
        return x ^ (x >> 16)

    return (mix(mix(mix(mix(position) + seed) + layer) + head) & 0xFFFFFF) / 2**24


def rotated(x: np.ndarray, position: int, theta: float) -> np.ndarray:
    D = len(x)
    out = np.empty(D)
    for j in range(D // 2):
        angle = position * theta ** (-2 * j / D)
        a, b = x[j], x[j + D // 2]
        out[j] = a * math.cos(angle) - b * math.sin(angle)
        out[j + D // 2] = b * math.cos(angle) + a * math.sin(angle)
    return out


class Definition:
    """A language model whose cache is a list of rows (position, k before RoPE, v, score) a layer and head."""

    def __init__(self, model, policy, heads, *, budget, chunk, stabilizers, local_len, positions, length, seed):
        self.model, self.policy, self.heads, self.seed = model, policy, heads, seed
        self.budget, self.chunk, self.stabilizers = budget, chunk, stabilizers
        self.positions, self.length = positions, length
        config = model.config
        self.L, self.H, self.Q = config.num_hidden_layers, config.num_key_value_heads, config.num_attention_heads
        self.theta = config.rope_parameters["rope_theta"]
        self.rows = [[[] for _ in range(self.H)] for _ in range(self.L)]
        self.body = max(0, length - local_len)
        self.seen = 0

    def block(self, ids: list[int]) -> np.ndarray:
        """Forward of new tokens over the rows, then the rows gain them. Logits of the last token."""
        x = self.model.model.embed_tokens(torch.tensor(ids))
        for i, layer in enumerate(self.model.model.layers):
            attn = layer.self_attn
            normed = layer.input_layernorm(x)
            q = attn.q_proj(normed).view(len(ids), self.Q, -1)
            k = attn.k_proj(normed).view(len(ids), self.H, -1)
            v = attn.v_proj(normed).view(len(ids), self.H, -1)
            if hasattr(attn, "q_norm"):
                q, k = attn.q_norm(q), attn.k_norm(k)
            out = self.attention(i, q.numpy(), k.numpy(), v.numpy())
            x = x + attn.o_proj(torch.from_numpy(out).reshape(len(ids), -1))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        self.seen += len(ids)
        return self.model.lm_head(self.model.model.norm(x[-1])).numpy()

    def attention(self, i: int, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        T, Q, D = q.shape
        out = np.empty((T, Q, D))
        for h in range(self.H):
            rows = self.rows[i][h]
            old = len(rows)
            for t in range(T):
                score = self.score(i, h, self.seen + t, q[t], k[t], v[t])
                rows.append((self.seen + t, k[t, h], v[t, h], score))
            place = [rank if self.positions == "compact" else row[0] for rank, row in enumerate(rows)]
            keys = np.stack([rotated(row[1], p, self.theta) for row, p in zip(rows, place, strict=True)])
            values = np.stack([row[2] for row in rows])
            for g in range(Q // self.H):
                for t in range(T):
                    visible = old + t + 1
                    query = rotated(q[t, h * (Q // self.H) + g], place[old + t], self.theta)
                    logit = keys[:visible] @ query / math.sqrt(D)
                    p = np.exp(logit - logit.max())
                    out[t, h * (Q // self.H) + g] = (p / p.sum()) @ values[:visible]
        return out

    def score(self, i: int, h: int, position: int, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> float:
        if self.policy == "random":
            return hashed(self.seed, i, h, position)
        if self.policy != "locret":
            return position
        x = np.concatenate([q.ravel(), k.ravel(), v.ravel()])
        hidden = self.heads[i].fc1.weight.double().numpy() @ x
        hidden = hidden / (1 + np.exp(-hidden))  # silu, the tiny backbones' activation
        return float(self.heads[i].fc2.weight.double().numpy()[h] @ hidden)

    def evict(self, keep: int, stabilizers: int) -> None:
        for layer in self.rows:
            for h, rows in enumerate(layer):
                if len(rows) <= keep:
                    continue

                def rank(at: int, rows=rows):
                    protected = self.policy == "streaming" and rows[at][0] < 4
                    protected |= self.policy == "locret" and at >= len(rows) - stabilizers
                    return (protected, rows[at][3] if not protected else 0, at)

                stay = sorted(range(len(rows)), key=rank, reverse=True)[:keep]
                layer[h] = [rows[at] for at in sorted(stay)]

    def prefill(self, ids: list[int]) -> list[list[list[list[int]]]]:
        """Algorithm 1; the kept positions after each eviction, and at the end."""
        trace = []
        for start in range(0, self.body, self.chunk):
            end = min(start + self.chunk, self.body)
            self.logits = self.block(ids[start:end])
            last = end == self.body
            keep = self.budget - (self.length - self.body) if last else self.budget
            if self.length > self.budget and len(self.rows[0][0]) > keep:
                self.evict(keep, 0 if last else self.stabilizers)
            trace.append(self.kept())
        if self.body < self.length:
            self.logits = self.block(ids[self.body :])
        return [*trace, self.kept()]

    def step(self, token: int) -> None:
        if len(self.rows[0][0]) == self.budget + self.chunk:
            self.evict(self.budget, self.stabilizers)
        self.logits = self.block([token])

    def kept(self) -> list[list[list[int]]]:
        return [[[row[0] for row in rows] for rows in layer] for layer in self.rows]


def slots_of(scores, positions, *, keep: int, stabilizers: int = 0) -> Slots:
    """The slots of one head, by their entry scores."""
    at = torch.tensor(list(positions), dtype=torch.int32).view(1, 1, -1)
    entered = torch.tensor(scores).view(1, 1, -1)
    return Slots(
        layer=0, layers=1, keep=keep, stabilizers=stabilizers, chunk=8, since_eviction=0, seen=int(at.max()) + 1, positions=at,
        valid=torch.ones_like(at, dtype=torch.bool), entry_scores=entered, stats={},
    )  # fmt: skip


def chosen(policy: Policy, slots: Slots) -> list[int]:
    return policy.choose(slots)[0, 0].nonzero().flatten().tolist()


def held(cache: BoundedCache) -> list[list[list[int]]]:
    return [cache.kept_positions(i)[0].tolist() for i in range(len(cache.layers))]


@pytest.mark.parametrize(
    ("policy", "chunk", "budget", "stabilizers", "local_len", "length", "family", "positions"),
    pairs(
        [
            ("locret", 7, 16, 5, 4, 53),
            ("random", 7, 10, 0, 3, 40),
            ("streaming", 1, 12, 0, 5, 33),
            ("recency", 7, 9, 0, 0, 35),
            ("locret", 64, 24, 6, 9, 90),
        ],
        ["llama", "llama-mha", "llama-mqa", "qwen3"],
        ["compact", "original"],
    ),
)
@torch.no_grad()
def test_equals_the_definition(family, positions, policy, chunk, budget, stabilizers, local_len, length):
    model = doubled(family)
    heads = tiny_heads(model, 32) if policy == "locret" else None
    common = dict(budget=budget, chunk=chunk, stabilizers=stabilizers, local_len=local_len, positions=positions, seed=3)
    mine = Definition(model, policy, heads, length=length, **common)
    ids = tokens(length, seed=length)[0].tolist()
    trace = mine.prefill(ids)
    cache = BoundedCache(policy=policy, heads=heads, prompt_length=length, **common)
    with attach(model):
        theirs = []
        logits = prefill(model, ids, cache, lambda done, total: theirs.append(held(cache)))
        assert theirs[: len(trace) - 1] == trace[:-1]
        assert theirs[-1] == trace[-1]
        assert cache.counters.evictions > 0
        np.testing.assert_allclose(logits.numpy(), mine.logits, atol=2e-3)
        for n in range(chunk + 4 if chunk < 10 else 2):  # across an eviction while decoding
            token = 2 + (7 * n) % 90
            mine.step(token)
            out = model(input_ids=torch.tensor([[token]]), **{CACHE: cache}).logits[0, -1]
            assert held(cache) == mine.kept()
            np.testing.assert_allclose(out.numpy(), mine.logits, atol=2e-3)


@torch.no_grad()
def test_locret_one_token_at_a_time():
    model = doubled("llama")
    heads = tiny_heads(model, 32, seed=5)
    common = dict(budget=11, chunk=1, stabilizers=4, local_len=3, positions="compact", seed=0)
    mine = Definition(model, "locret", heads, length=30, **common)
    ids = tokens(30, seed=8)[0].tolist()
    trace = mine.prefill(ids)
    cache = BoundedCache(policy="locret", heads=heads, prompt_length=30, **common)
    with attach(model):
        theirs = []
        prefill(model, ids, cache, lambda done, total: theirs.append(held(cache)))
    assert theirs[: len(trace) - 1] == trace[:-1] and theirs[-1] == trace[-1]


def test_last_eviction_ignores_stabilizers():
    """The newest token of the body has the lowest score: it is protected in the middle, and goes at the end."""

    class Falling(Score):
        def score_new_tokens(self, entry):
            return -Recency().score_new_tokens(entry)

    policy = Policy("falling", Falling(), (Stabilizers(),), TopK())
    model = backbone("llama")
    cache = BoundedCache(10, policy, chunk=8, prompt_length=40, stabilizers=3, local_len=4)
    seen = []
    with attach(model):
        prefill(model, tokens(40)[0].tolist(), cache, lambda done, total: seen.append(held(cache)[0][0]))
    assert seen[1] == [*range(7), 13, 14, 15]
    assert seen[-1] == [*range(6), *range(36, 40)]


def test_ties_go_to_the_newer_slot():
    slots = slots_of([1.0, 2.0, 1.0, 1.0, 0.0], range(5), keep=3)
    assert chosen(Policy("x", Cis(), (), TopK()), slots) == [1, 2, 3]


def test_more_protected_than_room_keeps_the_newest():
    policy = Policy("x", Cis(), (Sinks(4), Stabilizers()), TopK())
    assert chosen(policy, slots_of([0.0] * 9, range(9), keep=3, stabilizers=3)) == [6, 7, 8]


# ---- theorem F.1 ------------------------------------------------------------------------------------------------


@given(st.data())
@settings(max_examples=60)
def test_theorem_f1_on_the_policy(data):
    """With scores fixed when a token enters, evicting chunk by chunk keeps the top of the whole prefix."""
    n = data.draw(st.integers(1, 40))
    budget = data.draw(st.integers(1, 12))
    score = data.draw(st.lists(st.integers(-3, 3), min_size=n, max_size=n))
    policy = Policy("x", Cis(), (Stabilizers(),), TopK())
    kept: list[int] = []
    at = 0
    while at < n:
        step = data.draw(st.integers(1, n - at))
        kept += range(at, at + step)
        at += step
        if len(kept) > budget:
            slots = slots_of([float(score[i]) for i in kept], kept, keep=budget)
            kept = [kept[i] for i in chosen(policy, slots)]
        best = sorted(range(at), key=lambda i: (score[i], i), reverse=True)[:budget]
        assert kept == sorted(best)


class Given(Score):
    """Scores that the test fixed, a layer, head and position."""

    def __init__(self, table):
        self.table = table

    def score_new_tokens(self, entry):
        T = entry.k.shape[2]
        return self.table[entry.layer, :, entry.position : entry.position + T].expand(entry.k.shape[0], -1, -1)


@pytest.mark.parametrize("chunk", [1, 3, 7, 20, 64])
def test_theorem_f1_on_the_cache(chunk):
    model, budget, n = backbone("llama"), 9, 50
    table = torch.randint(0, 12, (3, 2, n), generator=torch.Generator().manual_seed(0)).float()
    policy = Policy("given", Given(table), (Stabilizers(),), TopK())
    cache = BoundedCache(budget, policy, chunk=chunk, prompt_length=n, stabilizers=0, local_len=0)
    with attach(model):
        prefill(model, tokens(n)[0].tolist(), cache)
    for layer in range(3):
        for h in range(2):
            best = sorted(range(n), key=lambda i, a=layer, b=h: (table[a, b, i].item(), i), reverse=True)[:budget]
            assert held(cache)[layer][h] == sorted(best)


# ---- pieces -----------------------------------------------------------------------------------------------------


@given(
    cuts=st.lists(st.integers(1, 69), max_size=5, unique=True),
    chunk=st.sampled_from([5, 16, 33]),
    positions=st.sampled_from(["compact", "original"]),
    policy=st.sampled_from(["locret", "random", "streaming"]),
    known=st.booleans(),
)
@FEW
@torch.no_grad()
def test_pieces_do_not_matter(cuts, chunk, positions, policy, known):
    model = doubled("llama")
    heads = tiny_heads(model, 32) if policy == "locret" else None
    ids = tokens(70, seed=4)
    make = lambda: BoundedCache(  # noqa: E731
        24,
        policy,
        heads,
        chunk=chunk,
        prompt_length=70 if known else None,
        positions=positions,
        stabilizers=6,
        local_len=5,
    )
    whole, pieces = make(), make()
    with attach(model):
        want = prefill(model, ids[0].tolist(), whole)
        for a, b in zip([0, *sorted(cuts)], [*sorted(cuts), 70], strict=True):
            got = model(input_ids=ids[:, a:b], **{CACHE: pieces}, logits_to_keep=1).logits[0, -1]
    assert held(pieces) == held(whole)
    assert (got - want).abs().max() < 1e-4
    assert pieces.get_seq_length() == whole.get_seq_length() == 70


@pytest.mark.parametrize("policy", ["locret", "streaming"])
@pytest.mark.parametrize("piece", [None, 1, 17, 32, 1000])
def test_generate_equals_the_kits_own_loop(policy, piece):
    # float64: float32 rounds differently in pieces of another shape, and a near tie of scores tips over
    model = doubled("qwen3")
    heads = tiny_heads(model, 32) if policy == "locret" else None
    ids = tokens(80, seed=6)
    make = lambda: BoundedCache(20, policy, heads, chunk=8, prompt_length=80, stabilizers=4, local_len=6)  # noqa: E731
    mine, theirs = make(), make()
    with attach(model):
        logits = prefill(model, ids[0].tolist(), mine)
        want = list(decode(
            model, mine, logits, prompt=ids[0].tolist(), max_new_tokens=20, sampling=Sampling(), stop=frozenset()
        ))  # fmt: skip
        extra = {} if piece is None else {"prefill_chunk_size": piece}
        got = model.generate(ids, **{CACHE: theirs}, max_new_tokens=20, min_new_tokens=20, do_sample=False, **extra)
    assert got[0, 80:].tolist() == want
    assert held(mine) == held(theirs)
    assert mine.counters.evictions > 1


# ---- invariants -------------------------------------------------------------------------------------------------


@given(
    length=st.integers(1, 80),
    budget=st.integers(2, 30),
    chunk=st.integers(1, 40),
    share=st.tuples(st.floats(0, 0.99), st.floats(0, 0.99)),
    policy=st.sampled_from(
        ["locret", "locret(sinks=2)", "random", "recency", "streaming", "score=random scope=stabilizers"]
    ),
    positions=st.sampled_from(["compact", "original"]),
)
@settings(max_examples=30)
@torch.no_grad()
def test_invariants(length, budget, chunk, share, policy, positions):
    model = backbone("llama")
    heads = tiny_heads(model, 32) if "locret" in policy else None
    stabilizers, local_len = (int(s * budget) for s in share)
    cache = BoundedCache(
        budget, policy, heads, chunk=chunk, prompt_length=length, stabilizers=stabilizers, local_len=local_len,
        positions=positions,
    )  # fmt: skip
    sizes = set()
    most = [0]

    def watch(rows, old):
        def append(*args):
            old(*args)
            most[0] = max(most[0], rows.rows)

        return append

    def check(done, total):
        assert cache.get_seq_length() == done
        sizes.add(cache.nbytes)
        for layer in range(3):
            kept = cache.kept_positions(layer)
            assert (kept.diff(dim=-1) > 0).all() and kept.min() >= 0 and kept.max() < done
            # an eviction leaves at most the budget; where none was due, the rows fit anyway
            assert kept.shape[-1] <= budget
            if done < length - local_len and policy in ("locret", "score=random scope=stabilizers"):
                newest = min(stabilizers, done)
                assert kept[..., kept.shape[-1] - newest :].eq(torch.arange(done - newest, done)).all()

    with attach(model):
        cache.bind(model)
        for rows in cache.layers:
            rows.append = watch(rows, rows.append)
        prefill(model, tokens(length)[0].tolist(), cache, check)
        assert len(sizes) == 1
        assert cache.kept_positions(0)[..., -1].eq(length - 1).all() or local_len == 0
        for n in range(5):
            model(input_ids=torch.tensor([[3 + n]]), **{CACHE: cache})
            assert cache.get_seq_length() == length + n + 1
            assert cache.kept_positions(0)[..., -1].eq(length + n).all()  # it was appended after any eviction
    assert most[0] <= budget + chunk
    assert cache.nbytes == sizes.pop()


@pytest.mark.parametrize("family", ["mistral-window", "gemma3"])
@pytest.mark.parametrize(("chunk", "local_len", "piece"), [(1, 5, 9), (3, 20, 70), (8, 60, 13), (40, 0, 70)])
@torch.no_grad()
def test_window_layers_hold_their_window(family, chunk, local_len, piece):
    """And no more, also where the held-back tail is longer than a chunk; their output is the full model's."""
    model = backbone(family)
    ids = tokens(70, seed=2)
    want = model(input_ids=ids).logits[0, -1]
    cache = BoundedCache(80, "streaming", chunk=chunk, prompt_length=70, local_len=local_len)
    with attach(model):
        for at in range(0, 70, piece):
            got = model(input_ids=ids[:, at : at + piece], **{CACHE: cache}).logits[0, -1]
            for rows in cache.layers:
                if rows.window is not None:
                    assert rows.rows <= rows.codec.keys.shape[2] <= rows.window - 1 + chunk
    assert (got - want).abs().max() < 1e-4


@pytest.mark.parametrize("length", [1, 3, 24, 25])
def test_short_prompts_lose_nothing(length):
    model = backbone("llama")
    cache = BoundedCache(
        25, "locret", tiny_heads(model, 32), chunk=4, prompt_length=length, stabilizers=6, local_len=10
    )
    ids = tokens(length)
    with attach(model):
        got = prefill(model, ids[0].tolist(), cache)
    assert held(cache)[2][1] == list(range(length))
    assert cache.counters.evictions == 0
    assert (got - model(input_ids=ids).logits[0, -1]).abs().max() < 1e-4


def test_full_policy_grows_past_its_budget():
    model = backbone("llama")
    ids = tokens(60)
    for known in (60, None):
        cache = BoundedCache(8, "full", chunk=7, prompt_length=known)
        with attach(model):
            got = prefill(model, ids[0].tolist(), cache)
        assert cache.kept_rows == [60] * 3
        assert (got - model(input_ids=ids).logits[0, -1]).abs().max() < 1e-4


@given(n=st.integers(1, 60), budget=st.integers(1, 20), chunk=st.integers(1, 30), local=st.integers(0, 19))
@settings(max_examples=80)
def test_schedule_never_leaves_the_buffers(n, budget, chunk, local):
    schedule = Schedule(budget, chunk, 0, min(local, budget - 1), n)
    seen = rows = 0
    while seen < n:
        step = schedule.until_boundary(seen)
        assert 1 <= step <= chunk
        seen, rows = seen + step, rows + step
        assert rows <= schedule.capacity
        keep = schedule.keep_at(seen, rows)
        if keep is not None:
            assert keep < rows
            rows = keep
    assert seen == n and rows == min(n, budget)


def test_settings_out_of_range_are_named():
    for settings_, words in [
        (dict(budget=0), "budget=0"),
        (dict(budget=8, chunk=0), "chunk=0"),
        (dict(budget=8, stabilizers=8), "stabilizers=8 must be below budget=8"),
        (dict(budget=8, local_len=9), "local_len=9 must be below budget=8"),
        (dict(budget=8, prompt_length=0), "prompt_length=0"),
        (dict(budget=8, positions="rank"), "positions='rank'"),
    ]:
        with pytest.raises(ValueError, match=words):
            BoundedCache(policy="streaming", **settings_)
    with pytest.raises(ValueError, match="pass heads="):
        BoundedCache(8, "locret")
    with pytest.raises(ValueError, match="Did you mean 'streaming'"):
        parse_policy("streamin")


def test_heads_by_their_folder(tmp_path):
    model = backbone("llama")
    heads = tiny_heads(model, 32)
    heads.save_pretrained(tmp_path / "heads")
    ids = tokens(40)
    kept = []
    for named in (heads, str(tmp_path / "heads"), tmp_path / "heads"):
        made = BoundedCache(16, heads=named, chunk=8, prompt_length=40)
        with attach(model), torch.no_grad():
            model(ids, **{CACHE: made})
        kept.append(torch.stack([made.kept_positions(layer)[0][0] for layer in range(3)]))
    assert torch.equal(kept[0], kept[1]) and torch.equal(kept[0], kept[2])
    with pytest.raises(FileNotFoundError, match="ckpt='no-such-heads': no such file or folder"):
        BoundedCache(16, heads="no-such-heads")
