"""A forked cache: one document, several questions."""

import copy
import pickle
from itertools import product

import pytest
import torch
from policy_runs import POLICIES, backbone, by_kind, held, logits_of, make, tokens, turn
from tiny_tokenizer import tiny_tokenizer

from locret_kit import attach
from locret_kit.backbones.libraries import CACHE
from locret_kit.cache.bounded import CannotFork
from locret_kit.runtime.session import Answer, prefill

DOCUMENT = tokens(65, seed=9)


def logits_after(cache, ids) -> torch.Tensor:
    return logits_of(cache, ids, [7, 7, 7])


def alike(fork, fresh, ids) -> None:
    """Both go on alike."""
    assert torch.equal(logits_after(fork, ids), logits_after(fresh, ids))
    assert held(fork) == held(fresh) and fork.counters.evictions == fresh.counters.evictions


@pytest.mark.parametrize("policy", by_kind(POLICIES))
def test_a_fork_goes_on_as_a_fresh_run(policy):
    positions = turn(policy, "compact", "original")
    # A pyramid depends on the length of a short prompt, a reading on its end; elsewhere it need not be known.
    common = make(policy, length=90 if "pyramid" in policy or "windowed" in policy else None, positions=positions)
    prefill(backbone(), DOCUMENT, common)
    before = held(common)
    for seed in (1, 2):
        alike(common.fork(90), make(policy, length=90, positions=positions), DOCUMENT + tokens(25, seed=seed))
        assert held(common) == before


def test_a_fork_of_a_quantised_cache():
    ids = tokens(182, seed=9)  # whole chunks: other pieces are quantised with other rounding
    common = make("h2o", 100, length=None, kv_bits=4)
    prefill(backbone(), ids, common)
    ids += tokens(18, seed=1)
    fresh = logits_after(make("h2o", 100, length=200, kv_bits=4), ids)
    assert torch.equal(logits_after(common.fork(200), ids), fresh)
    assert not torch.equal(logits_after(make("h2o", 100, length=200), ids), fresh)


def test_a_fork_of_a_quantised_cache_to_a_shorter_prompt():
    """Its tables of key groups are as large as they were: under full attention with more room, otherwise not."""
    document, full = tokens(130, seed=9), make("full", length=500, kv_bits=4)
    one_shot = make("h2o", length=500, kv_bits=4, one_shot=True)
    for common in (full, one_shot):
        prefill(backbone(), document, common)
    fork = full.fork(140)
    for mine, theirs in zip(fork.bounded, full.bounded, strict=True):
        assert torch.equal(mine.slots("keys"), theirs.slots("keys"))
    prefill(backbone(), document + tokens(10, seed=1), fork)
    with pytest.raises(CannotFork, match="prompt_length=140: rows in 4 bits need the room of the longer prompt"):
        one_shot.fork(140)


@pytest.mark.parametrize(
    "policy", ["snapkv(6,3)", "pyramidkv(6,3,beta=3)", "nacl(proxies=0.1)", "ada-snapkv(6,3)", "locret"]
)
def test_a_fork_of_a_one_shot_cache_evicts_once(policy):
    common, fresh = make(policy, length=90, one_shot=True), make(policy, length=90, one_shot=True)
    prefill(backbone(), DOCUMENT, common)
    alike(common.fork(90), fresh, DOCUMENT + tokens(25, seed=1))
    assert fresh.counters.evictions == 1
    if "nacl" in policy:  # a share of the prompt's queries
        with pytest.raises(CannotFork, match="9 queries are kept here, and 10 in a prompt of that length"):
            common.fork(100)
    else:
        alike(common.fork(100), make(policy, length=100, one_shot=True), DOCUMENT + tokens(35, seed=2))
    with pytest.raises(ValueError, match="one_shot=True needs prompt_length"):
        common.fork(None)


@pytest.mark.parametrize(
    ("policy", "length", "read", "asked", "said"),
    [
        ("h2o", None, 65, 68, "prompt_length=68: 65 tokens are read already, more than the 63"),
        # Its body ends where this cache took the boundary for one in the middle.
        ("h2o", None, 65, 70, "prompt_length=70: after 65 tokens a fresh run would have evicted"),
        ("h2o", 83, 83, 200, "would have evicted"), ("h2o", 83, 83, None, "would have evicted"),
        ("pyramidkv(6)", 30, 10, 200, "layer 0 has a budget of 30 here and of 41 in a prompt of that length"),
    ],
)  # fmt: skip
def test_a_fork_that_would_not_equal_a_fresh_run_is_refused(policy, length, read, asked, said):
    cache = make(policy, length=length)
    assert cache.fork(30).get_seq_length() == 0
    prefill(backbone(), tokens(read), cache)
    with pytest.raises(CannotFork, match=said):
        cache.fork(asked)


def test_a_fork_of_a_cache_that_was_reset_is_a_fresh_one():
    cache = make("knorm")
    prefill(backbone(), tokens(30), cache)
    cache.reset(83)
    alike(cache.fork(90, evidence=True), make("knorm", length=90), tokens(90))


def test_a_prompt_that_was_read_is_refused():
    cache = make("h2o")
    prefill(backbone(), tokens(), cache)
    with pytest.raises(ValueError, match="the cache has seen 83 tokens already, the prompt has 83"):
        prefill(backbone(), tokens(), cache)


@pytest.mark.parametrize("asked", [80, 100])
def test_a_fork_answers_a_prompt_of_its_length_alone(asked):
    common = make("h2o", length=None)
    prefill(backbone(), DOCUMENT, common)
    with pytest.raises(ValueError, match=f"prompt_length=90 of the cache must be the {asked} tokens of the prompt"):
        Answer(backbone(), tiny_tokenizer(), tokens(asked), common.fork(90))


@pytest.mark.parametrize(
    ("policy", "kv_bits"), [("ada-snapkv(6,3)", None), *product(["locret", "score=entropy"], [None, 4])]
)
def test_a_deep_copy_goes_on_by_itself_and_shares_what_is_big(policy, kv_bits):
    model, cache = backbone(), make(policy, kv_bits=kv_bits)
    prefill(model, tokens(), cache)
    before, twin, ids = held(cache), copy.deepcopy(cache), torch.tensor([tokens(9, seed=4)])
    with attach(model), torch.no_grad():
        moved = model(ids, **{CACHE: twin}).logits
        assert held(cache) == before and torch.equal(model(ids, **{CACHE: cache}).logits, moved)
    assert held(cache) == held(twin)
    assert twin.context.model is cache.context.model and twin.heads is cache.heads
    with pytest.raises(TypeError, match="not pickled: fork"):
        pickle.dumps(cache)
