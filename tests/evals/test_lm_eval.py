"""lm-evaluation-harness's own command line knows the model ``locret``; what it scores is in `test_eval_fidelity`."""

from __future__ import annotations

import sys

import pytest
from tiny_tokenizer import save_tiny_backbone

from locret_kit.cli.eval import main


def test_the_command_line_is_the_harness_s_with_one_model_more(monkeypatch):
    """When it starts, its words are those that were given and the model is known."""
    from lm_eval.api.registry import get_model

    found = []
    monkeypatch.setattr("lm_eval.__main__.cli_evaluate", lambda: found.append((sys.argv, get_model("locret"))))
    monkeypatch.setattr(sys, "argv", [])
    words = ["--model", "locret", "--model_args", "model=x,budget=32", "--tasks", "own"]
    assert main(["lm_eval", *words]) == 0
    from locret_kit.lm_eval import Locret

    assert found == [(["lm_eval", *words], Locret)]


def test_the_class_that_a_registry_names(tmp_path):
    """As the harness makes it: of the strings of ``--model_args``, and what it adds of its own."""
    from locret_kit.lm_eval import Locret

    one = Locret(
        model=str(save_tiny_backbone(tmp_path)), policy="streaming(sinks=8)", budget=32, chunk=16, batch_size=1
    )
    assert (one.variant.policy, one.variant.budget) == ("streaming(sinks=8)", 32)
    with pytest.raises(ValueError, match="budgt"):
        Locret(model=str(tmp_path), budgt=32)
