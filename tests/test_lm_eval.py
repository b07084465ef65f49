"""lm-evaluation-harness's own command line with the model ``locret``, on a task of one's own."""

from __future__ import annotations

import json
import sys

import pytest
from tiny_tokenizer import save_tiny_backbone

from locret_kit.lm_eval import Locret, main


def test_its_command_line_scores_a_task_of_ones_own(tmp_path, monkeypatch, capsys):
    backbone = save_tiny_backbone(tmp_path / "backbone")
    (tmp_path / "own").mkdir()
    questions = [
        {"text": "The boats came in. " * 12, "choices": [" Remember", " What"], "label": i % 2} for i in range(3)
    ]
    (tmp_path / "own" / "own.jsonl").write_text("".join(json.dumps(one) + "\n" for one in questions))
    (tmp_path / "own" / "own.yaml").write_text(
        f"task: own\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {tmp_path}/own/own.jsonl}}}}\n"
        "test_split: test\noutput_type: multiple_choice\ndoc_to_text: '{{text}}'\ndoc_to_choice: '{{choices}}'\n"
        "doc_to_target: label\nmetric_list: [{metric: acc}]\n"
    )
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "argv", ["lm_eval"])
    words = f"--model locret --model_args model={backbone},policy=streaming,budget=32,chunk=16 --tasks own"
    assert main(["lm_eval", *words.split(), "--include_path", str(tmp_path / "own")]) == 0
    said = capsys.readouterr().out
    assert "locret ({" in said and "|own  |" in said and "|acc   |" in said


def test_the_class_that_a_registry_names(tmp_path):
    """As ``MODEL_MAPPING`` of the harness would find it: made of the strings of ``--model_args``."""
    from lm_eval.api.registry import get_model

    assert get_model("locret") is Locret
    one = Locret(
        model=str(save_tiny_backbone(tmp_path)), policy="streaming(sinks=8)", budget=32, chunk=16, batch_size=1
    )
    assert (one.variant.policy, one.variant.budget) == ("streaming(sinks=8)", 32)
    with pytest.raises(ValueError, match="budgt"):
        Locret(model=str(tmp_path), budgt=32)
