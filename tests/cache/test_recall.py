"""Recall: what is evicted comes back, against full attention and against the definitions in float64."""

import warnings
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from policy_runs import LENGTH, SMALL, backbone, held, logits_of, make, tokens
from recall_oracle import OurBlocks, PublishedInfLLM, recorded

from locret_kit import attach
from locret_kit.backbones.libraries import CACHE
from locret_kit.backbones.spec import spec_of
from locret_kit.cache.saved import load_cache, save_cache
from locret_kit.planning.inference_plan import Setting, cache_bytes, store_bytes
from locret_kit.policies.base import PolicyWarning
from locret_kit.policies.grammar import parse_policy
from locret_kit.runtime.session import prefill
from locret_kit.settings import RunSettings

BASES = ["locret", "h2o", "ada-locret"]


@pytest.mark.parametrize(("positions", "apart"), [("original", 0), ("compact", 32), ("clipped(20)", 0)])
def test_what_was_evicted_is_read_as_if_it_had_stayed(positions: str, apart: int) -> None:
    policy = f"locret recall=blocks(size=4,take=99,local=0,apart={apart})"
    caches = (make(one, positions=positions) for one in (policy, "full"))
    found, wanted = (logits_of(cache, tokens(), tokens(12, seed=1)) for cache in caches)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("base", BASES)
def test_every_token_is_kept_or_stored_and_never_both(base: str) -> None:
    cache, model = make(f"{base} recall=blocks(size=4,take=2)"), backbone()
    logits_of(cache, tokens())
    with attach(model), torch.no_grad():
        for token in range(20):
            model(input_ids=torch.tensor([[5 + token]]), **{CACHE: cache})
            for rows, heads in zip(cache.bounded, held(cache), strict=True):
                for h, kept in enumerate(heads):
                    stored = rows.store.held[h].flatten().nonzero().flatten().tolist()
                    assert sorted(kept + stored) == list(range(rows.seen))
                assert rows.capacity == cache.context.budgets[0] + SMALL["chunk"]
                assert rows.store.last is None or rows.store.last[1].positions.shape[-1] <= 2 * 4


@pytest.mark.parametrize(
    ("across", "apart", "local", "reading", "far"),
    [("model", 0, 6, True, 0), ("head", 7, 0, False, 0), ("layer", 0, 0, False, 9)],
)
def test_what_comes_back_is_what_the_definition_says(
    across: str, apart: int, local: int, reading: bool, far: int
) -> None:
    form = dict(size=5, take=2, representatives=2, local=local, apart=apart, across=across, reading=reading, far=far)
    policy = f"locret recall=blocks({','.join(f'{key}={value}' for key, value in form.items())})"
    oracle = OurBlocks(recorded(policy, 46, steps=2, chunk=11), **form, body=46 - SMALL["local_len"])
    assert oracle.check() >= 9


def test_infllm_is_the_papers() -> None:
    policy = "infllm(init=5,size=5,take=2,representatives=2,local=12)"
    oracle = PublishedInfLLM(
        recorded(policy, 46, steps=2, budget=17, chunk=10), size=5, take=2, representatives=2, local=12
    )
    assert oracle.check() >= 9


def test_nothing_is_hidden_while_nothing_was_evicted() -> None:
    caches = (make(one, 100) for one in ("locret recall=blocks(local=4,far=200)", "full"))
    found, wanted = (logits_of(cache, tokens(), tokens(2, seed=1)) for cache in caches)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("positions", ["original", "clipped(20)"])
def test_slots_with_places_of_their_own_take_compact_positions_alone(positions: str) -> None:
    with pytest.raises(ValueError, match=r"positions='.*' places slots itself, so it must be 'compact'"):
        make("infllm(init=4,local=12)", positions=positions).bind(backbone())


def test_blocks_that_the_tail_alone_recalls_need_its_place() -> None:
    with pytest.raises(ValueError, match=r"reads the prompt otherwise than what follows: pass prompt_length="):
        make("recall(reading=false)", length=None)


@pytest.mark.parametrize("base", ["h2o", "ada-locret"])
def test_copies_and_files_go_on_alike(base: str, tmp_path) -> None:
    policy, model = f"{base} recall=blocks(size=4,take=2)", backbone()
    cache = make(policy)
    prefill(model, tokens()[:52], cache)
    save_cache(cache, tmp_path / "cache.locret")
    others = [cache.fork(LENGTH), deepcopy(cache), load_cache(tmp_path / "cache.locret", model, cache.heads)]
    wanted = logits_of(cache, tokens(), [7])
    for other in others:
        assert torch.equal(logits_of(other, tokens(), [7]), wanted)
    cache.reset(LENGTH)
    assert cache.context.recalls.blocks == 0
    assert torch.equal(logits_of(cache, tokens(), [7])[1], wanted[1])


def test_named_policies() -> None:
    published = parse_policy("score=recency scope=sinks(128) recall=infllm(128,16,4,far=4096)")
    assert replace(parse_policy("infllm"), name=published.name, source="") == published
    scaled = parse_policy("scaled-infllm")
    assert scaled.at(4224).recall == published.recall and scaled.scopes[0].reserved(4224, 512, 0) == 128
    a_quarter = scaled.at(1056).recall  # rows that come back: a quarter; blocks and their tokens: the root of it
    assert (a_quarter.size, a_quarter.take, a_quarter.far) == (64, 8, 1024)
    assert scaled.scopes[0].reserved(1056, 512, 0) == 32
    assert parse_policy("recall(base=h2o,take=2)").recall == parse_policy("h2o recall=blocks(take=2)").recall
    with pytest.warns(PolicyWarning, match="places 4096 slots as in the text"):
        published.layer_budgets(1024, 2, 512, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        published.layer_budgets(4224, 2, 512, 0)
        scaled.layer_budgets(24, 2, 512, 0)


def test_the_plan_is_the_buffers() -> None:
    policy = parse_policy("locret recall=blocks(size=4,take=2)")
    cache = make(policy)
    logits_of(cache, tokens())
    setting = Setting(LENGTH, RunSettings(budget=24, **SMALL), dtype="float32", policy=policy)
    spec = spec_of(backbone().config)
    # The tiny backbone is in float64: numbers of keys and values are twice as wide as planned, all others are as they are.
    numbers = 2 * spec.head_dim * spec.n_kv_heads * spec.n_layers
    assert cache.state.host_nbytes == 2 * store_bytes(spec, setting) == 8 * numbers * 84
    keys = numbers * (24 + 13 + 2 * 4) + numbers // 2 * 4 * 21
    assert cache.nbytes - cache_bytes(spec, setting) == 4 * keys
