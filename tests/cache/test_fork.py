"""A forked cache: one document, several questions."""

import copy
import pickle
from itertools import product

import pytest
import torch
from policy_runs import POLICIES, backbone, held, logits_of, make, tokens, turn

from locret_kit import attach
from locret_kit.backbones.libraries import CACHE
from locret_kit.cache.bounded import CannotFork
from locret_kit.runtime.session import prefill


def logits_after(cache, ids) -> torch.Tensor:
    return logits_of(cache, ids, [7, 7, 7])


@pytest.mark.parametrize("policy", POLICIES)
def test_a_fork_goes_on_as_a_fresh_run(policy):
    model, document, positions = backbone(), tokens(65, seed=9), turn(policy, "compact", "original")
    # A pyramid depends on the length of a short prompt, a reading on its end; elsewhere it need not be known.
    common = make(policy, length=90 if "pyramid" in policy or "windowed" in policy else None, positions=positions)
    with attach(model), torch.no_grad():
        prefill(model, document, common)
        before = held(common)
        for seed in (1, 2):
            fork, fresh = common.fork(90), make(policy, length=90, positions=positions)
            ids = document + tokens(25, seed=seed)
            assert torch.equal(logits_after(fork, ids), logits_after(fresh, ids))
            assert held(fork) == held(fresh) and fork.counters.evictions == fresh.counters.evictions
            assert held(common) == before


def test_a_fork_of_a_quantised_cache():
    model, document = backbone(), tokens(182, seed=9)  # whole chunks: other pieces are quantised with other rounding
    with attach(model), torch.no_grad():
        common = make("h2o", 100, length=None, kv_bits=4)
        prefill(model, document, common)
        ids = document + tokens(18, seed=1)
        fresh = logits_after(make("h2o", 100, length=200, kv_bits=4), ids)
        assert torch.equal(logits_after(common.fork(200), ids), fresh)
        assert not torch.equal(logits_after(make("h2o", 100, length=200), ids), fresh)


def test_a_fork_of_a_quantised_cache_to_a_shorter_prompt():
    """Its tables of key groups are as large as they were: under full attention with more room, otherwise not."""
    model, document = backbone(), tokens(130, seed=9)
    full, one_shot = (
        make(policy, length=500, kv_bits=4, **more) for policy, more in (("full", {}), ("h2o", dict(one_shot=True)))
    )
    with attach(model), torch.no_grad():
        for common in (full, one_shot):
            prefill(model, document, common)
        fork = full.fork(140)
        for mine, theirs in zip(fork.bounded, full.bounded, strict=True):
            assert torch.equal(mine.slots("keys"), theirs.slots("keys"))
        prefill(model, document + tokens(10, seed=1), fork)
        with pytest.raises(CannotFork, match="prompt_length=140: rows in 4 bits need the room of the longer prompt"):
            one_shot.fork(140)


@pytest.mark.parametrize(
    "policy", ["snapkv(6,3)", "pyramidkv(6,3,beta=3)", "nacl(proxies=0.1)", "ada-snapkv(6,3)", "locret"]
)
def test_a_fork_of_a_one_shot_cache_evicts_once(policy):
    model, document = backbone(), tokens(65, seed=9)
    common = make(policy, length=90, one_shot=True)
    with attach(model), torch.no_grad():
        prefill(model, document, common)
        ids = document + tokens(25, seed=1)
        fork, fresh = common.fork(90), make(policy, length=90, one_shot=True)
        assert torch.equal(logits_after(fork, ids), logits_after(fresh, ids))
        assert held(fork) == held(fresh) and fork.counters.evictions == fresh.counters.evictions == 1
        longer, ids = make(policy, length=100, one_shot=True), document + tokens(35, seed=2)
        if "nacl" in policy:  # a share of the prompt's queries
            with pytest.raises(CannotFork, match="9 queries are kept here, and 10 in a prompt of that length"):
                common.fork(100)
        else:
            assert torch.equal(logits_after(common.fork(100), ids), logits_after(longer, ids))
        with pytest.raises(ValueError, match="one_shot=True needs prompt_length"):
            common.fork(None)


def test_a_fork_that_would_not_equal_a_fresh_run_is_refused():
    model = backbone()
    with attach(model), torch.no_grad():
        cache = make("h2o", length=None)
        prefill(model, tokens(65), cache)
        with pytest.raises(CannotFork, match="prompt_length=68: 65 tokens are read already, more than the 63"):
            cache.fork(68)
        with pytest.raises(CannotFork, match="prompt_length=70: after 65 tokens a fresh run would have evicted"):
            cache.fork(70)  # its body ends where this cache took the boundary for one in the middle
        ended = make("h2o")
        prefill(model, tokens(), ended)
        with pytest.raises(CannotFork, match="would have evicted"):
            ended.fork(200)
        with pytest.raises(CannotFork, match="would have evicted"):
            ended.fork()
        pyramid = make("pyramidkv(6)", length=30)
        prefill(model, tokens(10), pyramid)
        with pytest.raises(CannotFork, match="layer 0 has a budget of 30 here and of 41 in a prompt of that length"):
            pyramid.fork(200)
        with pytest.raises(ValueError, match="the cache has seen 83 tokens already, the prompt has 83"):
            prefill(model, tokens(), ended)
    assert make("h2o").fork(10).get_seq_length() == 0


@pytest.mark.parametrize(
    ("policy", "kv_bits"), [("ada-snapkv(6,3)", None), *product(["locret", "score=entropy"], [None, 4])]
)
def test_a_deep_copy_goes_on_by_itself_and_shares_what_is_big(policy, kv_bits):
    model, cache = backbone(), make(policy, kv_bits=kv_bits)
    with attach(model), torch.no_grad():
        prefill(model, tokens(), cache)
        before, twin = held(cache), copy.deepcopy(cache)
        step = lambda cache: model(input_ids=torch.tensor([tokens(9, seed=4)]), **{CACHE: cache}).logits  # noqa: E731
        moved = step(twin)
        assert held(cache) == before and torch.equal(step(cache), moved) and held(cache) == held(twin)
    assert twin.context.model is cache.context.model and twin.heads is cache.heads
    with pytest.raises(TypeError, match="not pickled: fork"):
        pickle.dumps(cache)
