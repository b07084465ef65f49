"""Requests of clients, written down by their public code, at a server with strict templates: whole, streamed, a turn more."""

import json
import re
from dataclasses import replace
from itertools import cycle
from pathlib import Path

import httpx
import pytest
from http_bodies import bearer
from read_texts import parts
from served import LIMITS, serving, stopped
from strict_templates import tokenizer_of

from locret_kit.policies.grammar import parse_policy
from locret_kit.serving.anthropic_messages import MessagesBody
from locret_kit.serving.bodies import ChatBody
from locret_kit.serving.engine_thread import EngineThread
from locret_kit.serving.responses import ResponsesBody
from locret_kit.settings import RunSettings

FILES = sorted(Path(__file__).with_name("clients").glob("*.json"))
CLIENTS = {path.stem: json.loads(path.read_text()) for path in FILES}
BODIES = {"/v1/chat/completions": ChatBody, "/v1/messages": MessagesBody, "/v1/responses": ResponsesBody}
TEMPLATES = ("MISTRAL", "QWEN35", "GEMMA", "LLAMA31", "GPT_OSS", "DEEPSEEK")


def test_all_seven_clients_are_here():
    assert list(CLIENTS) == ["claude_code", "cline", "codex", "continue", "langchain", "litellm", "open_webui"]
    assert all(len(client["requests"]) > 1 for client in CLIENTS.values())


def prompt(path: str, body: dict, tokenizer) -> tuple[str, int]:
    """The prompt_of of a body, and its tokens."""
    (ids,) = BODIES[path].model_validate(body).ids(tokenizer, None)
    return tokenizer.decode(ids), len(ids)


def signs_of(body: dict) -> list[str]:
    """Signs of a body's texts, in their order."""
    return re.findall(r"\b[A-Z]{2}-\d+", json.dumps(body))


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("client", CLIENTS)
def test_each_text_is_in_the_prompt_once(client, template):
    """Texts of the recorded requests begin with a sign of their own, such as CX-1; the rest is what clients put around them."""
    tokenizer, recorded = tokenizer_of(template), CLIENTS[client]
    for body in recorded["requests"]:
        signs = signs_of(body)
        text, _ = prompt(recorded["path"], body, tokenizer)
        assert {sign: len(re.findall(rf"{sign}\b", text)) for sign in signs} == dict.fromkeys(signs, 1), text
    first, second = (prompt(recorded["path"], body, tokenizer)[0] for body in recorded["requests"][:2])
    if template != "MISTRAL":  # whose template moves the system prompt_of to the last question
        assert second.startswith(first[: first.index(signs_of(recorded["requests"][0])[-1])])


@pytest.fixture(scope="module")
def server(request):
    """A server of a strict template, and its tokenizer."""
    tokenizer = tokenizer_of(request.param)
    settings = RunSettings(budget=1500, chunk=256, stabilizers=4, local_len=5)
    made = EngineThread(
        parts()[0], tokenizer, settings, parse_policy("streaming"), None, piece=256, sessions=4, queue=6
    )
    limits = replace(LIMITS, answer_tokens=4)
    with stopped(made) as engine, serving(engine, limits, defaults={"temperature": 0.0}) as url:
        yield url, tokenizer


def said(value: object) -> str:
    """All that an answer, or an event of one, says: texts and thoughts."""
    if isinstance(value, list):
        return "".join(map(said, value))
    if not isinstance(value, dict):
        return ""
    texts = (value.get(name) for name in ("reasoning_content", "thinking", "text", "content"))
    own = "".join(text for text in texts if isinstance(text, str))
    return own + "".join(said(value.get(name)) for name in ("choices", "message", "delta", "content", "output"))


def streamed(url: str, path: str, body: dict) -> tuple[str, dict]:
    """What a streamed answer says, and its last event."""
    answer = httpx.post(url + path, json={**body, "stream": True}, headers=bearer(), timeout=300)
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    events = [json.loads(line) for line in lines if line != "[DONE]"]
    assert answer.status_code == 200 and not any("error" in event for event in events), answer.text
    deltas = [event for event in events if "choices" in event or event["type"] == "content_block_delta"]
    texts = "".join(event["delta"] for event in events if isinstance(event.get("delta"), str))
    assert path != "/v1/chat/completions" or lines[-1] == "[DONE]"
    return said(deltas) + texts, events[-1]


@pytest.mark.parametrize(("server", "client"), [*zip(cycle(TEMPLATES[:3]), CLIENTS, strict=False)], indirect=["server"])
def test_a_client_is_answered_in_each_turn(server, client):
    url, tokenizer = server
    recorded = CLIENTS[client]
    path, left_out = recorded["path"], recorded.get("left_out", [None] * len(recorded["requests"]))
    for body, left in zip(recorded["requests"], left_out, strict=True):
        whole = httpx.post(url + path, json={**body, "stream": False}, headers=bearer(), timeout=300)
        assert whole.status_code == 200, whole.text
        assert whole.headers.get("x-left-out") == left
        answer, (text, last) = whole.json(), streamed(url, path, body)
        assert said(answer) == text
        used = answer["usage"]
        counts = [used.get(name, 0) for name in ("prompt_tokens", "input_tokens", "cache_read_input_tokens")]
        tokens = sum(counts) if path != "/v1/responses" else used["input_tokens"]
        assert tokens == prompt(path, body, tokenizer)[1]
        assert path != "/v1/responses" or last["type"] in ("response.completed", "response.incomplete")
