"""Kept positions and tokens of every policy in every mode: those of the day on which they were pinned."""

import json

import pytest
from golden_runs import APART, FILE, MODES, cases, outcome
from pairwise import one_of
from policy_runs import KINDS

GOLDEN = json.loads(FILE.read_text())


def case(policy, mode):
    """Kinds of policies run alone and in every second mode, the others in one mode more; with ``--all`` in every one.
    ``test_batch.py`` compares texts of those kinds with each alone."""
    modes = [*MODES][1:]
    turn = modes.index(one_of(modes, policy))
    left = mode != "alone" and (modes.index(mode) - turn) % (2 if policy in (*KINDS, *APART) else len(modes)) != 0
    left |= mode == "texts" and policy in KINDS
    return pytest.param(policy, mode, marks=[pytest.mark.left] * left)


@pytest.mark.parametrize(("policy", "mode"), [case(*one) for one in cases()])
def test_kept_positions_and_tokens_are_the_pinned_ones(policy, mode):
    assert outcome(policy, mode) == GOLDEN[f"{policy} {mode}"]
