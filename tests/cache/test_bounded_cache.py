"""The bounded cache in whole models: against the definition of ``policy_oracle`` in float64, and against full attention."""

from functools import cache

import numpy as np
import policy_rules as oracle
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pairwise import pairs
from policy_oracle import OracleLayer, Rule, Setting
from policy_runs import backbone as doubled
from policy_runs import distinct_texts as tokens
from tiny_heads import tiny_heads
from tiny_models import tiny_model

from locret_kit import BoundedCache, attach
from locret_kit.backbones.libraries import CACHE
from locret_kit.cache.due import Schedule
from locret_kit.policies.grammar import parse_policy
from locret_kit.runtime.session import Sampling, decode, prefill
from locret_kit.settings import RunSettings

pytestmark = pytest.mark.usefixtures("poisoned")


@cache
def backbone(family: str):
    return tiny_model(family)


# ---- the definition ---------------------------------------------------------------------------------------------

RULES = {
    "locret": Rule(oracle.entered, [oracle.stabilizers]),
    "tova": Rule(oracle.last_token),
    "streaming": Rule(oracle.position, [oracle.sinks(4)]),
    "recency": Rule(oracle.position),
}


def forward(model, layers: list[OracleLayer], heads, ids: list[int]) -> np.ndarray:
    """Logits of the last of new tokens, written out; the layers' attention and evictions are the oracle's."""
    x = model.model.embed_tokens(torch.tensor(ids))
    for i, (layer, rows) in enumerate(zip(model.model.layers, layers, strict=True)):
        attn, normed = layer.self_attn, layer.input_layernorm(x)
        q, k, v = (proj(normed).unflatten(-1, (-1, attn.head_dim)) for proj in (attn.q_proj, attn.k_proj, attn.v_proj))
        if hasattr(attn, "q_norm"):
            q, k = attn.q_norm(q), attn.k_norm(k)
        entered = None
        if heads is not None:  # silu, the tiny backbones' activation
            hidden = torch.cat([part.flatten(1) for part in (q, k, v)], 1) @ heads[i].fc1.weight.double().T
            entered = (hidden / (1 + (-hidden).exp()) @ heads[i].fc2.weight.double().T).T.numpy()
        out = rows.feed(*(part.transpose(0, 1).numpy() for part in (q, k, v)), entered)
        x = x + attn.o_proj(torch.from_numpy(out).transpose(0, 1).flatten(1))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    return model.lm_head(model.model.norm(x[-1])).numpy()


def held(cache: BoundedCache) -> list[list[list[int]]]:
    return [cache.kept_positions(i)[0].tolist() for i in range(len(cache.layers))]


@pytest.mark.parametrize(
    ("policy", "chunk", "budget", "stabilizers", "local_len", "length", "family", "positions"),
    pairs(
        [
            ("locret", 7, 16, 5, 4, 53),
            ("tova", 7, 10, 0, 3, 40),
            ("streaming", 1, 12, 0, 5, 33),
            ("locret", 1, 11, 4, 3, 30),
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
    heads, config = tiny_heads(model, 32) if policy == "locret" else None, model.config
    common = dict(budget=budget, chunk=chunk, stabilizers=stabilizers, local_len=local_len, positions=positions)
    H, theta = config.num_key_value_heads, config.rope_parameters["rope_theta"]
    setting = Setting(H, config.num_attention_heads // H, length=length, theta=theta, **common)
    layers = [OracleLayer(RULES[policy], setting, i) for i in range(config.num_hidden_layers)]
    ids = tokens(length, seed=length)[0].tolist()
    cache = BoundedCache(policy=policy, heads=heads, prompt_length=length, **common)
    with attach(model):
        np.testing.assert_allclose(prefill(model, ids, cache).numpy(), forward(model, layers, heads, ids), atol=2e-3)
        assert held(cache) == [rows.held() for rows in layers] and cache.counters.evictions > 0
        for n in range(chunk + 4 if chunk < 10 else 2):  # across an eviction while decoding
            token = 2 + (7 * n) % 90
            wanted = forward(model, layers, heads, [token])
            out = model(input_ids=torch.tensor([[token]]), **{CACHE: cache}).logits[0, -1]
            assert held(cache) == [rows.held() for rows in layers]
            np.testing.assert_allclose(out.numpy(), wanted, atol=2e-3)


# ---- pieces -----------------------------------------------------------------------------------------------------


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


# ---- bounds -----------------------------------------------------------------------------------------------------


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
                    assert rows.rows <= rows.codec.keys.shape[1] <= rows.window - 1 + chunk
    assert (got - want).abs().max() < 1e-4


class LayerCounts:
    """A layer's numbers without its rows."""

    seen = rows = 0

    def __init__(self, capacity, window=None, chunked=False, grows=False):
        self.capacity, self.window, self.chunked, self.grows = capacity, window, chunked, grows


def boundary(schedule, seen):
    """Locret, algorithm 1: whether a block ends after so many tokens of the prompt."""
    return seen % schedule.chunk == 0 or seen == schedule.body


def keeps(schedule, seen, rows):
    """Rows after so many tokens, by definition."""
    s, n = schedule, schedule.prompt_length
    if n is None:
        cut = s.budget if seen % s.chunk == 0 else rows
    elif seen > n:
        cut = s.budget if s.decode_every and (seen - n) % s.decode_every == 0 else rows
    elif n <= s.budget or seen > s.body or not boundary(s, seen):
        cut = rows
    else:
        cut = s.budget - (n - s.body) if seen == s.body else s.budget
    return min(rows, cut)


@given(
    n=st.none() | st.integers(1, 60), budget=st.integers(1, 20), chunk=st.integers(1, 30), local=st.integers(0, 19),
    every=st.none() | st.integers(1, 30), after=st.booleans(), pieces=st.lists(st.integers(1, 40), min_size=1),
)  # fmt: skip
def test_what_is_due_is_what_the_definition_cuts_token_by_token(n, budget, chunk, local, every, after, pieces):
    every = None if n is None or every is None else min(every, chunk)
    schedule = Schedule(budget, chunk, 0, min(local, budget - 1), n, every)
    layer = LayerCounts(budget + chunk)
    for piece in pieces:
        while piece:
            due = schedule.due(layer, budget, piece, after_forward=after)
            assert 1 <= due.tokens <= piece
            if due.evict_before is not None:
                assert layer.rows + due.tokens > layer.capacity and n is not None and layer.seen >= n
                layer.rows = due.evict_before
            for token in range(due.tokens):
                layer.seen, layer.rows = layer.seen + 1, layer.rows + 1
                assert layer.rows <= layer.capacity
                kept = keeps(schedule, layer.seen, layer.rows)
                assert kept == layer.rows or token == due.tokens - 1, "a block crosses an eviction"
            assert due.evict_after == (None if kept == layer.rows else kept)
            assert due.final == (layer.seen == schedule.body)
            assert schedule.due(layer, budget, 0).evict_after == due.evict_after
            layer.rows, piece = kept, piece - due.tokens


@given(window=st.integers(1, 20), chunk=st.integers(1, 30), chunked=st.booleans(), pieces=st.lists(st.integers(1, 40)))
def test_a_window_holds_what_the_next_block_sees(window, chunk, chunked, pieces):
    schedule, layer = Schedule(8, chunk), LayerCounts(window if chunked else window - 1 + chunk, window, chunked)
    for piece in pieces:
        while piece:
            due, seen = schedule.due(layer, 0, piece), layer.seen
            assert due.evict_after is None and 1 <= due.tokens <= piece
            layer.rows = layer.rows if due.evict_before is None else min(layer.rows, due.evict_before)
            wanted = seen % window if chunked else min(seen, window - 1)
            assert wanted <= layer.rows and layer.rows + due.tokens <= layer.capacity
            layer.seen, layer.rows, piece = seen + due.tokens, layer.rows + due.tokens, piece - due.tokens


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
    for both in (64, 0.5, RunSettings()):  # one of the two would be ignored
        with pytest.raises(ValueError, match="budget: given twice"):
            BoundedCache(both, "streaming", budget=8)
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
