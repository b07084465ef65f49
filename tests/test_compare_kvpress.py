"""What `scripts/compare_kvpress.py` does where kvpress is not installed."""

from __future__ import annotations

import sys

import pytest
import torch
from scripts_loaded import load_script

script = load_script("scripts/compare_kvpress.py")


def test_share_is_of_the_slots_of_the_one_that_keeps_more():
    one, other = torch.tensor([[True, True, False]]), torch.tensor([[False, True, False]])
    assert script.share([one, one], [one, one]) == 1
    assert script.share([one, one], [one, other]) == script.share([one, other], [one, one]) == 0.75
    assert script.share([other], [~other]) == 0


def test_our_slots_are_those_that_the_cache_holds():
    model, ids = script.backbone(None, 100)
    assert sorted(ids) == list(range(100))  # no two alike
    for held in script.ours(model, ids, "streaming", 20):
        assert held.shape == (2, 100) and all(
            head.nonzero().flatten().tolist() == [*range(4), *range(84, 100)] for head in held
        )
    for held in script.ours(model, ids, "ada-snapkv(4,1,alpha=1)", 20):
        assert held.sum() == 40 and held[:, -4:].all()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "kvpress is missing: pip install --no-deps kvpress cachetools fire termcolor"),
        (["--budget", "63"], "budget=63 must be from 64 to below length=460"),
        (["--budget", "100", "--length", "100"], "budget=100 must be from 64 to below length=100"),
    ],
)
def test_errors_are_one_line(arguments, said, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "kvpress", None)
    assert script.main(arguments) == 1
    assert capsys.readouterr().err == f"compare_kvpress.py: {said}\n"
