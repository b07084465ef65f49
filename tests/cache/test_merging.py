"""Merging against a definition in Python loops and float64: of one head, and of whole runs replayed token by token."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from live_bytes import LiveBytes
from merge_replay import replayed
from policy_runs import LENGTH, backbone, make
from tiny_models import tiny_model

from locret_kit import BoundedCache, attach
from locret_kit.backbones.handlers import Softmax
from locret_kit.backbones.libraries import CACHE
from locret_kit.backbones.spec import UnsupportedArchitecture
from locret_kit.policies.grammar import parse_policy
from locret_kit.policies.methods.merging import merge_nearest, nearest_kept

METRICS = ("cosine", "l2")

MERGING = [
    "merge-locret", "merge-locret(metric=l2,weight=count)", "merge", "merge(base=sirllm)", "merge(base=tova,metric=l2)",
    "merge(base=snapkv(6,3))", "merge(base=ada-locret)", "merge(base=ada-snapkv(6,3,alpha=1.0))", "merge(base=keydiff)",
    "score=recency scope=sinks merge=nearest", "score=cis scope=stabilizers allocation=pyramid(3)+adaptive merge=nearest(l2)",
]  # fmt: skip
ON_THE_SCALE = {"cis": math.exp, "aas": lambda s: max(s, 1e-38), "window": lambda s: max(s, 1e-38)}
"""What a token weighs, by its score; the others count every token as one."""
DISTINCT = (torch.randperm(95, generator=torch.Generator().manual_seed(0)) + 2).tolist()
"""Ids of which no two are the same: equal ids have equal keys in the first layer, and rounding would break the ties."""


# ---- the definition -----------------------------------------------------------------------------------------------------


def near(one: np.ndarray, other: np.ndarray, metric: str) -> float:
    """Larger is nearer."""
    if metric == "l2":
        return -sum((float(a) - float(b)) ** 2 for a, b in zip(one, other, strict=True))
    lengths = math.sqrt(sum(float(a) ** 2 for a in one)) * math.sqrt(sum(float(b) ** 2 for b in other))
    return sum(float(a) * float(b) for a, b in zip(one, other, strict=True)) / lengths


def folded(keys, values, weights, stay, metric: str) -> dict[int, tuple[np.ndarray, np.ndarray, float]]:
    """Key, value and weight of every slot that stays, when each of the others has gone into the nearest of these."""
    members = {s: [s] for s in range(len(stay)) if stay[s]}
    for e in range(len(stay)):
        if not stay[e] and members:
            members[max(members, key=lambda s: (near(keys[e], keys[s], metric), s))].append(e)
    out = {}
    for s, those in members.items():
        total = sum(weights[i] for i in those)
        key, value = (sum(weights[i] * x[i] for i in those) / total for x in (keys, values))
        out[s] = (key, value, total)
    return out


@st.composite
def heads_of_slots(draw):
    """Keys, values (float64), logarithms of weights and what stays, of one head."""
    S, D, V = draw(st.integers(1, 24)), draw(st.integers(1, 6)), draw(st.integers(1, 4))
    rng = np.random.default_rng(draw(st.integers(0, 10_000)))
    keys, values = rng.standard_normal((S, D)) + draw(st.sampled_from([0, 3])), rng.standard_normal((S, V))
    log_weight = rng.standard_normal(S) * draw(st.sampled_from([0.0, 1.0, 20.0]))
    return keys, values, log_weight, rng.random(S) < draw(st.sampled_from([0.0, 0.3, 0.7, 1.0]))


@given(case=heads_of_slots(), metric=st.sampled_from(METRICS), unit=st.sampled_from([0.0, -500.0, 300.0]))
def test_one_head_is_the_definition(case, metric, unit):
    """In any unit of weights, also where their exponentials are no numbers."""
    keys, values, log_weight, stay = case
    got = merge_nearest(*map(torch.from_numpy, (keys, values, log_weight + unit, stay)), metric)
    want = folded(keys, values, np.exp(log_weight), stay, metric)
    assert set(got.slots_R.tolist()) <= set(want)
    for s in set(want) - set(got.slots_R.tolist()):  # slots that are left as they are have taken nothing over
        assert want[s][2] == pytest.approx(np.exp(log_weight[s]), rel=1e-12)
        np.testing.assert_allclose(want[s][0], keys[s], rtol=1e-12)
    for i, s in enumerate(got.slots_R.tolist()):
        np.testing.assert_allclose(got.keys_RD[i].numpy(), want[s][0], rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(got.values_RD[i].numpy(), want[s][1], rtol=1e-9, atol=1e-9)
        total = np.logaddexp(log_weight[s], float(got.log_weight_R[i]) - unit)
        assert total == pytest.approx(math.log(want[s][2]), rel=1e-9, abs=1e-9)
    if stay.all() or not stay.any():  # nothing goes, or there is nothing to go into
        assert len(got.slots_R) == len(got.keys_RD) == len(got.values_RD) == len(got.log_weight_R) == 0


@given(case=heads_of_slots(), metric=st.sampled_from(METRICS), tile=st.integers(1, 40))
def test_tiles_do_not_matter(case, metric, tile):
    keys, _, _, stay = map(torch.from_numpy, case)
    if stay.any():
        assert torch.equal(nearest_kept(keys, stay, metric, tile), nearest_kept(keys, stay, metric))


@given(metric=st.sampled_from(METRICS), seed=st.integers(0, 500))
def test_a_tie_of_whole_numbers_is_exact(metric, seed):
    """Whole numbers in the plane have many equal distances."""
    rng = np.random.default_rng(seed)
    keys = rng.integers(-2, 3, (14, 2)).astype(float)
    if metric == "cosine":
        keys = np.array([(1, 0), (0, 1), (-1, 0), (0, -1)])[rng.integers(0, 4, 14)].astype(float)
    stay = np.arange(14) % 3 > 0
    want = [max(np.flatnonzero(stay), key=lambda s: (near(keys[e], keys[s], metric), s)) for e in np.flatnonzero(~stay)]
    assert nearest_kept(torch.from_numpy(keys), torch.from_numpy(stay), metric).tolist() == want


def test_similarities_never_exist_at_once():
    """Of 4,000 evicted and 4,000 kept keys there are 16 million; a tile has a million, and the keys take far less."""
    keys, stay = torch.randn(8000, 8), torch.arange(8000) % 2 == 0
    with LiveBytes() as count:
        merge_nearest(keys, keys, torch.zeros(8000), stay)
    assert count.peak < 4 * 4 * 2**20


# ---- runs, replayed ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", MERGING)
def test_a_run_is_the_definition(policy):
    """After chunked prefill and evictions while decoding, every row of every head is what the loops make of the tokens."""
    positions = ("compact", "original", "clipped(20)")[MERGING.index(policy) % 3]
    parsed, changed = parse_policy(policy), []
    name = type(parsed.score).__name__
    name = "aas" if name in ("Ltas", "Entropy") else name.lower()
    scaled = next((weigh for n, weigh in ON_THE_SCALE.items() if name.startswith(n)), None)
    weigh = scaled if scaled and parsed.merge.weight == "score" else lambda s: 1.0

    def fold(layer, slots, scores, protected, stays):
        own, (keys, values, taken) = [weigh(s) for s in scores], zip(*slots, strict=True)
        weights = [mine + more for mine, more in zip(own, taken, strict=True)]
        after = folded(keys, values, weights, stays, parsed.merge.metric)
        changed.append(sum(weight > weights[i] for i, (_, _, weight) in after.items()))
        return {i: (key, value, taken[i] + weight - weights[i]) for i, (key, value, weight) in after.items()}

    for absorbed, slots in replayed(policy, DISTINCT[: LENGTH + 7], positions, fold, 1e-4):
        np.testing.assert_allclose(absorbed.exp(), [w for _, _, w in slots.values()], rtol=1e-4, atol=1e-30)
    assert sum(changed) > 20


def test_bfloat16_rounds_once():
    """A fold is computed in float32, however many go into one slot."""
    torch.manual_seed(0)
    keys, values = torch.randn(400, 8), torch.rand(400, 8)
    cache = make("merge(base=recency,weight=count)", 1, length=400, chunk=400, local_len=0, stabilizers=0)
    cache.bind(backbone())
    rows = cache.bounded[0]
    k, v = (x.bfloat16().expand(1, 2, -1, -1) for x in (keys, values))
    rows.update(k, v)
    cache.handler.attend(0, torch.zeros(1, 6, 400, 8, dtype=torch.bfloat16), k, v, Softmax(1.0))
    assert rows.rows == 1 and rows.codec.keys.dtype == torch.bfloat16
    want = values.bfloat16().double().mean(0)
    assert float((rows.head("values", 0)[0].double() - want).abs().max()) <= 2**-9


# ---- grammar and refusals -----------------------------------------------------------------------------------------------------


def test_keys_that_come_rotated_are_refused():
    model = tiny_model("gptj", num_key_value_heads=6, rotary_dim=4)
    with attach(model), pytest.raises(UnsupportedArchitecture, match="rotates queries and keys in a way"):
        model(input_ids=torch.tensor([[1, 2]]), **{CACHE: BoundedCache(4, "merge", chunk=4)})
