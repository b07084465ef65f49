"""Calls of tools and answers by a schema, over HTTP and in the bodies of requests."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import replace
from functools import partial

import httpx
import pytest
from http_bodies import CHAT_TOOL, NOW, user
from read_texts import parts
from real_templates import real_tokenizer
from served import KEYS, LIMITS, dictate, serving
from tokenizers import AddedToken
from written_calls import OWN, TYPED, TYPES, read, reader

from locret_kit.serving.answers import AnswerStream
from locret_kit.serving.bodies import ChatBody
from locret_kit.serving.histories import rewritten

TOOLS = [CHAT_TOOL, NOW]


@pytest.fixture(scope="module")
def url(engine):
    with serving(engine, replace(LIMITS, answer_tokens=600)) as address:
        yield address


SAID = '<tool_call>{"name": "now"}</tool_call>'


def test_texts_and_calls_by_turns(claude, client, monkeypatch):
    """By the protocols that tell an answer block by block: whole, by its events, and by the last of them."""
    asked = {"model": "tiny", "extra_body": {"temperature": 0}}
    tokens = len(dictate(monkeypatch, parts("llama")[1], f"I look. {SAID} {SAID} and then\n{SAID}  "))
    want = ["I look.", "now", "now", " and then", "now"]
    responses = partial(client.responses.create, **asked, input="a", tools=[{"type": "function", "name": "now"}])
    whole, events = (responses(stream=stream, max_output_tokens=tokens) for stream in (False, True))
    seen = list(events)
    done = [event.item for event in seen if event.type == "response.output_item.done"]
    for items in (whole.output, done, seen[-1].response.output):
        assert [item.name if item.type == "function_call" else item.content[0].text for item in items] == want
    assert "".join(event.delta for event in seen if event.type.endswith("text.delta")) == "I look. and then"
    asked |= {"messages": user("a"), "tools": [{"name": "now", "input_schema": {"type": "object"}}]}
    with claude.messages.stream(**asked, max_tokens=tokens) as stream:
        streamed = stream.get_final_message()
    for message in (claude.messages.create(**asked, max_tokens=tokens), streamed):
        assert [block.name if block.type == "tool_use" else block.text for block in message.content] == want


@pytest.mark.parametrize("value", [r'"\ud83d"', "NaN"])
def test_arguments_that_json_cannot_say(claude, client, monkeypatch, value):
    """They arrive as they were written, or as none where they are an object; and the conversation goes on."""
    said = f'<tool_call>{{"name": "now", "arguments": {{"at": {value}}}}}</tool_call>'
    asked = {"model": "tiny", "messages": user("a"), "max_tokens": len(dictate(monkeypatch, parts("llama")[1], said))}
    tool = {"name": "now", "input_schema": {"type": "object"}}
    assert claude.messages.create(**asked, tools=[tool]).content[0].input == {}
    call = {"id": "1", "type": "function", "function": {"name": "now", "arguments": f'{{"at": {value}}}'}}
    (made,) = client.chat.completions.create(**asked, tools=TOOLS).choices[0].message.tool_calls
    assert made.function.arguments == call["function"]["arguments"]
    history = [
        *user("a"),
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "3"},
    ]
    assert client.chat.completions.create(**asked | {"messages": history}, tools=TOOLS).choices


def test_an_answer_ends_with_its_first_call_where_calls_are_not_parallel(url, client, monkeypatch):
    first = len(parts("llama")[1](SAID, add_special_tokens=False).input_ids)
    whole = len(dictate(monkeypatch, parts("llama")[1], f"{SAID} {SAID} a"))
    asked = {"model": "tiny", "messages": user("When?"), "tools": TOOLS, "temperature": 0, "max_tokens": whole}
    for fields, calls, tokens in (({}, 2, whole), ({"parallel_tool_calls": False}, 1, first)):
        answer = client.chat.completions.create(**asked, **fields)
        (made,) = answer.choices
        assert len(made.message.tool_calls) == calls and answer.usage.completion_tokens == tokens
        assert made.finish_reason == "tool_calls" and (made.message.content or "").strip() == "a" * (calls - 1)
        events = [one.choices[0] for one in client.chat.completions.create(**asked, **fields, stream=True)]
        assert sum(bool(part.id) for event in events for part in event.delta.tool_calls or []) == calls
    body = asked | {"tools": [{"name": "now", "input_schema": {"type": "object"}}]}
    body["tool_choice"] = {"type": "auto", "disable_parallel_tool_use": True}
    answer = httpx.post(f"{url}/v1/messages", json=body, headers={"x-api-key": KEYS[0]}, timeout=300).json()
    assert [block["type"] for block in answer["content"]] == ["tool_use"] and answer["stop_reason"] == "tool_use"


@pytest.mark.parametrize(("form", "special"), [("xml", True), ("pairs", False), ("gemma", True)])
def test_calls_whose_marks_are_tokens_of_their_own(url, engine, client, monkeypatch, form, special):
    mark, call, empty, *_ = OWN[form]
    tokenizer = deepcopy(engine.tokenizer)
    words = ["<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<|tool_call>", "<tool_call|>", '<|"|>']
    added = [AddedToken(word, special=special, normalized=False) for word in words]
    tokenizer.add_tokens(added, special_tokens=special)
    declared = f"{{# tools {'' if form == 'gemma' else '<tool_call>'} {mark} #}}"
    tokenizer.chat_template = declared + tokenizer.chat_template
    vocabulary, eos = engine.vocabulary, tokenizer.eos_token_id
    pieces = tokenizer(f"I look. {call}{empty}", add_special_tokens=False).input_ids
    ids = [*pieces[:8], eos, *pieces[8:]] if special else pieces
    monkeypatch.setattr(engine, "tokenizer", tokenizer)
    monkeypatch.setattr(AnswerStream, "_take", spoken(AnswerStream._take, ids))
    tool = {"type": "function", "function": {"name": "weather", "parameters": TYPED}}
    asked = {"model": "tiny", "messages": user("How?"), "tools": [tool, TOOLS[1]], "temperature": 0}
    asked |= {"max_tokens": len(ids), "logit_bias": {str(eos): -100}}
    whole = client.chat.completions.create(**asked).choices[0]
    assert whole.finish_reason == "tool_calls" and whole.message.content == "I look."
    made = [(one.function.name, json.loads(one.function.arguments)) for one in whole.message.tool_calls]
    assert made == [("weather", TYPES), ("now", {})] and vocabulary == engine.vocabulary
    events = [event.choices[0] for event in client.chat.completions.create(**asked, stream=True)]
    assert "".join(event.delta.content or "" for event in events).strip() == "I look."
    parts = [part for event in events for part in event.delta.tool_calls or []]
    assert [part.function.name for part in parts if part.function.name] == ["weather", "now"] and len(parts) > 15
    assert json.loads("".join(part.function.arguments for part in parts if part.index == 0)) == TYPES


def spoken(take, ids: list[int]):
    """What an answer takes, as though its tokens were these."""
    return lambda answer, tokens: take(answer, ids[: len(tokens)])


CONVERSATION = [
    {"role": "system", "content": "Be brief."}, *user("How deep?"),
    {"role": "assistant", "content": None, "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "depth", "arguments": '{"name": "north", "tide": true}'}}
    ]},
    {"role": "tool", "tool_call_id": "c1", "content": "7 m"},
]  # fmt: skip


def test_a_conversation_has_a_bound():
    with pytest.raises(ValueError, match="at most 16384 items"):
        ChatBody.model_validate({"messages": user("a") * 16385})


def test_another_template_is_told_in_words():
    body = ChatBody.model_validate({"messages": CONVERSATION, "tools": TOOLS})
    messages, tools = body.conversation(real_tokenizer("smollm2"))
    assert tools == [] and [message.role for message in messages] == ["system", "user", "assistant", "user"]
    assert messages[0].content.startswith("Be brief.\n\n") and '"How deep a harbour is"' in messages[0].content
    assert read(reader("tags", ["depth"]), messages[2].content)[1][0].name == "depth"
    plain = ChatBody.model_validate({"messages": user("a")}).messages
    assert rewritten(plain, []) == plain
    none = ChatBody.model_validate({"messages": user("a"), "tools": TOOLS, "tool_choice": "none"})
    assert none.conversation(real_tokenizer("smollm2")) == (plain, [])


@pytest.mark.parametrize("tool", [
    {"type": "function", "function": {"name": "f", "parameters": {"a": 1}}},
    {"type": "function", "name": "f", "parameters": {"a": 1}}, {"name": "f", "input_schema": {"a": 1}, "type": None},
    {"type": "custom", "name": "f", "description": None, "input_schema": {"a": 1}},
])  # fmt: skip
def test_tools_as_every_protocol_has_them(tool):
    (made,) = ChatBody.model_validate({"messages": user("a"), "tools": [tool]}).tools
    function = {"name": "f", "description": "", "parameters": {"a": 1}}
    assert made.model_dump() == {"type": "function", "function": function}
    assert ChatBody.model_validate({"messages": user("a"), "tools": [{**tool, "type": "bash_20250124"}]}).tools == []


def allowed_tools(mode, *names):
    """The choice among some of the tools, as chat completions have it."""
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_some_tools_are_allowed(mode):
    other = {"type": "function", "function": {"name": "other"}}
    response = {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": "depth"}]}
    for choice in (allowed_tools(mode, "depth"), response):
        body = ChatBody.model_validate({"messages": user("a"), "tools": [other, *TOOLS], "tool_choice": choice})
        assert [tool.function.name for tool in body.tools] == ["depth"]
        assert body.called == ["depth"] * (mode == "required")


# ---- by a grammar --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "depth"}}])
def test_a_call_that_must_be(client, choice):
    fields = dict(model="tiny", messages=user("How deep?"), tools=TOOLS[:1], tool_choice=choice, max_tokens=200)
    with client.chat.completions.stream(**fields) as events:
        streamed = events.get_final_completion()
    for answer in (client.chat.completions.create(**fields), streamed):
        (made,) = answer.choices
        (call,) = made.message.tool_calls
        assert not (made.message.content or "").strip() and made.finish_reason == "tool_calls"
        assert call.function.name == "depth" and call.id and call.type == "function"
        value = json.loads(call.function.arguments)
        assert value["name"] in ("north", "south") and isinstance(value["tide"], bool) and len(value) == 2


@pytest.mark.parametrize("form", ["json_schema", "json_object"])
def test_every_answer_is_valid(client, form):
    """Also as llama.cpp's clients have it."""
    schema = {
        "type": "object", "required": ["n", "word", "row"], "additionalProperties": False, "properties": {
            "n": {"type": "integer", "minimum": 0, "maximum": 99}, "word": {"enum": ["a", "b", None]},
            "row": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2},
        },
    }  # fmt: skip
    inner = {"schema": schema} if form == "json_object" else {"json_schema": {"name": "x", "schema": schema}}
    asked = dict(model="tiny", messages=user("Tell."), response_format={"type": form, **inner}, max_tokens=64)
    for choice in client.chat.completions.create(**asked, temperature=1.0, seed=3, n=4).choices:
        value = json.loads(choice.message.content)
        assert choice.finish_reason == "stop" and list(value) == ["n", "word", "row"] and 0 <= value["n"] <= 99
        assert value["word"] in ("a", "b", None) and {*map(type, value["row"])} == {bool} and len(value["row"]) <= 2
    begun = client.chat.completions.create(**asked | {"response_format": {"type": "json_object"}, "max_tokens": 4})
    assert begun.choices[0].message.content.startswith("{")


@pytest.mark.parametrize(("first", "reason"), [("{", "stop"), ("<", "tool_calls")])
def test_an_answer_of_a_schema_or_a_call(client, first, reason):
    """With tools that need not be called, whichever the model begins with."""
    tokenizer = parts("llama")[1]
    (begun,) = tokenizer(first, add_special_tokens=False).input_ids
    schema = TOOLS[0]["function"]["parameters"] | {"properties": {"deep": {"type": "boolean"}}, "required": ["deep"]}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    answer = client.chat.completions.create(
        model="tiny", messages=user("How deep?"), tools=TOOLS[:1], response_format=wanted, max_tokens=200, logit_bias={begun: 50}
    ).choices[0]  # fmt: skip
    assert answer.finish_reason == reason
    if reason == "stop":
        assert json.loads(answer.message.content).keys() == {"deep"} and answer.message.tool_calls is None
    else:
        (call,) = answer.message.tool_calls
        assert answer.message.content is None and json.loads(call.function.arguments).keys() == {"name", "tide"}


@pytest.mark.parametrize("kind", ["number", "integer", "string"])
def test_numbers_end(client, kind):
    """Of a model that says nothing but digits: a text may have them all."""
    tokenizer = parts("llama")[1]
    (seven,) = tokenizer("7", add_special_tokens=False).input_ids
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": kind}}}
    answer = client.chat.completions.create(
        model="tiny", messages=user("Tell."), response_format=wanted, max_tokens=180, temperature=0, logit_bias={seven: 100}
    ).choices[0]  # fmt: skip
    if kind == "string":
        assert answer.finish_reason == "length" and answer.message.content.count("7") > 100
    else:
        assert answer.finish_reason == "stop" and 40 <= len(str(answer.message.content)) <= 130
        json.loads(answer.message.content)
