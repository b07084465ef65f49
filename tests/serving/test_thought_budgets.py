"""Bounds that a request may name: of its thought, and of tokens beyond the server's."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import httpx
import pytest
from families import chatml, family_tokenizer
from http_bodies import user
from served import KEYS, LIMITS, serving
from tiny_models import tiny_model

from locret_kit.policies.grammar import parse_policy
from locret_kit.serving.engine_thread import EngineThread
from locret_kit.settings import RunSettings


def test_a_thought_ends_at_its_budget_and_the_answer_follows(engine, monkeypatch):
    tokenizer = deepcopy(engine.tokenizer)
    tokenizer.chat_template = chatml("<think></think>", "<think>\n")
    monkeypatch.setattr(engine, "tokenizer", tokenizer)
    end = len(tokenizer("</think>", add_special_tokens=False).input_ids)
    asked = {
        "messages": user("How deep?"),
        "max_tokens": 40,
        "temperature": 0,
        "logit_bias": {tokenizer.eos_token_id: -100},
    }
    headers = {"authorization": f"Bearer {KEYS[0]}", "x-api-key": KEYS[0]}
    with serving(engine) as url:
        for path in ("chat/completions", "messages"):
            body = asked | {"thinking": {"type": "enabled", "budget_tokens": 5}}
            answer = httpx.post(f"{url}/v1/{path}", json=body, headers=headers).json()
            if path == "messages":
                assert [block["type"] for block in answer["content"]] == ["thinking", "text"]
                continue
            message, usage = answer["choices"][0]["message"], answer["usage"]
            assert message["content"].strip() and message["reasoning_content"]
            assert usage["completion_tokens"] == 40, "thoughts are tokens of the answer here"
            assert usage["completion_tokens_details"]["reasoning_tokens"] <= 5 + end + 1
        for budget in (0, -1, "many", 1.5):
            wrong = {**asked, "thinking": {"type": "enabled", "budget_tokens": budget}}
            answer = httpx.post(f"{url}/v1/chat/completions", json=wrong, headers=headers)
            assert answer.status_code == 400 and "thinking.budget_tokens" in answer.json()["error"]["message"]


def test_a_budget_that_ends_within_a_character():
    """A random model writes half of a character at many a budget; its thought is closed there, and the call follows."""
    tokenizer = family_tokenizer("qwen3.5")
    model = tiny_model("llama", vocab_size=len(tokenizer))
    tool = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
    settings = RunSettings(budget=256, chunk=64, stabilizers=4, local_len=5)
    engine = EngineThread(model, tokenizer, settings, parse_policy("streaming"), None, sessions=2)
    body = {"messages": user("How?"), "tools": [tool], "tool_choice": "required", "max_tokens": 200, "temperature": 1}
    try:
        with serving(engine, replace(LIMITS, answer_tokens=300), keys=()) as url:
            for seed in range(12):
                more = {"seed": seed, "thinking": {"type": "enabled", "budget_tokens": 4 + seed % 4}}
                (choice,) = httpx.post(f"{url}/v1/chat/completions", json=body | more).json()["choices"]
                assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["now"]
    finally:
        engine.stop()


def test_without_max_tokens_a_thought_has_a_bound_of_its_own(engine, monkeypatch):
    tokenizer = deepcopy(engine.tokenizer)
    tokenizer.chat_template = chatml("<think></think>", "<think>\n")
    monkeypatch.setattr(engine, "tokenizer", tokenizer)
    body = {"messages": user("How deep?"), "temperature": 0, "logit_bias": {tokenizer.eos_token_id: -100}}
    with serving(engine, replace(LIMITS, answer_tokens=30)) as url:
        for more, thought in (({}, 24), ({"thinking": {"type": "enabled", "budget_tokens": 5}}, 5)):
            headers = {"authorization": f"Bearer {KEYS[0]}"}
            answer = httpx.post(f"{url}/v1/chat/completions", json=body | more, headers=headers)
            usage = answer.json()["usage"]
            end = len(tokenizer("</think>", add_special_tokens=False).input_ids)
            assert usage["completion_tokens_details"]["reasoning_tokens"] == thought + end
            assert usage["completion_tokens"] == thought + end + 6 and answer.headers["x-max-tokens"] == str(
                thought + 6
            )


@pytest.mark.parametrize("strict", [False, True])
def test_more_tokens_than_served(engine, strict):
    headers = {"authorization": f"Bearer {KEYS[0]}"}
    with serving(engine, replace(LIMITS, answer_tokens=3, strict=strict)) as url:
        for wanted in (3, 32000, -1):
            body = {"messages": user("How deep?"), "max_tokens": wanted}
            answer = httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers)
            if strict and wanted > 3:
                assert answer.status_code == 400
                assert answer.json()["error"]["message"] == "max_tokens=32000 must be at most 3"
            else:
                assert answer.status_code == 200 and answer.headers["x-max-tokens"] == "3"
