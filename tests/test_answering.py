"""Which slots the end of the prompt and the answer see (`answering=focus(slots, window, kernel)`)."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_reading import IDS, bounded, mask_by_definition
from tiny_models import tiny_model

from locret_kit.backbones.families import spec_of
from locret_kit.backbones.intercept import attach
from locret_kit.heads import HeadsConfig, RetainingHeads
from locret_kit.policies.answering import Focus
from locret_kit.policies.registry import parse_policy, parts_of
from locret_kit.runtime.session import Sampling, decode, prefill

pytestmark = pytest.mark.usefixtures("poisoned")
TOKENS, BODY = 67, 62


def read(model, cache) -> torch.Tensor:
    with attach(model), torch.no_grad():
        return prefill(model, IDS[0].tolist(), cache)


def chosen_by_definition(attention_QTT, kept: list[int], groups: int, keep: int, window: int, kernel: int):
    """For each key/value head the ``keep`` of the ``kept`` tokens that the newest queries attend to most, in Python."""
    heads = []
    for h in range(attention_QTT.shape[0] // groups):
        mine = attention_QTT[h * groups : (h + 1) * groups].mean(0)
        got = [float(sum(mine[q, token] for q in range(TOKENS - window, TOKENS))) for token in kept]
        half = kernel // 2
        pooled = [max(got[max(0, i - half) : i + half + 1]) for i in range(len(got))]
        best = sorted(range(len(kept)), key=lambda i: (pooled[i], i), reverse=True)[:keep]
        heads.append(sorted(kept[i] for i in best))
    return heads


@pytest.mark.parametrize(("slots", "window", "kernel"), [(6, 4, 1), (0.25, 5, 3), (1, 1, 5), (18, 32, 3)])
def test_logits_and_slots_are_those_of_the_definition(slots, window, kernel):
    """Streaming's slots, true positions: both readings as full attention under masks, of which the second has one a layer
    and head."""
    model, plain = tiny_model("llama").double(), tiny_model("llama").double()
    plain.set_attn_implementation("eager")
    sees = mask_by_definition(TOKENS, BODY, 8, 24, 4, TOKENS, 0)
    hidden = torch.zeros(TOKENS, TOKENS, dtype=torch.float64).masked_fill(~sees, float("-inf"))
    with torch.no_grad():
        first = plain(input_ids=IDS, attention_mask=hidden[None, None], output_attentions=True).attentions
    kept = [token for token in range(BODY) if sees[BODY, token]]
    assert len(kept) == 19
    groups = model.config.num_attention_heads // model.config.num_key_value_heads
    keep = int(slots * 24) if isinstance(slots, float) else slots
    wanted = [chosen_by_definition(a[0], kept, groups, keep, min(window, 5), kernel) for a in first]

    def narrowed(heads):
        def hook(module, args, kwargs):
            mask = hidden.repeat(len(heads) * groups, 1, 1)
            for q in range(len(heads) * groups):
                gone = [token for token in kept if token not in heads[q // groups]]
                mask[q, BODY:, gone] = float("-inf")
            return args, {**kwargs, "attention_mask": mask[None]}

        return hook

    layers = plain.model.layers
    hooks = [
        x.self_attn.register_forward_pre_hook(narrowed(h), with_kwargs=True)
        for x, h in zip(layers, wanted, strict=True)
    ]
    with torch.no_grad():
        logits = plain(input_ids=IDS, attention_mask=hidden[None, None]).logits[0, -1]
    for hook in hooks:
        hook.remove()
    cache = bounded(f"streaming(4) answering=focus({slots},{window},{kernel})", positions="original")
    found = read(model, cache)
    for layer, heads in enumerate(wanted):
        for h, tokens in enumerate(heads):
            assert cache.kept_positions(layer)[0][h].tolist() == [*tokens, *range(BODY, TOKENS)]
    torch.testing.assert_close(found, logits.float(), rtol=0, atol=1e-6)


POLICIES = [
    "recency",
    "random",
    "h2o",
    "roco",
    "snapkv(6,3)",
    "pyramidkv(6,3,beta=2)",
    "ada-snapkv(6,3)",
    "sirllm",
    "lagkv",
]


@pytest.mark.parametrize("positions", ["compact", "original", "clipped(16)"])
@pytest.mark.parametrize("policy", POLICIES)
def test_where_every_slot_stays_nothing_changes(policy, positions):
    """The second reading finds what the first one found, statistics and what scores remember included, and so does the
    answer."""
    model = tiny_model("llama").double()
    caches = [
        bounded(f"{policy} {part}", positions=positions) for part in ("reading=recent(99,0)", "answering=focus(1.0)")
    ]
    once, twice = (read(model, cache) for cache in caches)
    torch.testing.assert_close(twice, once, rtol=0, atol=1e-6)
    plain, looked = caches
    assert looked.get_seq_length() == TOKENS and looked.kept_rows == plain.kept_rows
    for mine, theirs in zip(looked.bounded, plain.bounded, strict=True):
        for name in ("positions", "scores", "stats"):
            torch.testing.assert_close(
                mine.slots(name).nan_to_num(), theirs.slots(name).nan_to_num(), rtol=0, atol=1e-5
            )
        assert mine.memory.keys() == theirs.memory.keys()
        for name, value in mine.memory.items():
            torch.testing.assert_close(value, theirs.memory[name], rtol=0, atol=1e-6)


def test_layers_with_a_window_read_the_tail_again_too():
    model = tiny_model("gemma3").double()
    assert any(window is not None for window in spec_of(model.config).windows)
    once, twice = bounded("recency"), bounded("recency answering=focus(1.0)")
    torch.testing.assert_close(read(model, twice), read(model, once), rtol=0, atol=1e-6)
    assert twice.kept_rows == once.kept_rows


@pytest.mark.parametrize("kv_bits", [None, 4])
@pytest.mark.parametrize("policy", ["h2o", "ada-snapkv(6,3)", "pyramidkv(6,3,beta=2)", "kvcrush(base=h2o)"])
def test_the_answer_is_written_from_the_slots_that_stayed(policy, kv_bits):
    model = tiny_model("llama")
    cache = bounded(f"{policy} answering=focus(6,4,3)", kv_bits=kv_bits)
    calls: list[int] = []
    with attach(model), torch.no_grad():
        logits = prefill(model, IDS[0].tolist(), cache, lambda done, total: calls.append(done))
        assert calls[-3:] == [BODY, BODY, TOKENS]
        for layer in range(len(cache.bounded)):
            for head in cache.kept_positions(layer)[0]:
                assert [int(p) for p in head[-5:]] == list(range(BODY, TOKENS))
            assert sum(len(head) for head in cache.kept_positions(layer)[0]) == 2 * (6 + 5)
        told = list(
            decode(
                model, cache, logits, prompt=IDS[0].tolist(), max_new_tokens=30, sampling=Sampling(), stop=frozenset()
            )
        )
    assert len(told) == 30 and cache.get_seq_length() == TOKENS + 29
    assert sum(cache.kept_rows) <= len(cache.bounded) * (24 + 8)


@given(
    st.integers(1, 40) | st.floats(0, 1), st.integers(1, 200), st.integers(1, 80), st.integers(1, 9), st.integers(0, 4)
)
@settings(deadline=None)
def test_slots_and_tail_fit_the_budget(slots, budget, tail, window, half):
    tail = min(tail, budget - 1) or 1
    size = Focus(slots, window, 2 * half + 1).size(budget, tail)
    assert 1 <= size <= max(1, budget - tail)


@pytest.mark.parametrize("answering", ["focus(4)", "reread(4)"])
def test_a_prompt_that_fits_is_read_once(answering):
    model, calls = tiny_model("llama").double(), []
    with attach(model), torch.no_grad():
        cache = bounded(f"recency answering={answering}", budget=67, positions="original")
        found = prefill(model, IDS[0].tolist(), cache, lambda done, total: calls.append(done))
        wanted = model(input_ids=IDS).logits[0, -1]
    assert calls == sorted(set(calls)) and not cache.passages
    torch.testing.assert_close(found, wanted.float(), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "value", "part"),
    [
        ("focused-locret", "0.5", "focus(slots=0.5,window=32,kernel=33)"),
        ("rereading-locret", "256", "reread(tokens=256,window=32,kernel=33,first=32)"),
    ],
)
def test_the_named_policies_are_locret_and_a_second_reading(name, value, part):
    assert parts_of(parse_policy(f"{name}({value})")) == {**parts_of(parse_policy("locret")), "answering": part}
    model = tiny_model("llama").double()
    torch.manual_seed(0)
    heads = RetainingHeads(HeadsConfig.for_backbone(spec_of(model.config), "tiny", 8)).double()
    cache = bounded(f"{name}(7)", heads=heads)
    read(model, cache)
    assert cache.kept_rows == [12] * len(cache.bounded)


@pytest.mark.parametrize("policy", ["h2o", "ada-snapkv(6,3)", "lagkv"])
def test_a_fork_reads_its_own_end_twice(policy):
    """A document read once and asked two questions."""
    model, text = tiny_model("llama").double(), f"{policy} answering=focus(6,4,3)"
    other = IDS.clone()
    other[0, BODY:] = IDS[0, :5]
    document = bounded(text)
    with attach(model), torch.no_grad():
        model(input_ids=IDS[:, :56], past_key_values=document)
        for ids in (IDS, other):
            forked, fresh = document.fork(TOKENS), bounded(text)
            found, wanted = (prefill(model, ids[0].tolist(), cache) for cache in (forked, fresh))
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)
            for layer in range(len(fresh.bounded)):
                pairs = zip(forked.kept_positions(layer)[0], fresh.kept_positions(layer)[0], strict=True)
                assert all(mine.tolist() == theirs.tolist() for mine, theirs in pairs)


def test_errors_name_what_is_wrong():
    with pytest.raises(ValueError, match=r"reads the end of the prompt twice: pass prompt_length="):
        bounded("h2o answering=focus", prompt_length=None)
    with pytest.raises(ValueError, match=r"last local_len=0 tokens twice: from 1 to chunk=8"):
        bounded("h2o answering=focus", local_len=0)
    with pytest.raises(ValueError, match=r"last local_len=9 tokens twice: from 1 to chunk=8"):
        bounded("h2o answering=focus", local_len=9)
    with pytest.raises(ValueError, match=r"answering=focus\(...\) drops slots, merge= drops none"):
        bounded("h2o merge=nearest answering=focus")
    with pytest.raises(ValueError, match=r"focus\(kernel=4\): kernel must be odd"):
        parse_policy("h2o answering=focus(kernel=4)")
    with pytest.raises(ValueError, match=r"answering='focsu' is unknown. Did you mean 'focus'"):
        parse_policy("h2o answering=focsu")
    model = tiny_model("llama")
    with attach(model), torch.no_grad(), pytest.raises(RuntimeError, match=r"use locret_kit.runtime.session.generate"):
        model.generate(IDS, past_key_values=bounded("h2o answering=focus"), max_new_tokens=3, do_sample=False)
