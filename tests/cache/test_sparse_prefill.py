"""Sparse prefill against MInference written out from its paper in float64, and in whole runs."""

import json
import re

import numpy as np
import pytest
import torch
from policy_runs import backbone, held, logits_of, make, tokens
from tiny_models import tiny_model

from locret_kernels.attend import Blocks
from locret_kit import attach
from locret_kit.backbones.handlers import Handler
from locret_kit.backbones.spec import text_config
from locret_kit.cache.saved import load_cache, save_cache
from locret_kit.cache.stages import pairs_of
from locret_kit.policies.methods.minference import VerticalSlash
from locret_kit.runtime.session import prefill

LONG = 250
"""Tokens of a prompt, above what MInference always computes."""


# ---- the definitions ---------------------------------------------------------------------------------------------------


def weights_of(q, k, scaling, own):
    """Softmax of one head's queries over the rows up to their own."""
    logits = np.where(np.arange(len(k)) <= np.array(own)[:, None], q @ k.T * scaling, -np.inf)
    logits = np.exp(logits - logits.max(-1, keepdims=True))
    return logits / logits.sum(-1, keepdims=True)


def minference(q, k, scaling, vertical, slash, last=64):
    """What each query of one head attends to: algorithm 2, the 30 first columns and 100 nearest diagonals of the code, and
    diagonals in tiles of 64 queries."""
    T, S = len(q), len(k)
    L = min(last, T)
    a = weights_of(q[T - L :], k, scaling, range(S - L, S))
    column = [a[:, s].sum() for s in range(S)]
    diagonal = [sum(a[i, S - L + i - o] for i in range(L) if S - L + i - o >= 0) for o in range(S)]
    columns = sorted(range(S), key=lambda s: (s >= 30, -column[s] if s >= 30 else 0, s))[: max(30, vertical)]
    offsets = sorted(range(S), key=lambda o: (o >= 100, -diagonal[o] if o >= 100 else 0, o))[: max(50, slash)]
    return tiles(T, S, columns, offsets)


def tiles(T, S, columns, offsets):
    seen = np.zeros((T, S), dtype=bool)
    for start in range(0, T, 64):
        block = range(start, min(start + 64, T))
        rows = set(columns) | {S - T + start + i - o for o in offsets for i in range(64)} | {S - T + t for t in block}
        for t in block:
            seen[t, [r for r in rows if 0 <= r <= S - T + t]] = True
    return seen


def spread(blocks: Blocks, T: int, S: int) -> np.ndarray:
    """What each query ``[Q, T, S]`` sees of its block's rows."""
    seen = blocks.seen_BQNU[0].repeat_interleave(blocks.queries, 1)[:, :T].repeat_interleave(blocks.unit, 2)[:, :, :S]
    return (seen & (torch.arange(S) <= torch.arange(S - T, S)[:, None])).numpy()


def heads(T: int, S: int, seed: int = 0):
    """Queries of four heads and keys of two, whose attention is uneven."""
    make_ = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(1, n, rows, 8, generator=make_, dtype=torch.float64) for n, rows in ((4, T), (2, S)))
    return 2 * q, 2 * k


@pytest.mark.parametrize(("T", "S"), [(1, 1), (7, 7), (64, 64), (100, 300), (70, 333)])
@pytest.mark.parametrize("part", [VerticalSlash(40, 110), VerticalSlash(0, 0, 5), VerticalSlash(35, 160, 16)], ids=str)
def test_vertical_slash_is_the_paper(part, T, S):
    q, k = heads(T, S)
    seen = spread(part.choose(0, slice(0, 4), q, k, 0.3), T, S)
    for head in range(4):
        wanted = minference(q[0, head].numpy(), k[0, head // 2].numpy(), 0.3, part.vertical, part.slash, part.last)
        assert (seen[head] == wanted).all()


def test_patterns_of_a_file(tmp_path):
    """Heads have their own; those that the file does not name have the policy's."""
    file = tmp_path / "patterns.json"
    layer = {"0": ["stream_llm", 7, 20, 1.0], "2": ["block_sparse", 100, 0, 2.5]}
    layer["3"] = ["vertical_and_slash", 33, 120, 3]
    file.write_text(json.dumps([{}, layer]))
    part, (q, k) = VerticalSlash(40, 110, patterns=str(file)), heads(130, 330)
    seen = spread(part.choose(1, slice(0, 4), q, k, 0.3), 130, 330)
    first, second = ((q[0, h].numpy(), k[0, h // 2].numpy()) for h in (1, 3))
    assert (seen[0] == tiles(130, 330, range(7), range(20))).all()
    assert (seen[1] == minference(*first, 0.3, 40, 110)).all()
    assert (seen[3] == minference(*second, 0.3, 33, 120)).all()
    assert (seen[2] == (np.arange(330) <= np.arange(200, 330)[:, None])).all()  # 100 tiles are more than there are
    last = spread(part.choose(1, slice(3, 4), q[:, 3:], k[:, 1:], 0.3), 130, 330)  # a head by itself
    assert (last[0] == seen[3]).all()
    plain = spread(part.choose(0, slice(0, 4), q, k, 0.3), 130, 330)
    assert (plain[0] == minference(q[0, 0].numpy(), k[0, 0].numpy(), 0.3, 40, 110)).all()


def test_pooled_tiles_are_the_largest_means(monkeypatch, tmp_path):
    monkeypatch.setattr("locret_kit.policies.methods.minference.POOLED", 2)
    file = tmp_path / "patterns.json"
    file.write_text(json.dumps([{"1": ["block_sparse", 2, 0, 1]}]))
    q, k = heads(100, 330)
    seen = spread(VerticalSlash(patterns=str(file)).choose(0, slice(0, 4), q, k, 0.3), 100, 330)[1]
    for block, (start, end) in enumerate(((0, 64), (64, 100))):
        first = 230 + start
        mean = {u: float(q[0, 1, start:end].mean(0) @ k[0, 0, 64 * u : 64 * u + 64].mean(0)) for u in range(6)}
        best = sorted((u for u in mean if 64 * u <= first), key=lambda u: -mean[u])[:2]
        rows = {r for u in best for r in range(64 * u, 64 * u + 64)} | set(range(first, 230 + end))
        for t in range(start, end):
            assert set(np.flatnonzero(seen[t])) == {r for r in rows if r <= 230 + t}, block


# ---- whole runs --------------------------------------------------------------------------------------------------------


class Masked(Handler):
    """Dense attention in float64 of what a definition leaves of each chunk: a handler beside the kit's."""

    wants_unrotated = False

    def __init__(self, see):
        self.see, self.rows = see, {}

    def attend(self, layer, q, k, v, softmax, x=None):
        scaling = softmax.scaling
        before = self.rows.get(layer, (k[:, :, :0], v[:, :, :0]))
        keys, values = self.rows[layer] = tuple(torch.cat(pair, 2) for pair in zip(before, (k, v), strict=True))
        out, G = torch.empty_like(q), q.shape[1] // k.shape[1]
        for head in range(q.shape[1]):
            one, those = q[0, head], keys[0, head // G]
            mask = torch.from_numpy(self.see(one.numpy(), those.numpy(), scaling))
            logits = (one @ those.T * scaling).masked_fill(~mask, float("-inf"))
            out[0, head] = logits.softmax(-1) @ values[0, head // G]
        return out


def test_a_prompt_in_chunks_is_the_definition_in_chunks():
    """Every chunk chooses for itself; the held-back tail is one more."""
    model, ids = backbone(), tokens(LONG)
    cache = make("minference(30,100)", length=LONG, chunk=100, local_len=20)
    with attach(model) as attachment, torch.no_grad():
        prefill(model, ids, cache)
        handler, seen = Masked(lambda q, k, s: minference(q, k, s, 30, 100)), 0
        with attachment.handled_by(handler):
            for end in (100, 200, 230, LONG):
                places = torch.arange(seen, end)[None]
                model(input_ids=torch.tensor([ids[seen:end]]), position_ids=places, use_cache=False)
                seen = end
    for layer, rows in enumerate(cache.bounded):
        torch.testing.assert_close(rows.slots("values"), handler.rows[layer][1], rtol=1e-9, atol=1e-9)
    share = cache.counters.computed_share
    assert share is not None and 0.2 < share < 0.95


@pytest.mark.parametrize("policy", ["ada-locret", "snapkv(6,3)"])
def test_everything_chosen_is_dense_attention(policy):
    """Beside evictions, in heads of one length and of their own."""
    caches = []
    for text in (policy, f"{policy} sparse=vertical-slash"):
        caches.append(make(text, budget=40, length=150, chunk=50))
        logits_of(caches[-1], tokens(150))
    assert held(caches[1]) == held(caches[0]) and caches[0].counters.evictions > 1
    assert caches[0].counters.computed_share is None and caches[1].counters.computed_share == 1


def test_layers_with_a_window_are_dense():
    model = tiny_model("gemma3").double()
    cache = make("minference(8,20)", length=60, family="gemma3")
    logits_of(cache, tokens(60), model=model)
    full = sum(window is None for window in cache.context.spec.windows)
    heads_ = text_config(model).num_attention_heads
    chunks = [(13, 13), (13, 26), (13, 39), (13, 52), (3, 55), (5, 60)]
    every = ((torch.ones(1, heads_, -(-t // 64), s, dtype=torch.bool), t, s) for t, s in chunks)
    dense = sum(pairs_of(Blocks(seen, 64, 1), t, s)[1] for seen, t, s in every)
    assert 0 < full < len(cache.bounded) and cache.counters.dense_pairs == full * dense


def test_patterns_are_read_for_a_backbone_and_never_for_a_file(tmp_path):
    """A saved cache may come from elsewhere: what it names is not opened."""
    with pytest.raises(ValueError, match="patterns='nowhere.json': No such file"):
        make("minference(patterns=nowhere.json)").bind(backbone())
    file, model = tmp_path / "patterns.json", backbone()
    file.write_text(json.dumps([{}] * 3))
    policy = f"minference(patterns={file})"
    cache = make(policy, length=30)
    logits_of(cache, tokens(30))
    save_cache(cache, tmp_path / "a.locret")
    with pytest.raises(ValueError, match="has its patterns in a file of the machine that wrote it: pass policy="):
        load_cache(tmp_path / "a.locret", model)
    assert load_cache(tmp_path / "a.locret", model, policy=policy).get_seq_length() == 30


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({}, "must hold a list with an object per layer"),
        ([{"a": ["stream_llm", 1, 2, 3]}], "layer 0: head 'a' must be a number"),
        ([{"1": ["tri", 1, 2, 3]}], "layer 0, head 1: ['tri', 1, 2, 3] must be [PATTERN, VERTICAL, SLASH, SCORE]"),
        ([{"1": ["stream_llm", 1, -2, 3]}], "layer 0, head 1"),
        ([{}], "has 1 layers, and the backbone 3"),
        ([{}, {"6": ["stream_llm", 1, 2, 3]}, {}], "names head 6, and the backbone has 6"),
    ],
)
def test_what_is_no_file_of_patterns(content, said, tmp_path):
    file = tmp_path / "patterns.json"
    file.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=re.escape(said)):
        make(f"minference(patterns={file})").bind(backbone())
