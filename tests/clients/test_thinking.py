"""Ten families' answers through clients: three turns with a thought, a text and a call of a tool, whole and streamed.

A tiny random model is made to write what is recorded of a family, token by token; template, tokens and all else are as served.
"""

import json
import os
import subprocess
from functools import partial
from pathlib import Path

import anthropic
import openai
import pytest
from families import ARGUMENTS, FAMILIES, TEXT, THOUGHT, TOOL, family_tokenizer
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


@pytest.mark.parametrize("streamed", [False, True])
def test_openai(family, streamed):
    name, url = family
    messages, shown = [], []
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        for turn in ({"role": "user", "content": "How deep?"}, None, {"role": "user", "content": "And now?"}):
            messages += [turn] if turn else []
            asked = dict(model="tiny", messages=messages, tools=[TOOL], temperature=0, max_tokens=600)
            if streamed:
                with client.chat.completions.stream(**asked) as stream:
                    thought = "".join(
                        getattr(event.chunk.choices[0].delta, "reasoning_content", None) or ""
                        for event in stream if event.type == "chunk" and event.chunk.choices
                    )  # fmt: skip
                    message = stream.get_final_completion().choices[0].message
            else:
                message = client.chat.completions.create(**asked).choices[0].message
                thought = getattr(message, "reasoning_content", None) or ""
            calls = message.tool_calls or []
            shown.append({
                "thought": thought, "text": (message.content or "").strip(),
                "calls": [[call.function.name, json.loads(call.function.arguments)] for call in calls],
            })  # fmt: skip
            back = {"role": "assistant", "content": message.content, "reasoning_content": thought}
            sent = [{"id": one.id, "type": "function", "function": {
                "name": one.function.name, "arguments": one.function.arguments}} for one in calls]  # fmt: skip
            messages.append(back | ({"tool_calls": sent} if sent else {}))
            messages += [{"role": "tool", "tool_call_id": call.id, "content": "7 m"} for call in calls]
    assert shown == said(name)


@pytest.mark.parametrize("streamed", [False, True])
def test_anthropic(family, streamed):
    name, url = family
    tool = {"name": "depth", "description": "How deep a harbour is", "input_schema": TOOL["function"]["parameters"]}
    messages, shown = [], []
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        for turn in ("How deep?", None, "And now?"):
            messages += [{"role": "user", "content": turn}] if turn else []
            asked = dict(model="tiny", messages=messages, tools=[tool], max_tokens=600, extra_body={"temperature": 0})
            if streamed:
                with client.messages.stream(**asked) as stream:
                    message = stream.get_final_message()
            else:
                message = client.messages.create(**asked)
            calls = [block for block in message.content if block.type == "tool_use"]
            shown.append({
                "thought": "".join(block.thinking for block in message.content if block.type == "thinking"),
                "text": "".join(block.text for block in message.content if block.type == "text").strip(),
                "calls": [[call.name, call.input] for call in calls],
            })  # fmt: skip
            back = [block.model_dump(exclude_none=True) for block in message.content]
            messages.append({"role": "assistant", "content": back})
            results = [{"type": "tool_result", "tool_use_id": call.id, "content": "7 m"} for call in calls]
            messages += [{"role": "user", "content": results}] if results else []
    assert shown == said(name)


@pytest.mark.parametrize("streamed", ["false", "true"])
def test_vercel(family, streamed):
    name, url = family
    program = ["node", str(Path(__file__).parent / "vercel.mjs"), url, os.environ["LOCRET_NODE_PACKAGES"], streamed]
    done = subprocess.run(program, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == said(name)
