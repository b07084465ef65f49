"""The scripts that measure conversations: a given answer is read as the model itself reads it, and differences are paired."""

from __future__ import annotations

import pytest
import torch
from scripts_loaded import load_script
from test_documents import parts

from locret_kit import attach

load_script("scripts/sessions.py")
protect = load_script("scripts/protect.py")


@torch.no_grad()
def test_given_answers_are_read_as_the_model_reads_them():
    model, tokenizer, _ = parts()
    chat = protect.Reading(model, tokenizer, settings=4096, policy="full")
    given = {"What is it?": [300, 12, 305, 9], "Who came in?": [77], "And then?": [40, 41, 42]}
    for question, answer in given.items():
        with attach(model):
            nats, hits = chat.read(question, answer)
        ids, n = list(chat.ids), len(answer)
        assert ids[-n:] == answer and question in tokenizer.decode(ids)
        logits = model(input_ids=torch.tensor([ids])).logits[0, -n - 1 : -1]
        wanted = -logits.log_softmax(-1)[range(n), answer].sum()
        assert nats == pytest.approx(float(wanted), rel=1e-5) and hits == int(
            (logits.argmax(-1) == torch.tensor(answer)).sum()
        )
    assert len(chat.turns) == 3


def test_differences_are_of_the_same_example():
    found = [
        protect.Found("nll", 2048, 128, sample, kind, value)
        for kind, values in (("none", [1.0, 3.0, 9.0]), ("first", [1.5, 2.5]))
        for sample, value in enumerate(values)
    ]
    lines = protect.table(found).splitlines()
    assert len(lines) == 4 and "| none | 3 | 4.333 |" in lines[2]
    assert lines[3].endswith("| first | 2 | 2.000 | +0.000 ± 0.500 |")
