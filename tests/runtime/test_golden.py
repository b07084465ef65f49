"""Kept positions and tokens of every policy in every mode: those of the day on which they were pinned."""

import json

import pytest
from golden_runs import FILE, MODES, cases, outcome

GOLDEN = json.loads(FILE.read_text())


@pytest.mark.parametrize("policy", list(dict.fromkeys(policy for policy, _ in cases())))
def test_kept_positions_and_tokens_are_the_pinned_ones(policy):
    assert {mode: outcome(policy, mode) for mode in MODES} == {mode: GOLDEN[f"{policy} {mode}"] for mode in MODES}
