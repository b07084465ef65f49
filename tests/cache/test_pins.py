"""Pinned text: after every eviction of every policy and store, every head holds it, and as many slots as without."""

import copy
from contextlib import contextmanager
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from policy_rules import rounded
from policy_runs import EVICTING, LENGTH, backbone, by_kind, held, logits_of, make, tokens, turn
from slot_layers import SELECTIONS, layers_of_slots, slots_of
from tape import TapedDecoder, on_the_reference  # noqa: F401  (a fixture)

from locret_kit import attach
from locret_kit.backbones.libraries import CACHE
from locret_kit.cache import step
from locret_kit.policies import WHOLE, Policy, raised
from locret_kit.policies.base import Scope, Score, Uniform, rank_of
from locret_kit.policies.grammar import parse_policy
from locret_kit.policies.registry import Adaptive

pytestmark = pytest.mark.usefixtures("poisoned")
PINS = ((0, 3), (19, 22), (40, 41), (70, 72))
"""Nine tokens: the first ones, some on both sides of a chunk's end, one alone, two of the last chunk."""
QUANTISED = [name for name in EVICTING if not ((policy := parse_policy(name)).merge or policy.ragged)]


def pinned(pins, before: int) -> set[int]:
    return {position for pin in pins for position in range(*pin) if position < before}


@contextmanager
def watched(monkeypatch, pins):
    """Check every eviction of every layer from what lies in its rows; yields the list of (layer, tokens seen)."""
    real, seen = step._evict, []

    def evict(ctx, cuts):
        ((rows, keep, _),) = cuts  # one by one on a CPU
        before = [head.tolist() for head in rows.kept()[0]]
        real(ctx, cuts)
        after = [head.tolist() for head in rows.kept()[0]]
        if len(before[0]) == len(after[0]) and before == after:
            return
        seen.append((rows.number, rows.seen))
        assert sum(map(len, after)) == len(after) * keep
        assert ctx.policy.ragged or {len(head) for head in after} == {keep}
        for old, new in zip(before, after, strict=True):
            assert new == sorted(set(new)) and set(new) <= set(old)
            assert pinned(pins, rows.seen) <= set(new)

    with monkeypatch.context() as patched:
        patched.setattr(step, "_evict", evict)
        yield seen


def read(cache, pins=(), steps: int = 20, ids=None):
    """Logits after the prompt and after each decoded token, of a cache that has the pins before it reads."""
    for pin in pins:
        cache.pin(*pin)
    return logits_of(cache, ids or tokens(), range(5, 5 + steps))


def fed(cache, ids) -> None:
    """Read tokens one by one."""
    with attach(backbone()), torch.no_grad():
        for token in ids:
            backbone()(input_ids=torch.tensor([[token]]), **{CACHE: cache})


def check_run(monkeypatch, policy, **rest) -> None:
    """The smallest layer has room for the pins."""
    budget = 40 if "pyramid" in policy else 24
    with watched(monkeypatch, PINS) as evictions:
        cache = make(policy.replace("pyramid-locret", "pyramid-locret(beta=3.0)"), budget, **rest)
        read(cache, PINS)
    assert {layer for layer, _ in evictions} == set(range(len(cache.layers)))
    assert any(seen > LENGTH for _, seen in evictions), "decoding evicts too"
    for layer in range(len(cache.layers)):
        for head in held(cache)[layer]:
            assert pinned(PINS, 10**6) <= set(head)


@pytest.mark.parametrize("policy", by_kind(EVICTING))
def test_every_policy_keeps_them(monkeypatch, policy):
    check_run(monkeypatch, policy, positions=turn(policy, "compact", "original"), decode_every=turn(policy, None, 5))


@pytest.mark.parametrize("policy", by_kind(QUANTISED))
def test_in_four_bits(monkeypatch, policy):
    check_run(monkeypatch, policy, kv_bits=4)


@pytest.mark.parametrize("policy", ["nacl(proxies=5)", "ada-snapkv(6,3)", "kvcrush(level=page)", "pyramid-locret"])
def test_one_eviction_for_the_whole_prompt(monkeypatch, policy):
    check_run(monkeypatch, policy, one_shot=True, decode_every=5)


class Greedy(Uniform):
    """The first heads take all that they hold."""

    ragged = True

    def head_budgets(self, scores_BHS, protected_BHS, valid_BHS, keep):
        held_BH, total = valid_BHS.sum(-1), keep * valid_BHS.shape[1]
        return (total - (held_BH.cumsum(-1) - held_BH)).clamp(min=0).minimum(held_BH)


@given(
    layers_of_slots(), st.sampled_from(SELECTIONS), st.sampled_from([Uniform(), Adaptive(0.5), Adaptive(1.0), Greedy()]),
    st.sampled_from([0.0, 0.2, 1.0]), st.sampled_from([0.0, 0.5]),
)  # fmt: skip
def test_choice_by_definition(case, selection, allocation, pinned_share, scope_share):
    """Pinned slots stay, and the selection chooses among the others as if its head held no more than those."""
    scores, _, valid, keep = case
    draw = torch.rand(2, *scores.shape, generator=torch.Generator().manual_seed(keep))
    wanted, scoped = (draw[0] < pinned_share) & valid, (draw[1] < scope_share) & valid
    slots = slots_of(scores, valid)
    slots.keep, slots.pinned = keep, wanted & (wanted.cumsum(-1) <= max(0, keep - 1))
    score = type("Given", (Score,), {"score_slots": lambda self, slots: scores})
    scope = type("Scoped", (Scope,), {"protects": lambda self, slots: scoped})
    stay = Policy("test", score(), (scope(),), selection, allocation).choose(slots)
    assert not (stay & ~valid).any() and (slots.pinned <= stay).all()
    asked = valid.sum(-1).clamp(max=keep)
    if allocation.layout == "ragged":
        asked = allocation.head_budgets(scores, slots.pinned | scoped, valid, keep)
    assert torch.equal(stay.sum((1, 2)), asked.sum(-1))
    enough = (asked >= slots.pinned.sum(-1)).all(-1, keepdim=True)
    assert torch.equal(stay.sum(-1).where(enough, 0), asked.where(enough, 0))
    free, left = valid & ~slots.pinned, stay.sum(-1) - slots.pinned.sum(-1)
    slots.query_head_votes = lambda valid, budgets: (
        (rank_of(scores, scoped & valid, valid) < budgets[..., None]) & valid
    )[:, :, None]
    assert torch.equal(stay, selection.select(scores, scoped & free, free, left, slots) | slots.pinned)


@given(st.data(), st.integers(1, 7), st.sampled_from([1, 2_000_003]))
def test_budgets_are_raised(data, heads, unit):
    """As by integers of any size: the larger ``unit`` stands for many heads of a million slots."""
    rows, number = [], st.integers(0, 9).map(lambda n: n * unit + n % 4)
    for _ in range(2):
        least = data.draw(st.lists(number, min_size=heads, max_size=heads))
        budgets = data.draw(st.lists(number, min_size=heads, max_size=heads))
        budgets[0] += max(0, sum(least) - sum(budgets))
        rows.append((budgets, least))
    got = raised(*(torch.tensor([row[i] for row in rows]) for i in (0, 1))).tolist()
    for (budgets, least), mine in zip(rows, got, strict=True):
        assert sum(mine) == sum(budgets)
        assert all(floor <= b <= max(floor, was) for floor, b, was in zip(least, mine, budgets, strict=True))
        if all(floor <= was for floor, was in zip(least, budgets, strict=True)):
            assert mine == budgets
        spare = [max(0, was - floor) for floor, was in zip(least, budgets, strict=True)]
        total = sum(budgets) - sum(least)
        shares = [Fraction(n * total * WHOLE // max(1, sum(spare)), WHOLE) for n in spare]
        assert mine == [n + more for n, more in zip(least, rounded(shares, total, spare), strict=True)]


@pytest.mark.parametrize("policy", ["merge-locret", "merge(base=ada-locret)", "merge(base=snapkv(6,3),metric=l2)"])
def test_pinned_slots_take_nothing_over(policy):
    """Where slots are merged, the keys and values of pinned text are those that were read; others change."""
    merged, full = make(policy), make("full")
    # In layer 0 keys and values follow from the token and its position alone.
    for pin in PINS:
        merged.pin(*pin)
    for cache in (merged, full):
        logits_of(cache, tokens())
    mine, theirs = merged.bounded[0], full.bounded[0]
    changed = 0
    for h in range(2):
        values, whole = mine.head("values", h), theirs.head("values", h)
        keys, whole_keys = mine.head("keys", h), theirs.head("keys", h)
        for row, position in enumerate(mine.head("positions", h).tolist()):
            if position in pinned(PINS, LENGTH):
                torch.testing.assert_close(values[row], whole[position], rtol=1e-9, atol=1e-9)
                torch.testing.assert_close(keys[row], whole_keys[position], rtol=1e-9, atol=1e-9)
            else:
                changed += not torch.allclose(values[row], whole[position])
    assert changed > 5


# ---- while a text is read ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["h2o", "random", "ada-locret", "pyramid-locret(beta=2.0)"])
def test_what_was_evicted_stays_gone_and_the_rest_stays(policy):
    """Pinned after the prompt, where heads hold different parts of it."""
    cache = make(policy, 50)
    read(cache, steps=0)
    cache.pin(30, 50)
    before = held(cache)
    fed(cache, [5 + n % 80 for n in range(60)])
    for layer, heads in enumerate(held(cache)):
        for old, new in zip(before[layer], heads, strict=True):
            assert {p for p in new if p < 50} >= {p for p in old if 30 <= p < 50}
            assert {p for p in new if p < LENGTH} <= set(old)
    assert before != held(cache)


def test_tokens_to_come_and_unpinned_ones():
    cache = make("streaming(4)", length=None)
    cache.pin(30, 34)
    cache.pin(32, 36)
    assert cache.pins == ((30, 36),)
    read(cache, steps=0, ids=tokens(80))
    assert all(set(range(30, 36)) <= set(head) for heads in held(cache) for head in heads)
    cache.unpin(31, 35)
    assert cache.pins == ((30, 31), (35, 36))
    fed(cache, [9] * 40)
    assert all(set(head) & set(range(30, 36)) == {30, 35} for heads in held(cache) for head in heads)


@pytest.mark.parametrize("policy", ["h2o", "ada-snapkv(6,3)", "sirllm"])
def test_forks_copies_and_resets(policy):
    """A fork and a copy go on as a fresh run with the same pins; a reset cache reads like a new one."""
    cache, ids = make(policy, length=None), tokens(65)
    read(cache, PINS, steps=0, ids=ids)
    late = copy.deepcopy(cache)
    late.pin(10, 40)  # of which most is gone
    assert late.fork(90).pins == ((0, 3), (10, 41), (70, 72))
    longer = ids + tokens(25, seed=3)
    fresh, one = make(policy, length=90), cache.fork(90)
    wanted = read(fresh, PINS, ids=longer)
    assert one.pins == PINS and torch.equal(read(one, ids=longer), wanted) and held(one) == held(fresh)
    two = copy.deepcopy(one)
    assert two.pins == PINS and held(two) == held(one)
    assert torch.equal(*(read(each, steps=9, ids=[*longer, *range(5, 25), 3]) for each in (two, one)))
    two.unpin(0, 99)
    assert one.pins == PINS and not two.pins
    for length in (90, 71):
        one.reset(length)
        assert not one.pins
        again = make(policy, length=length)
        text = tokens(length, seed=8)
        assert torch.equal(read(one, ids=text), read(again, ids=text)) and held(one) == held(again)


@pytest.mark.usefixtures("on_the_reference")
@pytest.mark.parametrize("policy", ["h2o", "tova", "nacl(proxies=5)", "locret"])
def test_fixed_shapes(policy):
    """Decoding with fixed shapes evicts as dynamic decoding does, and follows pins that come between two tokens."""
    model, logits = backbone(), []
    for form in (TapedDecoder, None):
        cache = make(policy, chunk=5)
        read(cache, PINS, steps=0)
        with attach(model), torch.inference_mode():
            step = form(model, cache) if form else None
            for n in range(60):
                if n == 30:
                    cache.pin(cache.get_seq_length() - 2, cache.get_seq_length() + 1)
                token = 2 + 37 * n % 95
                dynamic = lambda: model(input_ids=torch.tensor([[token]]), **{CACHE: cache}).logits[0, -1]  # noqa: B023, E731
                logits.append(step([cache], [token])[0] if step else dynamic().float())
        assert all(pinned(cache.pins, 10**6) <= set(head) for heads in held(cache) for head in heads)
        if step is not None:
            assert step.reason is None and step.replays > 40 and cache.counters.evictions >= 10
            kept = held(cache)
    assert kept == held(cache)
    torch.testing.assert_close(torch.stack(logits[:60]), torch.stack(logits[60:]), rtol=0, atol=2e-6)


@pytest.mark.parametrize("base", ["h2o", "ada-snapkv(6,3)", "merge(base=h2o)"])
def test_pinned_text_is_read_again(monkeypatch, base):
    """Where the prompt's end is read twice, pinned tokens are among the passages, and are kept while the answer grows."""
    cache, pins = make(f"{base} reread=passages(14,5,3,2)", 40), ((8, 11), (50, 52))
    real, decoded = step._evict, []
    monkeypatch.setattr(step, "_evict", lambda ctx, cuts: decoded.append(cuts[0].rows.seen > LENGTH) or real(ctx, cuts))
    too_many = pytest.raises(ValueError, match=r"pins=14 tokens must be at most 13: .*14 tokens are read again")
    halfway = copy.deepcopy(cache)
    with attach(backbone()), torch.no_grad():
        backbone()(input_ids=torch.tensor([tokens()[:60]]), **{CACHE: halfway})
    with too_many:  # what is evicted by now is read again too
        halfway.pin_all([*pins, (12, 21)])
    read(cache, pins, steps=60)
    again = cache.reread_positions
    assert pinned(pins, LENGTH) <= set(again) and len(again) <= 14 + 5 and again == sorted(set(again))
    for heads in held(cache):
        for head in heads:
            assert pinned(pins, LENGTH) <= set(head)
    assert sum(decoded) == 2 * len(cache.layers) and cache.pins == pins
    cache.pin(12, 21)  # nothing more is read again: of these, the slots that are left count


# ---- bounds ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "rest", "most"),
    [
        ("h2o", {}, 24 - 5 - 1),
        ("h2o", {"local_len": 0}, 24 - 4 - 1),
        ("h2o", {"local_len": 0, "stabilizers": 0}, 23),
        ("h2o", {"length": None, "stabilizers": 9}, 14),
        ("snapkv(6,3)", {"one_shot": True}, 23),
    ],
)
def test_no_more_than_there_is_room_for(monkeypatch, policy, rest, most):
    cache = make(policy, **rest)
    cache.bind(backbone())
    with pytest.raises(ValueError, match=f"pins={most + 1} tokens must be at most {most}: layer 0 has a budget of 24"):
        cache.pin(0, most + 1)
    assert cache.pins == ()
    pins = [(0, most - 2), (29, 31)]
    with watched(monkeypatch, pins) as evictions:
        read(cache, pins)
    assert evictions
    late = make(policy, **rest)
    late.pin(3, most + 4)
    with pytest.raises(ValueError, match=f"pins={most + 1} tokens"):
        late.bind(backbone())
    late.unpin(3, 4)
    late.bind(backbone())


def test_a_fork_without_room_is_refused():
    cache = make("h2o", length=None)
    cache.pin(0, 19)
    read(cache, steps=0, ids=tokens(30))
    with pytest.raises(ValueError, match="pins=19 tokens must be at most 18"):
        cache.fork(90)


@pytest.mark.parametrize(("start", "end"), [(3, 3), (-1, 2), (5, 4)])
def test_ranges_that_are_none(start, end):
    with pytest.raises(ValueError, match=f"pin\\({start}, {end}\\): start must be at least 0, and end above it"):
        make("h2o").pin(start, end)


def test_full_attention_takes_any():
    cache = make("full")
    cache.pin(0, 10**6)
    assert torch.equal(read(cache), read(make("full")))
