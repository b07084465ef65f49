"""Passages of the text that are read again in its place (`reread=passages(tokens, window, kernel, first, smooth, each,
least)`)."""

from itertools import product

import pytest
import torch
from bounded_masks import IDS, bounded, mask_by_definition
from scripts_loaded import load_script
from tiny_models import tiny_model

from locret_kit.backbones.intercept import attach
from locret_kit.backbones.libraries import ASKED_FOR_STATES, CACHE
from locret_kit.cache.saved import load_cache, save_cache
from locret_kit.runtime.session import prefill

decode = load_script("scripts/decoding.py").decode

pytestmark = pytest.mark.usefixtures("poisoned")
TOKENS, BODY = 67, 62
POLICIES = [
    "random", "roco", "pyramidkv(6,3,beta=2)", "ada-snapkv(6,3)", "kvcrush(base=h2o)", "sirllm", "lagkv", "merge(base=h2o)",
]  # fmt: skip


def read(model, cache, ids=IDS, progress=None) -> torch.Tensor:
    return prefill(model, ids[0].tolist(), cache, progress)


def best(score: list[float], size: int, kernel: int, first: int, smooth: int, least: float) -> list[int]:
    """The tokens whose best neighbour is worth most, in Python: the first ones before all, then the earlier of equals. A token
    is worth the mean of its neighbours, of which those outside the text count as zero; less than ``least`` of the best is left
    out."""
    half = smooth // 2
    score = [sum(score[max(0, p - half) : p + half + 1]) / smooth for p in range(len(score))]
    half = kernel // 2
    pooled = [max(score[max(0, p - half) : p + half + 1]) for p in range(len(score))]
    order = sorted(range(len(score)), key=lambda p: (p >= first, -pooled[p] if p >= first else 0, p))
    enough = least * max(pooled[first:])
    return sorted(p for p in order[:size] if p < first or pooled[p] >= enough)


def passages_by_definition(attentions, kept, groups, size, window, kernel, first, smooth, each, least):
    """``attentions``: of each layer, ``[1, Q, T, T]``; ``kept``: tokens that the policy kept; the others are options."""
    score, newest = [0.0] * BODY, range(TOKENS - window, TOKENS)
    asking = [[q] for q in newest] if each else [newest]
    for a_QTT in attentions:
        for h, queries in product(range(a_QTT.shape[1] // groups), asking):
            mine = a_QTT[0, h * groups : (h + 1) * groups].mean(0)
            got = {t: float(sum(mine[q, t] for q in queries)) for t in kept if t >= first}
            for token, value in got.items():
                score[token] = max(score[token], value / sum(got.values()))
    return best(score, size, kernel, first, smooth, least)


@pytest.mark.parametrize(
    ("tokens", "window", "kernel", "first", "smooth", "each", "least"),
    [
        (9, 4, 3, 2, 1, False, 0), (512, 5, 1, 0, 1, True, 0.5), (11, 32, 5, 32, 3, False, 0.9), (1, 1, 3, 4, 1, True, 0),
        (10, 1, 5, 0, 7, False, 0.75),
    ],
)  # fmt: skip
def test_the_answer_is_that_of_a_prompt_of_passages_and_question(tokens, window, kernel, first, smooth, each, least):
    """Streaming's slots: which passages, by full attention under a mask; the logits, by the model itself on these alone."""
    model, plain = tiny_model("llama").double(), tiny_model("llama").double()
    plain.set_attn_implementation("eager")
    sees = mask_by_definition(TOKENS, BODY, 8, 24, 4, TOKENS, 0)
    hidden = torch.zeros(TOKENS, TOKENS, dtype=torch.float64).masked_fill(~sees, float("-inf"))
    kept = [token for token in range(BODY) if sees[BODY, token]]
    groups = model.config.num_attention_heads // model.config.num_key_value_heads
    size = min(tokens, 12)
    first_reading = plain(input_ids=IDS, attention_mask=hidden[None, None], output_attentions=True).attentions
    chosen = passages_by_definition(
        first_reading, kept, groups, size, min(window, 5), kernel, min(first, size // 2), smooth, each, least
    )
    passages = [*chosen, *range(BODY, TOKENS)]
    wanted = plain(input_ids=IDS[:, passages]).logits[0, -1]
    cache = bounded(
        f"streaming(4) reread=passages({tokens},{window},{kernel},{first},{smooth},{str(each).lower()},{least})",
        positions="original",
    )
    torch.testing.assert_close(read(model, cache), wanted.float(), rtol=0, atol=1e-6)
    for layer in range(len(cache.bounded)):
        assert cache.kept_positions(layer).tolist() == [[passages, passages]]


@pytest.mark.parametrize(
    ("policy", "family"),
    [*((policy, "llama") for policy in POLICIES), ("h2o", "gemma3"), *[("tova", "lfm2")][: int(ASKED_FOR_STATES)]],
)
def test_any_policy_answers_from_what_it_reads_again(policy, family):
    """Whatever it kept and however it places keys, layers with a window or a state too: the logits are the model's on passages
    and question, and layers and heads hold the same tokens."""
    more = {"layer_types": ["conv", "full_attention", "conv"]} if family == "lfm2" else {}
    model, positions = tiny_model(family, **more).double(), ("compact", "original", "clipped(16)")[len(policy) % 3]
    cache = bounded(f"{policy} reread=passages(6,4,3,2)", positions=positions)
    found = read(model, cache)
    wanted = model(input_ids=IDS[:, cache.reread_positions]).logits[0, -1]
    torch.testing.assert_close(found, wanted.float(), rtol=0, atol=1e-6)
    assert len(cache.reread_positions) == 11 and cache.reread_positions[-5:] == list(range(BODY, TOKENS))
    for layer in range(len(cache.bounded) if family == "llama" else 0):
        assert all(head.tolist() == cache.reread_positions for head in cache.kept_positions(layer)[0])


@pytest.mark.parametrize("policy", ["streaming(4)", "compactor(block=8,first=4)", "lagkv(4,30)"])
def test_the_first_tokens_that_are_read_again_stay_while_an_answer_grows(policy):
    model, cache = tiny_model("llama").double(), bounded(f"{policy} reread=passages(8,4,3,4)")
    [*decode(model, cache, read(model, cache), prompt=IDS[0].tolist(), max_new_tokens=40)]
    for layer in range(len(cache.bounded)):
        assert all(head[:4].tolist() == [0, 1, 2, 3] for head in cache.kept_positions(layer)[0])


@pytest.mark.parametrize(
    ("policy", "kv_bits"),
    [
        ("ada-snapkv(6,3)", None), ("nacl(proxies=2,first=4)", None),
        *product(["h2o", "pyramidkv(6,3,beta=2)", "kvcrush(base=h2o)"], [None, 4]),
    ],
)  # fmt: skip
def test_decoding_goes_on_in_the_budget(policy, kv_bits):
    model, calls = tiny_model("llama"), []
    cache = bounded(f"{policy} reread=passages(6,4,3,2)", kv_bits=kv_bits)
    logits, again = read(model, cache, progress=lambda done, total: calls.append(done)), TOKENS - 11
    assert calls[calls.index(BODY) + 1] == again and calls[-1] == TOKENS and again < calls[-2] < TOKENS
    told = [*decode(model, cache, logits, prompt=IDS[0].tolist(), max_new_tokens=40)]
    assert len(told) == 40 and cache.get_seq_length() == TOKENS + 39
    assert sum(cache.kept_rows) <= len(cache.bounded) * (24 + 8)
    for layer in range(len(cache.bounded)):
        for head in cache.kept_positions(layer)[0]:
            held = head.tolist()
            assert held == sorted(set(held)) and {t for t in held if t < TOKENS} <= set(cache.reread_positions)


def test_a_prompt_that_fits_is_read_once():
    model, calls = tiny_model("llama").double(), []
    cache = bounded("recency reread=passages(4)", budget=67, positions="original")
    found = read(model, cache, progress=lambda done, total: calls.append(done))
    assert calls == sorted(set(calls)) and not cache.reread_positions
    torch.testing.assert_close(found, model(input_ids=IDS).logits[0, -1].float(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("policy", ["h2o", "ada-snapkv(6,3)", "lagkv", "sirllm"])
def test_a_fork_reads_again_for_its_own_question(policy):
    """A document read once and asked two questions."""
    model, text = tiny_model("llama").double(), f"{policy} reread=passages(6,4,3,0)"
    other = IDS.clone()
    other[0, BODY:] = IDS[0, :5]
    document, found = bounded(text), []
    read(model, document, IDS[:, :56])
    for ids in (IDS, other):
        forked, fresh = document.fork(TOKENS), bounded(text)
        torch.testing.assert_close(read(model, forked, ids), read(model, fresh, ids), rtol=0, atol=1e-6)
        assert forked.reread_positions == fresh.reread_positions
        found.append(fresh.reread_positions)
    assert found[0] != found[1]


@torch.no_grad()
def test_a_later_turn_follows_the_passages():
    model = tiny_model("llama").double()
    cache, ids = bounded("h2o reread=passages(6,4,3,2)"), IDS
    read(model, cache)
    for turn in (IDS[:, :3], IDS[:, 5:6], IDS[:, 9:13]):
        ids = torch.cat((ids, turn), 1)
        passages = torch.cat((IDS[:, cache.reread_positions], ids[:, TOKENS:]), 1)
        found = read(model, cache, ids)
        torch.testing.assert_close(found, model(input_ids=passages).logits[0, -1].float(), rtol=0, atol=1e-6)


def test_errors_name_what_is_wrong():
    with pytest.raises(ValueError, match=r"reads the end of the prompt twice: pass prompt_length="):
        bounded("h2o reread=passages", prompt_length=None)
    for local_len in (0, 9):
        with pytest.raises(ValueError, match=rf"last local_len={local_len} tokens twice: from 1 to chunk=8"):
            bounded("h2o reread=passages", local_len=local_len)
    model = tiny_model("llama")
    with attach(model), pytest.raises(RuntimeError, match=r"use locret_kit.runtime.session.Answer"):
        model.generate(IDS, **{CACHE: bounded("h2o reread=passages")}, max_new_tokens=3, do_sample=False)


def test_windows_alone_are_read_once():
    """No slot is kept by the policy, so there is no index: the prompt is read as without a second reading."""
    model = tiny_model("mistral-window").double()
    cache, plain = bounded("score=random reread=passages", 24), bounded("score=random", 24)
    assert torch.equal(read(model, cache), read(model, plain))
    assert not cache.reread_positions and cache.get_seq_length() == plain.get_seq_length() == TOKENS


def test_a_cache_is_saved_between_the_two_readings(tmp_path):
    model, policy = tiny_model("llama"), "h2o reread=passages(6,4,3,0)"
    cache, whole = bounded(policy), bounded(policy)

    def stop(done: int, total: int) -> None:
        if cache.reread_positions:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        read(model, cache, progress=stop)
    save_cache(cache, tmp_path / "cache.locret")
    assert torch.equal(read(model, load_cache(tmp_path / "cache.locret", model)), read(model, whole))
