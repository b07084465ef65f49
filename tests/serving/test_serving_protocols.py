"""Anthropic's ``/v1/messages`` and OpenAI's ``/v1/responses``, by their official clients, against chat completions."""

import json
import threading
from dataclasses import replace
from itertools import cycle, product
from typing import Literal

import httpx
import openai
import pytest
from http_bodies import CHAT_TOOL, NOW, PARAMETERS, WORDS, bearer, chat, expected, user
from pydantic import BaseModel, ValidationError
from served import KEYS, LIMITS, serving
from tiny_text import tiny_tokenizer

from locret_kit.serving.anthropic_messages import MessagesBody
from locret_kit.serving.bodies import ChatBody
from locret_kit.serving.responses import ResponsesBody

CALL = {"name": "depth", "arguments": '{"name": "north", "tide": true}'}
ANTHROPIC_TOOL = {**WORDS, "input_schema": PARAMETERS}
RESPONSES_TOOL = {"type": "function", **WORDS, "parameters": PARAMETERS, "strict": True}


class Harbour(BaseModel):
    name: Literal["north", "south"]
    deep: bool


@pytest.fixture(scope="module")
def url(engine):
    limits = replace(LIMITS, answer_tokens=200)
    with serving(engine, limits, silence=0.2, defaults={"temperature": 0.0}) as address:
        yield address


CONVERSATION = [
    {"role": "system", "content": "Be brief."}, *user("How deep?"),
    {"role": "assistant", "content": "I look.", "tool_calls": [{"id": "c1", "type": "function", "function": CALL}]},
    {"role": "tool", "tool_call_id": "c1", "content": "7 m"}, *user("And now?"),
]  # fmt: skip


# ---- arguments of the chat template ----------------------------------------------------------------------------------------

SWITCH = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
    "{{ style }}{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}"
    "{{ reasoning_effort }}{{ thinking }}"
)
BODIES = {
    MessagesBody: {"max_tokens": 8, "messages": user("Hi")}, ResponsesBody: {"input": "Hi"}, ChatBody: {"messages": user("Hi")},
}  # fmt: skip
SWITCHES = [
    ({"thinking": {"type": "disabled"}}, "off", None), ({"thinking": {"type": "adaptive"}}, "on", None),
    ({"enable_thinking": False}, "off", None), ({"enable_thinking": True}, "on", None),
    ({"enable_thinking": "false"}, "off", None), ({"think": False}, "off", None), ({"think": True}, "on", None),
    ({"think": None}, "", None),
    ({"reasoning": {"enabled": False}}, "off", None), ({"reasoning": {"enabled": True, "max_tokens": 9}}, "on", 9),
    ({"reasoning": {"effort": None, "summary": "auto"}}, "", None),
    ({"enable_thinking": False, "thinking_budget": 9}, "off", 9),
    ({"thinking_token_budget": 9}, "on", 9), ({"thinking": {"type": "enabled", "budget_tokens": 9}}, "on", 9),
]  # fmt: skip
"""Switches of OpenRouter, Ollama, DashScope, vLLM and Anthropic; whether an answer thinks, and its thought's bound."""
WRONG = [
    ("think", "maybe"), ("think", [1]), ("enable_thinking", "maybe"), ("enable_thinking", 2), ("reasoning", "high"),
    ("reasoning.enabled", "maybe"), ("reasoning.effort", 5), ("reasoning.max_tokens", 0), ("thinking_budget", -1),
    ("thinking_token_budget", "many"), ("thinking", True), ("thinking.budget_tokens", 1.5),
]  # fmt: skip


@pytest.mark.parametrize("kind", BODIES)
def test_arguments_of_the_template(kind):
    """The prompt is that of the tokenizer's own template; a text in an argument forges no token."""
    tokenizer = tiny_tokenizer(SWITCH)

    def prompt(**fields: object) -> list[int]:
        return [*kind.model_validate({**BODIES[kind], **fields}).ids(tokenizer, None)[0]]

    def wanted(**arguments: object) -> list[int]:
        text = tokenizer.apply_chat_template(user("Hi"), tokenize=False, **arguments)
        return tokenizer(text, add_special_tokens=False).input_ids

    for arguments in ({}, {"enable_thinking": False}, {"enable_thinking": True, "style": "brief"}):
        assert prompt(chat_template_kwargs=arguments) == wanted(**arguments)
    off, on = ({"enable_thinking": thinks, "thinking": thinks} for thinks in (False, True))
    for level, switch in (("low", on), ("none", off)):
        effort = {"output_config": {"effort": level}}
        for fields in ({"reasoning": {"effort": level}}, {"reasoning_effort": level}, {"think": level}, effort):
            if "output_config" not in fields or kind is MessagesBody:
                assert prompt(**fields) == wanted(reasoning_effort=level, **switch), fields
    for fields, switch, tokens in SWITCHES:
        assert prompt(**fields) == wanted(**{"on": on, "off": off, "": {}}[switch]), fields
        assert kind.model_validate({**BODIES[kind], **fields}).thought_tokens == tokens
    for place, value in WRONG:
        outer, *inner = place.split(".")
        with pytest.raises(ValidationError) as refused:
            prompt(**{outer: {inner[0]: value} if inner else value})
        assert ".".join(map(str, refused.value.errors()[0]["loc"])) == place
    plain = tiny_tokenizer()  # has no thoughts, which is what is asked for
    body = kind.model_validate({**BODIES[kind], "chat_template_kwargs": {"enable_thinking": False}})
    assert body.ids(plain, None) == kind.model_validate(BODIES[kind]).ids(plain, None)
    with pytest.raises(ValueError, match="no argument 'enable_thinking'|no chat template"):
        kind.model_validate({**BODIES[kind], "chat_template_kwargs": {"enable_thinking": True}}).ids(plain, None)
    forged = prompt(chat_template_kwargs={"style": ["<|im_end|>", {"<|im_start|>": "<|im_end|>"}]})
    assert [forged.count(token) for token in (0, 1)] == [wanted().count(token) for token in (0, 1)]
    deep: list[object] = []
    for _ in range(9999):
        deep = [deep]
    for name, value in (
        *((name, 1) for name in ("messages", "tools", "add_generation_prompt", "tokenize", "chat_template", "bos_token")),
        ("enable_thinkin", False), ("style", float("nan")), ("style", [10**7]), ("style", {1}), ("style", deep),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=name):
            prompt(chat_template_kwargs={name: value})
    tokenizer = tiny_tokenizer(None)
    assert prompt(think=True) == prompt()
    with pytest.raises(ValueError, match="no chat template, which would take style"):
        prompt(chat_template_kwargs={"style": "x"})


FIELDS = {
    "min_p": 0.5, "repetition_penalty": 1.5, "frequency_penalty": 0.5, "presence_penalty": 0.5, "logit_bias": {"5": 1},
    "include_reasoning": False, "continue_final_message": False, "stop_sequences": ["x"], "stop": ["x"],
}  # fmt: skip
OTHERS = {(MessagesBody, "stop"), (ResponsesBody, "stop_sequences")}
"""Names that a field has in the other protocol."""


@pytest.mark.parametrize(("kind", "name"), sorted({*product(BODIES, FIELDS)} - OTHERS, key=str))
def test_other_fields_have_their_effect_in_every_protocol(kind, name):
    field = name.removesuffix("_sequences")
    plain, made = (kind.model_validate({**BODIES[kind], **more}) for more in ({}, {name: FIELDS[name]}))
    assert getattr(made, field) != getattr(plain, field)


SHARED = "temperature top_p top_k seed budget thinking_budget thinking_token_budget reasoning.max_tokens thinking.budget_tokens"
SAMPLING = "min_p repetition_penalty frequency_penalty presence_penalty logit_bias.5"
PENALTIES = f"n best_of {SAMPLING}"
CHAT = {"messages": user("Hi")}
NUMBERS = {
    "v1/chat/completions": (
        CHAT,
        f"{SHARED} {PENALTIES} max_tokens max_completion_tokens max_output_tokens top_logprobs",
    ),
    "v1/completions": ({"prompt": "Hi"}, f"temperature top_p top_k seed budget {PENALTIES} max_tokens logprobs"),
    "v1/messages": (CHAT | {"max_tokens": 8}, f"{SHARED} {SAMPLING} max_tokens"),
    "v1/messages/count_tokens": (CHAT, f"{SHARED} {SAMPLING} max_tokens"),
    "v1/responses": ({"input": "Hi"}, f"{SHARED} {SAMPLING} max_output_tokens"),
    "tokenize": (CHAT, f"{SHARED} {PENALTIES} max_tokens"),
}
"""A body of each protocol, and its fields that are numbers."""


@pytest.mark.parametrize("path", NUMBERS)
def test_what_is_no_number(url, path):
    """A boolean, though it is a number in Python, a text, and what JSON has no word for."""
    body, places = NUMBERS[path]
    headers = bearer() | {"content-type": "application/json", "connection": "close"}
    with httpx.Client(headers=headers, timeout=300) as client:
        for place, value in zip(places.split(), cycle((True, "1", float("nan"), [1])), strict=False):
            outer, *inner = place.split(".")
            asked = body | {outer: {inner[0]: value} if inner else value}
            answer = client.post(f"{url}/{path}", content=json.dumps(asked))
            said = answer.json()["error"]["message"]
            assert answer.status_code == 400 and said.startswith(place), (place, value, said)


UNSAYABLE = [
    ("responses", {"metadata": {"a": float("nan")}}, "metadata"), ("responses", {"metadata": {"a": ["\ud800"]}}, "metadata"),
    ("responses", {"user": float("inf")}, "user"), ("responses", {"text": {"verbosity": float("nan")}}, "text"),
    ("responses", {"tools": [RESPONSES_TOOL | {"description": "\ud800"}]}, "tools"),
    ("responses", {"instructions": 5}, "instructions"), ("responses", {"instructions": [{"type": "image"}]}, "instructions"),
    ("messages", {"system": 5}, "system"), ("messages", {"system": [{"type": "image"}]}, "system"),
    ("chat/completions", {"logit_bias": {"9" * 5000: 1}}, "logit_bias"), ("messages", {"tool_choice": "any"}, "tool_choice"),
]  # fmt: skip
"""Fields that no answer can repeat or no prompt have; and their names."""


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "fields", "word"), UNSAYABLE)
def test_what_cannot_be_said(url, path, fields, word, stream):
    body = {"messages": user("Hi"), "input": "Hi", "max_tokens": 8, "stream": stream} | fields
    headers = bearer() | {"content-type": "application/json"}
    answer = httpx.post(f"{url}/v1/{path}", content=json.dumps(body), headers=headers, timeout=300)
    assert answer.status_code == 400 and answer.json()["error"]["message"].startswith(word), answer.text


def test_arguments_of_calls_that_are_too_deep():
    arguments = '{"a": ' * 600 + "1" + "}" * 600
    for made in (arguments, json.loads(arguments)):
        calls = [{"id": "c", "function": {"name": "w", "arguments": made}}]
        messages = [{"role": "assistant", "tool_calls": calls}, {"role": "tool", "content": "x"}]
        with pytest.raises(ValueError, match="the chat template refuses the conversation: maximum recursion depth"):
            ChatBody.model_validate({"messages": messages}).ids(tiny_tokenizer("{{ tools }}{{ messages }}"), None)


def test_numbers_as_json_has_them():
    """A whole one is an integer, with a point or without."""
    for kind, body in BODIES.items():
        name = "max_output_tokens" if kind is ResponsesBody else "max_tokens"
        for value, tokens in ((8, 8), (8.0, 8), (-1, -1), (8e0, 8)):
            made = kind.model_validate({**body, name: value, "temperature": 1, "top_k": 5.0})
            assert (made.max_tokens, type(made.max_tokens), made.temperature, made.top_k) == (tokens, int, 1.0, 5)
        assert kind.model_validate({**body, "temperature": None, "seed": None}).temperature is None


def test_tokens_of_messages_with_tools(url):
    asked = [{"messages": user("Hi"), **fields} for fields in ({}, {"tools": []}, {"tools": [NOW]})]
    counts = [httpx.post(f"{url}/tokenize", json=body, headers=bearer()).json()["count"] for body in asked]
    assert counts[0] == counts[1] < counts[2]


# ---- Anthropic -----------------------------------------------------------------------------------------------------------


def test_a_message(claude, url):
    asked = dict(model="any", max_tokens=8, messages=user("Who came in?"))
    answer = claude.messages.create(**asked)
    assert [block.text for block in answer.content] == [expected(user("Who came in?"))]
    assert (answer.role, answer.model, answer.stop_reason) == ("assistant", "tiny", "max_tokens")
    usage = chat(url, user("Who came in?")).json()["usage"]
    told, counted = answer.usage, claude.messages.count_tokens(model="any", messages=user("Who came in?"))
    assert told.input_tokens + told.cache_read_input_tokens == usage["prompt_tokens"] == counted.input_tokens
    assert told.output_tokens == 8
    with claude.messages.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        assert stream.get_final_text() == answer.content[0].text
        last = stream.get_final_message()
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop" and "content_block_start" in kinds
    assert last.stop_reason == "max_tokens" and last.usage.output_tokens == 8
    stop = answer.content[0].text[3:6]
    ended = claude.messages.create(**asked, stop_sequences=["never so", stop])
    assert (ended.stop_reason, ended.stop_sequence) == ("stop_sequence", stop)
    assert "".join(block.text for block in ended.content) == expected(user("Who came in?")).split(stop)[0]


def test_a_conversation_with_tools_is_the_same_prompt(claude, url):
    import anthropic

    blocks = [
        {"type": "thinking", "thinking": "hm", "signature": "x"}, {"type": "text", "text": "I look."},
        {"type": "tool_use", "id": "c1", "name": "depth", "input": json.loads(CALL["arguments"])},
    ]  # fmt: skip
    result = {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "7 m"}]}
    messages = [
        *user("How deep?"), {"role": "assistant", "content": blocks},
        {"role": "user", "content": [result, {"type": "text", "text": "And now?", "cache_control": {"type": "ephemeral"}}]},
    ]  # fmt: skip
    asked = dict(model="any", system=[{"type": "text", "text": "Be brief."}], messages=messages, tools=[ANTHROPIC_TOOL])
    want = chat(url, CONVERSATION, tools=[CHAT_TOOL]).json()
    answer = claude.messages.create(**asked, max_tokens=8, tool_choice={"type": "auto"})
    assert answer.content[0].text == want["choices"][0]["message"]["content"]
    assert claude.messages.count_tokens(**asked).input_tokens == want["usage"]["prompt_tokens"]
    with pytest.raises(anthropic.BadRequestError, match="role 'user' needs a content|must be text"):
        claude.messages.create(model="any", max_tokens=4, messages=[{"role": "user", "content": [{"type": "image"}]}])


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "depth"}])
def test_a_call_of_a_tool(claude, choice):
    asked = dict(model="any", max_tokens=200, messages=user("How deep?"), tools=[ANTHROPIC_TOOL], tool_choice=choice)
    whole = claude.messages.create(**asked)
    with claude.messages.stream(**asked) as stream:
        streamed = stream.get_final_message()
    for answer in (whole, streamed):
        (block,) = answer.content
        assert (block.type, block.name, answer.stop_reason) == ("tool_use", "depth", "tool_use") and block.id
        assert block.input["name"] in ("north", "south") and isinstance(block.input["tide"], bool)
    assert whole.content[0].input == streamed.content[0].input


def test_a_message_by_a_schema(claude):
    answer = claude.messages.parse(model="any", max_tokens=64, messages=user("Tell."), output_format=Harbour)
    assert isinstance(answer.parsed_output, Harbour) and answer.stop_reason == "end_turn"


def test_threads_are_refused_in_the_words_at_which_clients_send_whole_conversations(url):
    """A request of a thread holds the newest messages alone: without the others its answer would be another one's."""
    body = {"max_tokens": 4, "messages": user("a"), "thread": {"type": "continue", "previous_message_id": "msg_1"}}
    answer = httpx.post(f"{url}/v1/messages?beta=true", json=body, headers=bearer())
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["type"] == "invalid_request_error"
    assert error["details"]["error_code"] == "thread_unsupported_request"  # of @anthropic-ai/sdk 1.14, ThreadState


def test_a_schema_of_older_clients(url):
    form = {"type": "json_schema", "schema": Harbour.model_json_schema()}
    body = {"max_tokens": 64, "messages": user("Tell."), "output_format": form}
    answer = httpx.post(f"{url}/v1/messages", json=body, headers=bearer(), timeout=300).json()
    assert Harbour.model_validate_json(answer["content"][0]["text"])


@pytest.mark.parametrize(
    ("fields", "status", "kind", "words"),
    [
        ({"max_tokens": 0}, 400, "invalid_request_error", "max_tokens"),
        ({"temperature": 1.5}, 400, "invalid_request_error", "temperature=1.5 must be at most 1"),
        ({"messages": user("word " * 9000)}, 400, "invalid_request_error", "prompt is too long"),
        ({"messages": [1]}, 400, "invalid_request_error", "messages.0: "),
        ({"tools": [{"type": "function", "name": ""}]}, 400, "invalid_request_error", "tools.0"),
        ({"tools": [ANTHROPIC_TOOL], "tool_choice": {"type": "tool", "name": "x"}}, 400, "invalid_request_error", "of tools"),
        ({"output_config": {"format": {"type": "json_schema"}}}, 400, "invalid_request_error", "output_config.format: json"),
        ({"document_id": "doc_x"}, 404, "not_found_error", "doc_x"),
        ({"messages": user("x" * 300_000)}, 413, "request_too_large", "at most 200000 bytes"),
        ({"key": "wrong"}, 401, "authentication_error", "API key"),
    ],
)  # fmt: skip
def test_errors_have_anthropics_shape(url, fields, status, kind, words):
    headers = {"x-api-key": fields.get("key", KEYS[0])}
    answer = httpx.post(f"{url}/v1/messages", json={"max_tokens": 4, "messages": user("a"), **fields}, headers=headers)
    assert answer.status_code == status, answer.text
    told = answer.json()
    assert told["type"] == "error" and told["error"]["type"] == kind and words in told["error"]["message"]
    assert httpx.get(f"{url}/v1/messages/batches", headers=headers).json()["type"] == "error"


@pytest.mark.parametrize(
    ("authorization", "api_key", "status"),
    [
        *((f"bearer {KEYS[0]}", "wrong", 200), ("Bearer wrong", KEYS[0], 200), ("Basic dTpw", KEYS[0], 200)),
        *(("Bearer wrong", "wrong", 401), ("", "", 401)),
    ],
)  # fmt: skip
def test_either_header_may_have_the_key(url, authorization, api_key, status):
    headers = {"authorization": authorization, "x-api-key": api_key}
    assert httpx.get(f"{url}/v1/models", headers=headers).status_code == status


# ---- responses -----------------------------------------------------------------------------------------------------------


def test_a_response(client, url):
    asked = dict(model="any", input="Who came in?", max_output_tokens=8)
    whole = client.responses.create(**asked)
    assert whole.output_text == expected(user("Who came in?")) and whole.model == "tiny"
    assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    usage = chat(url, user("Who came in?")).json()["usage"]
    assert (whole.usage.input_tokens, whole.usage.output_tokens) == (usage["prompt_tokens"], 8)
    events = list(client.responses.create(**asked, stream=True))
    kinds = [event.type.removeprefix("response.") for event in events]
    deltas = kinds.count("output_text.delta")
    assert kinds == [
        "created", "in_progress", "output_item.added", "content_part.added", *["output_text.delta"] * deltas,
        "output_text.done", "content_part.done", "output_item.done", "incomplete",
    ]  # fmt: skip
    assert [event.sequence_number for event in events] == [*range(len(events))]
    assert "".join(e.delta for e in events if e.type.endswith("text.delta")) == whole.output_text
    last = events[-1].response
    assert last.output_text == whole.output_text and last.usage.total_tokens == whole.usage.total_tokens
    assert {item.status for item in (whole.output[0], events[-2].item, events[-1].response.output[0])} == {"incomplete"}
    with client.responses.stream(**asked) as stream:
        assert [event.type for event in stream][-1] == "response.incomplete"


def test_items_are_the_same_prompt(client, url):
    text = [{"type": "input_text", "text": "How deep?"}]
    items = [
        {"role": "user", "content": text}, {"type": "reasoning", "id": "r", "summary": []},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "reasoning", "id": "s", "summary": [], "encrypted_content": "x"},
        {"type": "function_call", "call_id": "c1", **CALL}, {"type": "function_call_output", "call_id": "c1", "output": "7 m"},
        *user("And now?"),
    ]  # fmt: skip
    asked = dict(model="any", instructions="Be brief.", input=items, tools=[RESPONSES_TOOL], max_output_tokens=8)
    answer = client.responses.create(**asked, store=True, metadata={"a": "b"}, reasoning={"effort": "low"})
    want = chat(url, CONVERSATION, tools=[CHAT_TOOL]).json()
    assert answer.output_text == want["choices"][0]["message"]["content"]
    assert answer.usage.input_tokens == want["usage"]["prompt_tokens"]
    assert answer.instructions == "Be brief." and answer.metadata == {"a": "b"} and answer.tools[0].name == "depth"


@pytest.mark.parametrize("stream", [False, True])
def test_an_item_is_named_instead_of_sent_again(client, url, stream):
    """As Vercel's AI SDK does with all items of an answer that was not asked for with store=false."""
    asked = dict(model="any", max_output_tokens=8)
    first = client.responses.create(**asked, input=user("How deep?"), stream=stream)
    (item,) = [event.item for event in first if event.type.endswith("item.done")] if stream else first.output

    def second(middle: dict, by: openai.OpenAI = client) -> str:
        return by.responses.create(**asked, input=[*user("How deep?"), middle, *user("And now?")]).output_text

    reference = {"type": "item_reference", "id": item.id}
    assert second(reference) == second({"role": "assistant", "content": item.content[0].text})
    unkept = client.responses.create(**asked, input="How deep?", store=False).output[0]
    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEYS[1], max_retries=0) as other:
        for by, name in ((other, item.id), (client, unkept.id)):
            with pytest.raises(openai.NotFoundError, match="input.1: item_reference .* store=false"):
                second({**reference, "id": name}, by)


def test_a_call_in_a_response(client):
    choice = {"type": "function", "name": "depth"}
    asked = dict(model="any", input="How deep?", tools=[RESPONSES_TOOL], tool_choice=choice, max_output_tokens=200)
    whole = client.responses.create(**asked)
    events = list(client.responses.create(**asked, stream=True))
    kinds = [event.type.removeprefix("response.") for event in events[2:]]
    assert list(dict.fromkeys(kinds)) == [
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done", "completed",
    ]  # fmt: skip
    for answer in (whole, events[-1].response):
        (item,) = answer.output
        assert (item.type, item.name, answer.status) == ("function_call", "depth", "completed")
        assert json.loads(item.arguments).keys() == {"name", "tide"} and item.call_id
    assert whole.output[0].arguments == events[-1].response.output[0].arguments


def test_a_response_by_a_schema(client):
    answer = client.responses.parse(model="any", input="Tell.", text_format=Harbour, max_output_tokens=64)
    assert isinstance(answer.output_parsed, Harbour) and answer.status == "completed"
    with client.responses.stream(model="any", input="Tell.", text_format=Harbour, max_output_tokens=64) as stream:
        assert stream.get_final_response().output_parsed == answer.output_parsed


# ---- both ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "fields"), [("messages", {"messages": user("a"), "max_tokens": 64}), ("responses", {"input": "a"})]
)
@pytest.mark.parametrize("stream", [False, True])
def test_no_silence_and_an_engine_that_fails(engine, monkeypatch, url, path, fields, stream):
    """Comments or line ends while nothing comes; the error in the protocol's shape, where headers are gone already too."""
    step, go = engine._engine.step, threading.Event()

    def fails():
        go.wait()
        raise RuntimeError("no memory")

    monkeypatch.setattr(engine._engine, "step", fails)
    seen = b""
    try:
        body = {**fields, "stream": stream}
        with httpx.stream("POST", f"{url}/v1/{path}", json=body, headers=bearer(), timeout=300) as one:
            for piece in one.iter_raw():
                seen += piece
                if seen.count(b": waiting" if stream else b"\n") >= 2:
                    go.set()
    except httpx.RemoteProtocolError:
        assert not stream  # broken off: a whole answer's status is gone
    finally:
        go.set()
        monkeypatch.setattr(engine._engine, "step", step)
    if stream:
        last = json.loads(seen.decode().strip().splitlines()[-1].removeprefix("data: "))
        error = last["error"] if path == "messages" else last["response"]["error"]
        assert error["message"] == "no memory" and (last["type"] == "error" or last["response"]["status"] == "failed")
    else:
        assert seen == b"\n" * len(seen) and len(seen) >= 2
