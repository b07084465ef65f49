"""Evictions of all layers in one choice at the end of a forward, against those of each layer by itself: bit for bit."""

from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch
from policy_runs import EVICTING, LENGTH, backbone, by_kind, decode, held, make, tokens

from locret_kit import attach
from locret_kit.cache import context, step
from locret_kit.cache.backend import BACKENDS
from locret_kit.runtime.engine import Engine
from locret_kit.runtime.sequence import Request
from locret_kit.runtime.session import prefill

MODES = {
    "compact": {}, "pins": {"protect": "first"}, "original": {"positions": "original"}, "clipped": {"positions": "clipped(60)"},
    "every": {"decode_every": 3}, "windows": {"family": "gemma3"}, "one-shot": {"one_shot": True}, "8 bits": {"kv_bits": 8},
}  # fmt: skip
REAL, EVICT = step.evicts_together, step._evict


def as_on_a_card(ctx, rows):
    return REAL(replace(ctx, backend=BACKENDS["triton"]), rows)


def run(policy: str, mode: str, together: bool):
    """What is left of a run, and how many layers each choice of slots was for; of runs apart, marked slot by slot."""
    rest = dict(MODES[mode])
    model, layers = backbone(rest.get("family", "llama")), []
    cache, ids = make(policy, **rest), tokens()

    def counted(ctx, cuts):
        layers.append(len(cuts))
        EVICT(ctx, cuts)

    def may(ctx, rows):
        return together and as_on_a_card(ctx, rows)

    patches = [mock.patch.object(step, "evicts_together", may), mock.patch.object(step, "_evict", counted)]
    patches += [] if together else [mock.patch.object(type(cache.policy), "ranks", False)]
    with ExitStack() as stack, attach(model), torch.inference_mode():
        for patch in patches:
            stack.enter_context(patch)
        logits = prefill(model, ids, cache)
        new = list(decode(model, cache, logits, prompt=ids, max_new_tokens=30))
    counts = [(rows.rows, rows.seen, rows.since_eviction, rows.evictions) for rows in cache.bounded]
    return logits, (new, held(cache), counts, cache.counters.evicted_rows, cache.counters.evictions), layers


@pytest.mark.parametrize("policy", by_kind(EVICTING))
def test_equal_bit_for_bit(policy):
    mode = [*MODES][1 + EVICTING.index(policy) % (len(MODES) - 1)]
    (logits, left, alone), (joint_logits, joint_left, joint) = (run(policy, mode, joined) for joined in (False, True))
    assert torch.equal(logits, joint_logits) and left == joint_left and sum(alone) == sum(joint)
    assert set(alone) == {1}, "each layer by itself"


@pytest.mark.parametrize("policy", ["locret", "h2o", "tova"])
def test_texts_that_share_forwards(policy, monkeypatch):
    """Prompts side by side, then tokens in one call a layer: each text's layers are cut at once, before a forward and after."""
    monkeypatch.setattr(context, "backend_for", lambda *args: BACKENDS["reference"])
    found = []
    for together in (False, True):
        model, caches, layers = backbone(), [], []

        def cut(ctx, cuts, layers=layers):
            layers.append((len(cuts), cuts[0].rows.seen > LENGTH))
            EVICT(ctx, cuts)

        def cache_of(length, caches=caches):
            caches.append(make(policy, length=length, chunk=5))
            return caches[-1]

        with ExitStack() as stack:
            may = as_on_a_card if together else lambda ctx, rows: False
            stack.enter_context(mock.patch.object(step, "evicts_together", may))
            stack.enter_context(mock.patch.object(step, "_evict", cut))
            engine = Engine(model, frozenset(), piece=40, pages=3)
            asked = [
                engine.add(Request(tokens(length, seed=length), 20), partial(cache_of, length))
                for length in (LENGTH, 61, 70)
            ]
            while engine.running:
                engine.step()
        found.append(([one.tokens for one in asked], [held(cache) for cache in caches]))
        assert {count for count, _ in layers} == ({3} if together and policy != "tova" else {1, 3} if together else {1})
        assert {decoding for _, decoding in layers} == {False, True}
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("policy", "together"),
    [("locret", True), ("h2o", True), ("roco", True), ("tova", True), ("snapkv(6,3)", True), ("streaming", True),
     ("ada-locret", False), ("merge", False), ("kvcrush", False), ("pyramid-locret", False)],
)  # fmt: skip
def test_who_may_is_one_choice_for_all_layers(policy, together):
    layers = run(policy, "compact", True)[2]
    assert (3 in layers) == together, "layers of unlike budgets, and parts that read more, go one by one"


def test_an_interrupt_before_the_end_of_the_forward_is_noticed(monkeypatch):
    model, cache = backbone(), make("h2o")
    monkeypatch.setattr(step, "evicts_together", lambda ctx, rows: True)
    monkeypatch.setattr(step, "_evict", mock.Mock(side_effect=KeyboardInterrupt))
    with attach(model), torch.inference_mode():
        with pytest.raises(KeyboardInterrupt):
            prefill(model, tokens(), cache)
        with pytest.raises(ValueError, match="interrupted inside a forward"):
            cache.bind(model)
        monkeypatch.undo()
        cache.reset(LENGTH)
        fresh = make("h2o")
        assert torch.equal(prefill(model, tokens(), cache), prefill(model, tokens(), fresh))
        assert held(cache) == held(fresh)
