"""Ten families' answers through Vercel's client: three turns with a thought, a text and a call of a tool, whole and streamed.
``tests/serving/test_serving_thoughts.py`` has the clients of OpenAI and Anthropic.

A tiny random model is made to write what is recorded of a family, token by token; template, tokens and all else are as served.
"""

import json
import os
import subprocess
from functools import partial
from pathlib import Path

import pytest
from families import ARGUMENTS, FAMILIES, TEXT, THOUGHT, family_tokenizer
from served import Dictated, serving, stopped
from tiny_models import tiny_model

from locret_kit.policies.grammar import parse_policy
from locret_kit.serving import completions
from locret_kit.serving.engine_thread import EngineThread
from locret_kit.serving.state import Limits
from locret_kit.settings import RunSettings

CALLS = [["depth", ARGUMENTS]]
LAST = ("The result is there.\n\nI say it.", "It is 7 m deep.")
"""Thought and text of the answers after the tool's result, which have no call."""


def said(name: str) -> list[dict]:
    """What a client shows of the three answers."""
    thinks = "thought" in FAMILIES[name].events
    first = {"thought": THOUGHT if thinks else "", "text": TEXT, "calls": CALLS}
    return [first, *[{"thought": LAST[0] if thinks else "", "text": LAST[1], "calls": []}] * 2]


@pytest.fixture(params=FAMILIES)
def family(request, monkeypatch):
    """A family's name, and the address of a server with its model."""
    name, tokenizer = request.param, family_tokenizer(request.param)
    first = FAMILIES[name].answer
    last = first[: first.index(TEXT)].replace(THOUGHT, LAST[0]).replace("commentary", "final") + LAST[1]
    form_of_answer = completions.form_of_answer

    def form_of(engine, body, *given):
        called = any(message.role == "tool" for message in body.messages)
        ids = [*tokenizer(last if called else first, add_special_tokens=False).input_ids, tokenizer.eos_token_id]
        return partial(Dictated, ids), form_of_answer(engine, body, *given)[1]

    monkeypatch.setattr(completions, "form_of_answer", form_of)
    model = tiny_model("llama", vocab_size=len(tokenizer))
    settings = RunSettings(budget=256, chunk=64, stabilizers=4, local_len=5)
    made = EngineThread(model, tokenizer, settings, parse_policy("streaming"), None, sessions=2)
    with stopped(made) as engine, serving(engine, Limits(answer_tokens=1000), keys=()) as url:
        yield name, url


@pytest.mark.parametrize("streamed", ["false", "true"])
def test_vercel(family, streamed):
    name, url = family
    program = ["node", str(Path(__file__).parent / "vercel.mjs"), url, os.environ["LOCRET_NODE_PACKAGES"], streamed]
    done = subprocess.run(program, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == said(name)
