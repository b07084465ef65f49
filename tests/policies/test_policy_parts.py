"""Allocations and selections on random slots, and the grammar."""

from dataclasses import replace
from fractions import Fraction

import numpy as np
import policy_rules as oracle
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from policy_oracle import OracleLayer, Rule, Setting
from slot_layers import SELECTIONS, layers_of_slots, slots_of

from locret_kit.policies import WHOLE, rounded, rounded_on_device
from locret_kit.policies.grammar import composed_of, describe_policies, parse_policy
from locret_kit.policies.methods.locret import Cis
from locret_kit.policies.methods.nacl import Sampled
from locret_kit.policies.methods.streaming import Recency
from locret_kit.policies.registry import Adaptive, Mass, Pyramid, policies

# ---- allocation -----------------------------------------------------------------------------------------------------------


@given(shares=st.lists(st.fractions(0, 50), min_size=1, max_size=12))
def test_rounded_stays_near(shares):
    total = int(sum(shares))
    got = rounded(shares, total)
    assert sum(got) == total
    assert all(abs(a - b) < 1 for a, b in zip(got, shares, strict=True))
    assert got == oracle.rounded(shares, total)


@given(data=st.data(), heads=st.integers(1, 9), alpha=st.floats(0, 1), keep=st.integers(0, 12))
def test_rounded_on_the_device(data, heads, alpha, keep):
    """The same integers as the oracle's ``rounded`` gives, whatever was given away and however little room there is."""
    part, rows = round(alpha * WHOLE), []
    for _ in range(2):
        most = data.draw(st.lists(st.integers(0, 15), min_size=heads, max_size=heads))
        best = [data.draw(st.integers(0, top)) for top in most]
        while sum(best) > heads * keep:  # no more are among the best than are kept
            best[best.index(max(best))] -= 1
        rows.append((best, most))
    best_BH, most_BH = (torch.tensor([row[i] for row in rows]) for i in (0, 1))
    got = rounded_on_device(part * best_BH + (WHOLE - part) * keep, most_BH, heads * keep).tolist()
    a = Fraction(part, WHOLE)
    for (best, most), mine in zip(rows, got, strict=True):
        shares = [a * n + (1 - a) * keep for n in best]
        assert mine == oracle.rounded(shares, min(heads * keep, sum(most)), most)


@given(case=layers_of_slots(), alpha=st.floats(0, 1))
def test_every_head_keeps_the_same_share_of_its_attention(case, alpha):
    """No head's last kept slot stands behind a larger share than any head's first dropped one."""
    scores, protected, valid, keep = case
    mass = scores.double().masked_fill(~valid, 0.0)
    mass = mass / mass.sum(-1, keepdim=True).clamp_min(1e-30)
    none = torch.zeros_like(valid)
    whole = Mass().head_budgets(mass, none, valid, keep)
    for b in range(2):
        behind, ahead = [], []
        for h, count in enumerate(whole[b].tolist()):
            best = sorted(mass[b, h][valid[b, h]].tolist(), reverse=True)
            behind += [sum(best[: count - 1])] * (count > 0)
            ahead += [sum(best[:count])] * (count < len(best))
        assert not ahead or max(behind, default=0.0) <= min(ahead) + 1e-9
    budgets = Mass(alpha).head_budgets(mass, protected, valid, keep)
    for found in (whole, budgets):
        assert found.sum(-1).tolist() == [scores.shape[1] * keep] * 2
        assert (found <= valid.sum(-1)).all() and (found >= 0).all()
    if keep >= int(protected.sum(-1).max()):
        assert (budgets >= protected.sum(-1).minimum(valid.sum(-1))).all()


def test_mass_is_what_the_score_says_attention_is():
    """A head whose attention is on one slot needs no more; a score that is no attention shares out alike."""
    scores = torch.tensor([[[9.0, 1.0, 1.0, 1.0], [3.0, 3.0, 3.0, 3.0]]])
    slots = slots_of(scores, torch.ones_like(scores, dtype=torch.bool))
    shares = {}
    for score in (Cis(), Recency()):
        mass = Mass().measured(score, scores, slots)
        torch.testing.assert_close(mass.sum(-1), torch.ones(1, 2, dtype=torch.double))
        shares[type(score)] = Mass().head_budgets(mass, ~slots.valid, slots.valid, 2)[0].tolist()
    assert shares == {Cis: [1, 3], Recency: [2, 2]}


def test_importance_is_compared_across_heads_in_its_own_unit():
    """Raw logits of one head may all be above another's: after a softmax each head has mass one to place."""
    scores = torch.tensor([[[9.0, 1.0, 1.0, 1.0], [20.0, 20.0, 20.0, 20.0]]])
    valid = torch.ones_like(scores, dtype=torch.bool)
    slots = slots_of(scores, valid)
    shares = {}
    for target in ("logit", "log_prob"):
        comparable = Cis().comparable(scores, replace(slots, target=target))
        shares[target] = Adaptive(1.0).head_budgets(comparable, ~valid, valid, 2)[0].tolist()
    assert shares == {"logit": [1, 3], "log_prob": [0, 4]}


@given(
    budget=st.integers(1, 300),
    layers=st.integers(1, 40),
    share=st.floats(0, 1),
    beta=st.floats(1, 60),
    longest=st.none() | st.integers(1, 700),
)
def test_pyramid_budgets(budget, layers, share, beta, longest):
    window = int(share * budget)
    budgets = Pyramid(beta).layer_budgets(budget, layers, window, longest)
    assert budgets == oracle.pyramid_budgets(budget, window, beta, layers, longest)
    assert sum(budgets) == layers * budget
    assert budgets == sorted(budgets, reverse=True) and budgets[-1] >= window
    assert longest is None or budgets[0] <= max(longest, budget)
    assert Pyramid(1.0).layer_budgets(budget, layers, window, longest) == [budget] * layers


@given(
    H=st.integers(1, 6),
    S=st.integers(1, 40),
    share=st.floats(0, 1),
    window=st.integers(0, 40),
    alpha=st.floats(0, 1),
    seed=st.integers(0, 10**6),
)
def test_adaptive_budgets(H, S, share, window, alpha, seed):
    """Exact sums, the safeguard's floor, the definition's integers, and theorem 4: pooled choice retains no less weight."""
    keep = max(1, int(share * S))
    window = min(window, keep)
    scores = np.random.default_rng(seed).exponential(size=(H, S)) ** 3
    protected = np.zeros((H, S), bool)
    protected[:, S - window :] = True
    everything = torch.ones(1, H, S, dtype=torch.bool)
    scores_BHS, protected_BHS = torch.from_numpy(scores)[None], torch.from_numpy(protected)[None]
    budgets = Adaptive(alpha).head_budgets(scores_BHS, protected_BHS, everything, keep)[0].tolist()
    layer = OracleLayer(Rule(oracle.position), Setting(H, 1, keep, 1))
    layer.keep = keep
    guarded = [set(range(S - window, S))] * H
    assert budgets == oracle.adaptive(alpha)(layer, scores.tolist(), guarded)
    assert sum(budgets) == H * keep
    assert all((1 - alpha) * keep - 1 < b <= S for b in budgets)
    assert all(b >= window for b in budgets)
    assert Adaptive(0.0).head_budgets(scores_BHS, protected_BHS, everything, keep)[0].tolist() == [keep] * H

    def retained(budgets: list[int]) -> float:
        return sum(sum(sorted(row, reverse=True)[:b]) for row, b in zip(scores, budgets, strict=True))

    free = Adaptive(1.0).head_budgets(scores_BHS, torch.zeros_like(everything), everything, keep)[0].tolist()
    assert retained(free) >= retained([keep] * H) * (1 - 1e-12)


# ---- selection ------------------------------------------------------------------------------------------------------------


@given(case=layers_of_slots(), selection=st.sampled_from(SELECTIONS))
def test_selections_fill_every_budget(case, selection):
    scores, protected, valid, keep = case
    budgets = Adaptive(0.7).head_budgets(scores, protected, valid, keep)
    stay = selection.select(scores, protected, valid, budgets, slots_of(scores, valid))
    assert torch.equal(stay.sum(-1), budgets)
    assert not (stay & ~valid).any()
    own = torch.tensor([[b - selection.reserved_slots(b) for b in row] for row in budgets.tolist()])
    fits = (protected.sum(-1) <= own)[..., None]
    assert not (protected & ~stay & fits).any()


@pytest.mark.parametrize("distribution", ["softmax", "uniform"])
def test_sampled_part_follows_its_distribution(distribution):
    """One draw a head: over 4,000 heads each slot is drawn as often as its probability says, within four deviations."""
    H, score_S = 4000, torch.tensor([0.0, 1.0, 2.0, 0.5, 1.5])
    slots = slots_of(score_S.expand(1, H, 5), torch.ones(1, H, 5, dtype=torch.bool))
    one = torch.ones(1, H, dtype=torch.int64)
    counts = Sampled(1.0, distribution).select(slots.entry_scores, ~slots.valid, slots.valid, one, slots)[0].sum(0)
    p = score_S.softmax(-1) if distribution == "softmax" else torch.full((5,), 0.2)
    assert counts.sum() == H
    assert ((counts - H * p).abs() < 4 * (H * p * (1 - p)).sqrt()).all()


def test_one_draw_for_all_heads_is_one_choice():
    """Heads differ by their scores and draw alike where a draw is shared; layers too where that is for all."""
    scores = torch.rand(1, 4, 60, generator=torch.Generator().manual_seed(0))
    twenty, none = torch.full((1, 4), 20), torch.zeros(1, 4, 60, dtype=torch.bool)
    slots = slots_of(scores, ~none)

    def draw(per: str, layer: int) -> torch.Tensor:
        return Sampled(1.0, per=per).select(scores, none, ~none, twenty, replace(slots, layer=layer))[0]

    assert len(draw("head", 0).unique(dim=0)) == 4
    assert len(draw("layer", 0).unique(dim=0)) == len(draw("all", 0).unique(dim=0)) == 1
    assert not torch.equal(draw("layer", 0), draw("layer", 1)) and torch.equal(draw("all", 0), draw("all", 1))


# ---- grammar ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in policies() if name != "full"])
def test_a_name_is_its_parts(name):
    """What --list-policies prints of a policy is an expression for it."""
    named = parse_policy(name)
    composed = parse_policy(composed_of(named))
    (text,) = (text for text in describe_policies() if text.split()[0] == name)
    assert composed_of(named) in " ".join(text.split())
    for part in ("score", "scopes", "allocation", "selection", "merge", "recall", "prefill_mask", "sparse", "reread"):
        assert getattr(composed, part) == getattr(named, part)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("h3o", "policy='h3o' is unknown. Did you mean 'h2o'?"),
        ("h2o(windw=3)", "parameter 'windw' is unknown. Did you mean 'window'?"),
        ("h2o(window=a)", "policy=h2o: window=a must be a number of tokens (an integer, at least 0), or a fraction"),
        ("tova(3)", "takes 0 parameters"),
        ("snapkv(kernel=4)", "policy=snapkv: kernel=4 must be odd and at least 1"),
        ("kvcrush(base=full)", "base=full evicts nothing"),
        (
            "kvcrush(anchor=meen)",
            "kvcrush: anchor=meen must be one of: mean, random, alternate, zeros, ones. Did you mean 'mean'?",
        ),
        ("score=cls", "score='cls' is unknown. Did you mean 'cis'?"),
        ("score=cis allocation=adaptive+adaptive", "only pyramid+adaptive can be combined"),
        ("score=cis allocation=adaptive(alpha=2)", "alpha=2 must be at least 0 and at most 1"),
        ("score=cis allocation=pyramid(beta=0.5)", "beta=0.5 must be at least 1"),
        ("score=cis selection=sampled(ratio=1.2)", "ratio=1.2 must be at least 0 and at most 1"),
        ("score=cis allocation=pyramid(beta=inf)", "beta=inf must be finite: a number, at least 1"),
        ("scope=sinks", "names no score"),
        ("h2o merge=", "merge='' must be name or name"),
        ("h2o(window=0.1,window=0.5)", "'window' is given twice"),
        ("kvzip", "locret-eval sets it beside the policies"),
        ("score=expected-attention(value_norm=maybe)", "value_norm=maybe must be true or false"),
        ("h2o reread=passages(kernel=4)", "reread=passages: kernel=4 must be odd and at least 1"),
        ("h2o sparse=vertical-slash", "sparse prefill leaves attention out, and score or scope read of all of it: sum"),
        ("windowed-locret sparse=vertical-slash", "and so does prefill_mask: leave one out"),
        ("locret merge=nearest recall=blocks", "recall does not go with merge"),
        ("locret sparse=vertical-slash recall=blocks", "recall does not go with sparse"),
        ("locret reread=passages recall=blocks", "recall does not go with reread"),
        ("locret prefill_mask=sliding recall=blocks", "recall does not go with prefill_mask"),
    ],
)
def test_errors_say_what_there_is(text, said):
    with pytest.raises(ValueError) as caught:
        parse_policy(text)
    assert said in str(caught.value)


def test_a_path_in_brackets_may_have_an_equals_sign():
    with pytest.raises(FileNotFoundError, match=r"pool='runs/lr=0\.1/pool' holds no pool"):
        parse_policy("h2o merge=lococo(runs/lr=0.1/pool)")
    assert parse_policy("kvcrush(h2o merge=nearest)").merge == parse_policy("h2o merge=nearest").merge
