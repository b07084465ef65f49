"""The bounded cache in whole models, against full attention, and its schedule against the definition."""

from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from policy_runs import answer, held
from policy_runs import backbone as doubled
from policy_runs import distinct_texts as tokens
from tiny_heads import tiny_heads
from tiny_models import tiny_model

from locret_kit import BoundedCache, attach
from locret_kit.backbones.libraries import CACHE
from locret_kit.cache.due import Schedule
from locret_kit.settings import RunSettings

pytestmark = pytest.mark.usefixtures("poisoned")


@cache
def backbone(family: str):
    return tiny_model(family)


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
    want = answer(mine, ids[0].tolist(), 20, model)
    with attach(model):
        extra = {} if piece is None else {"prefill_chunk_size": piece}
        got = model.generate(ids, **{CACHE: theirs}, max_new_tokens=20, min_new_tokens=20, do_sample=False, **extra)
    assert got[0, 80:].tolist() == want
    assert held(mine) == held(theirs)
    assert mine.counters.evictions > 1


def test_no_tokens_that_were_never_read_come_from_taking_some_back():
    cache = BoundedCache(60, "knorm", chunk=8, prompt_length=20)
    answer(cache, tokens(20, seed=6)[0].tolist(), 6, doubled("qwen3"))
    seen, before = cache.get_seq_length(), held(cache)
    assert not cache.take_back(-1) and not cache.can_take_back(-30)
    assert (cache.get_seq_length(), held(cache)) == (seen, before)


# ---- bounds -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["mistral-window", "gemma3"])
@pytest.mark.parametrize(("chunk", "local_len", "piece"), [(1, 5, 9), (3, 20, 70), (8, 60, 13), (40, 0, 70)])
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
        (dict(budget=8, stabilizers=8), "stabilizers=8 must be below budget=8"),
        (dict(budget=8, local_len=9), "local_len=9 must be below budget=8"),
        (dict(budget=8, prompt_length=0), "prompt_length=0"),
        (dict(budget=8, chunk=8, prompt_length=20, decode_every=9), "decode_every=9 must be from 1 to chunk=8"),
        (dict(budget=8, chunk=8, decode_every=2), "decode_every=2 needs prompt_length"),
    ]:
        with pytest.raises(ValueError, match=words):
            BoundedCache(policy="streaming", **settings_)
    made = BoundedCache(8, "streaming", prompt_length=3, one_shot=True, decode_every=9)  # whose chunk is the prompt
    assert made.schedule.decode_every == 9
    for both in (64, 0.5, RunSettings()):  # one of the two would be ignored
        with pytest.raises(ValueError, match="budget: given twice"):
            BoundedCache(both, "streaming", budget=8)
    with pytest.raises(ValueError, match="pass heads="):
        BoundedCache(8, "locret")


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
