"""Centroid memory against a definition in Python loops and float64: k-means of a head, the bias, and whole runs replayed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_runs import LENGTH, backbone, held, make, run, tokens

from locret_kit import attach
from locret_kit.cache.attention import attend_rows
from locret_kit.cache.saved import load_cache, save_cache
from locret_kit.policies.base import Selection
from locret_kit.policies.grammar import parse_policy
from locret_kit.policies.methods.centroids import Centroids, fold_into_centroids
from locret_kit.runtime.session import prefill

DISTINCT = (torch.randperm(95, generator=torch.Generator().manual_seed(0)) + 2).tolist()
"""Ids of which no two are the same, so that no two keys of the first layer are."""
SMALL_MEMORY = "locret merge=centroids(5)"


# ---- the definition ----------------------------------------------------------------------------------------------------


def clustered(keys, values, counts, stay, rounds):
    """Key, value and count of every centroid (a slot that stays, with a count): points are the evicted and the centroids."""
    centres = [s for s in range(len(stay)) if stay[s] and counts[s]]
    means = {c: keys[c] for c in centres}
    for _ in range(rounds):
        members = {c: [c] for c in centres}
        for e in range(len(stay)):
            if not stay[e] and centres:
                members[min(centres, key=lambda c: (((keys[e] - means[c]) ** 2).sum(), c))].append(e)
        total = {c: sum(counts[i] for i in those) for c, those in members.items()}
        means = {c: sum(counts[i] * keys[i] for i in those) / total[c] for c, those in members.items()}
    return {c: (means[c], sum(counts[i] * values[i] for i in members[c]) / total[c], total[c]) for c in centres}


def evenly(gone: list[int], m: int) -> list[int]:
    """``m`` of the evicted slots, evenly over them."""
    E = len(gone)
    return [gone[r] for r in range(E) if ((r + 1) * m + E // 2) // E > (r * m + E // 2) // E]


@st.composite
def heads_of_slots(draw):
    S, D = draw(st.integers(1, 24)), draw(st.integers(1, 5))
    rng = np.random.default_rng(draw(st.integers(0, 10_000)))
    stay = rng.random(S) < draw(st.sampled_from([0.0, 0.4, 0.8, 1.0]))
    mine = stay & (rng.random(S) < 0.5)
    counts = np.where(mine, rng.integers(1, 50, S), ~stay * 1)
    return rng.standard_normal((S, D)), rng.standard_normal((S, 3)), counts, stay


@given(case=heads_of_slots(), rounds=st.integers(1, 4))
@settings(max_examples=60)
def test_one_head_is_the_definition(case, rounds):
    keys, values, counts, stay = case
    got = fold_into_centroids(*map(torch.from_numpy, (keys, values, counts.astype(float), stay)), rounds)
    want = clustered(keys, values, counts, stay, rounds)
    assert got.slots_R.tolist() == sorted(want)
    for i, s in enumerate(got.slots_R.tolist()):
        np.testing.assert_allclose(got.keys_RD[i], want[s][0], rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(got.values_RD[i], want[s][1], rtol=1e-9, atol=1e-9)
        assert got.tokens_R[i] == want[s][2]
    if want:
        assert float(got.tokens_R.sum()) == counts.sum()  # no token is lost or counted twice


@pytest.mark.parametrize(("T", "Q"), [(1, 4), (1, 2), (5, 4), (7, 2)])
def test_a_row_that_stands_for_n_tokens_draws_what_n_equal_rows_draw(T, Q):
    """Against dense attention in float64 over the rows written out n times."""
    make_ = torch.Generator().manual_seed(T)
    q, k, v = (
        torch.randn(1, n, rows, 8, generator=make_, dtype=torch.float64) for n, rows in ((Q, T), (2, 12), (2, 12))
    )
    counts = torch.tensor([[[3, 1, 4, 1, 9, 1, 1, 1, 1, 1, 1, 1][i] for i in range(12)]] * 2)[None]
    counts[0, 1, 2:4] = torch.tensor([1, 6])
    if T > 5:
        k, v, counts = k[:, :, :9], v[:, :, :9], counts[:, :, :9]
        counts[..., 2:] = 1  # new tokens stand for themselves
    S = k.shape[2]
    out = attend_rows(q, k, v, 0.3, bias_BHS=counts.double().log())
    for head in range(Q):
        h = head * 2 // Q
        for t in range(T):
            rows = [s for s in range(S - T + t + 1) for _ in range(counts[0, h, s])]
            weights = (q[0, head, t] @ k[0, h, rows].T * 0.3).softmax(-1)
            torch.testing.assert_close(out[0, head, t], weights @ v[0, h, rows], rtol=1e-10, atol=1e-10)


# ---- whole runs --------------------------------------------------------------------------------------------------------


class Recorder(Selection):
    """A policy's own choice, and what it was asked about."""

    def __init__(self, selection: Selection) -> None:
        self.selection, self.seen = selection, []

    def select(self, scores, protected, valid, budgets, slots):
        stay = self.selection.select(scores, protected, valid, budgets, slots)
        self.seen.append((slots.positions[0].tolist(), valid[0].tolist(), stay[0].tolist()))
        return stay


def turned(x, place, inv_freq):
    angle = place * inv_freq
    a, b = np.split(x, 2)
    return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)])


@pytest.mark.parametrize("positions", ["compact", "original"])
@pytest.mark.parametrize("policy", [SMALL_MEMORY, "streaming(2) merge=centroids(3,1)"])
def test_a_run_is_the_definition(policy, positions):
    """Every attention output, in chunks, in the tail and while decoding, and the rows at the end."""
    parsed = parse_policy(policy)
    recorder = Recorder(parsed.selection)
    cache, model = make(replace(parsed, selection=recorder), decode_every=3, positions=positions), backbone()
    events: dict[int, list] = {}
    attend = cache.attend

    def listening(layer, q, k, v, scaling):
        before = len(recorder.seen)
        out = attend(layer, q, k, v, scaling)
        events.setdefault(layer, []).append(([x[0].numpy().copy() for x in (q, k, v, out)], recorder.seen[before:]))
        return out

    cache.attend = listening
    with attach(model), torch.no_grad():
        prefill(model, DISTINCT[:LENGTH], cache)
        for token in DISTINCT[LENGTH : LENGTH + 7]:
            model(input_ids=torch.tensor([[token]]), past_key_values=cache)
    n, rounds = parsed.merge.n, parsed.merge.rounds
    for layer, calls in events.items():
        inv_freq = cache.context.ropes[layer].inv_freq.double().numpy()
        for h in range(2):
            slots: list[list] = []  # position, key before RoPE, value, tokens (0: not a centroid)
            seen = 0
            for (q, k, v, out), evictions in calls:
                slots += [[seen + t, k[h, t], v[h, t], 0] for t in range(k.shape[1])]
                seen += k.shape[1]
                places = range(len(slots)) if positions == "compact" else [slot[0] for slot in slots]
                keys = np.array([turned(slot[1], at, inv_freq) for slot, at in zip(slots, places, strict=True)])
                bias = np.log([max(1, slot[3]) for slot in slots])
                for t in range(k.shape[1]):
                    upto = len(slots) - k.shape[1] + t + 1
                    for head in range(3 * h, 3 * h + 3):
                        logits = keys[:upto] @ turned(q[head, t], places[upto - 1], inv_freq) * 8**-0.5 + bias[:upto]
                        weights = np.exp(logits - logits.max())
                        want = weights @ np.array([slot[2] for slot in slots[:upto]]) / weights.sum()
                        np.testing.assert_allclose(out[head, t], want, rtol=1e-6, atol=1e-6)
                for where, valid, stay in evictions:
                    assert where[h] == [slot[0] for slot in slots]
                    assert valid[h] == [slot[3] == 0 for slot in slots]  # centroids are not the policy's to choose
                    stays = [s or slot[3] > 0 for s, slot in zip(stay[h], slots, strict=True)]
                    for new in evenly([s for s in range(len(slots)) if not stays[s]], n - sum(x[3] > 0 for x in slots)):
                        stays[new], slots[new][3] = True, 1
                    counts = [slot[3] or (not s) * 1 for s, slot in zip(stays, slots, strict=True)]
                    made = clustered(*(np.array([x[i] for x in slots]) for i in (1, 2)), counts, stays, rounds)
                    for s, one in made.items():
                        slots[s][1:] = one
                    slots = [slot for slot, s in zip(slots, stays, strict=True) if s]
            rows = cache.bounded[layer]
            assert rows.head("positions", 0, h).tolist() == [slot[0] for slot in slots]
            assert rows.head("tokens", 0, h).tolist() == [slot[3] for slot in slots]
            np.testing.assert_allclose(rows.head("values", 0, h), [slot[2] for slot in slots], rtol=1e-6, atol=1e-6)
            assert sum(slot[3] > 0 for slot in slots) == n
            assert sum(slot[3] or 1 for slot in slots) == LENGTH + 7  # every token of the text is in one slot


@given(n=st.integers(1, 9), budget=st.integers(16, 40), chunk=st.integers(6, 20), length=st.integers(20, 60))
@settings(max_examples=6, deadline=None)
def test_budgets_are_held_and_counts_add_up(n, budget, chunk, length):
    cache = run(f"recency merge=centroids({n},1)", tokens(length), budget=budget, chunk=chunk, length=length)
    for rows in cache.bounded:
        assert rows.rows == min(length, budget) + 4
        stand_for = rows.slots("tokens")
        assert (stand_for.clamp(min=1).sum(-1) == length + 4).all()
        assert ((stand_for > 0).sum(-1) == (n if length > budget else 0)).all()


# ---- beside the rest ---------------------------------------------------------------------------------------------------


def test_a_named_policy_is_the_part():
    assert parse_policy("centroids(locret,5)").merge == Centroids(5) == parse_policy(SMALL_MEMORY).merge
    named, part = run("centroids(locret,5)"), run(SMALL_MEMORY)
    assert held(named) == held(part)


def test_a_saved_cache_goes_on_alike(tmp_path):
    cache, model = run(SMALL_MEMORY), backbone()
    save_cache(cache, tmp_path / "a.locret")
    again = load_cache(tmp_path / "a.locret", model, heads=cache.heads)
    assert all(
        torch.equal(mine.slots("tokens"), theirs.slots("tokens"))
        for mine, theirs in zip(again.bounded, cache.bounded, strict=True)
    )
    step = torch.tensor([[7]])
    with attach(model), torch.no_grad():
        want = model(input_ids=step, past_key_values=cache).logits
        assert torch.equal(model(input_ids=step, past_key_values=again).logits, want)


def test_pins_leave_room_for_centroids():
    cache = make(SMALL_MEMORY)
    cache.pin(0, 24 - 5 - 5 - 1)
    cache.bind(backbone())
    with pytest.raises(ValueError, match=r"5 centroids and one slot more need room too"):
        cache.pin(0, 24 - 5 - 5)


def test_the_plan_counts_them():
    cache = run(SMALL_MEMORY)
    plain = run("locret")
    assert cache.nbytes - plain.nbytes == 4 * sum(2 * layer.capacity for layer in plain.bounded)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("ada-locret merge=centroids", "heads of one layer may evict nothing (allocation)"),
        ("h2o merge=centroids", "score or scope sum attention while it is computed"),
        ("rereading-locret merge=centroids", "a centroid is no passage to read again (reread)"),
        ("locret merge=centroids sparse=antidiagonal", "a centroid's count is no part of sparse prefill"),
        ("locret merge=centroids(0)", "n=0 must be"),
    ],
)
def test_what_does_not_go_together(text, said):
    with pytest.raises(ValueError) as caught:
        parse_policy(text)
    assert said in str(caught.value)


def test_more_centroids_than_slots():
    with pytest.raises(
        ValueError, match=r"sets 19 slots of each head aside, which must be below the 19 that the smallest"
    ):
        make("recency merge=centroids(19)").bind(backbone())
