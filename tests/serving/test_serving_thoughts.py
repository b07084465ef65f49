"""Thoughts and calls over HTTP, by the clients of three protocols, whole and streamed, and back in the next turn's prompt."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import replace
from functools import partial

import anthropic
import httpx
import openai
import pytest
from families import ARGUMENTS, TEXT, THINKS, THOUGHT, TOOL, XML, XML_CALLS, chatml
from http_bodies import chat, user
from served import KEYS, LIMITS, Dictated, serving

from locret_kit.answers.forms import CALLS, answer_form
from locret_kit.serving import completions
from locret_kit.serving.bodies import ChatBody

TEMPLATES = {
    "written": (chatml(THINKS + XML_CALLS, tools="<function=name>"), f"<think>\n{THOUGHT}\n</think>\n\n{TEXT}\n{XML}"),
    "begun": (chatml(THINKS + XML_CALLS, "<think>\n", "<function=name>"), f"{THOUGHT}\n</think>\n\n{TEXT}\n{XML}"),
}
"""Templates whose model begins a thought, or that begin it themselves; and an answer."""
SCHEMA = TOOL["function"]["parameters"]
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "7 m"}


@pytest.fixture(scope="module")
def url(engine):
    with serving(engine, replace(LIMITS, answer_tokens=600)) as address:
        yield address


@pytest.fixture(params=TEMPLATES)
def dictated(request, engine, monkeypatch):
    """Tokens of the answer that a server with one of the templates says, its tokenizer, and characters of its thought."""
    template, answer = TEMPLATES[request.param]
    tokenizer = deepcopy(engine.tokenizer)
    tokenizer.chat_template = template
    ids, form_of_answer = tokenizer(answer, add_special_tokens=False).input_ids, completions.form_of_answer
    monkeypatch.setattr(engine, "tokenizer", tokenizer)
    monkeypatch.setattr(
        completions, "form_of_answer", lambda *given: (partial(Dictated, ids), form_of_answer(*given)[1])
    )
    return len(ids), tokenizer


def prompt_tokens(tokenizer, messages: list[dict]) -> int:
    """Of the template's own text of a conversation."""
    text = tokenizer.apply_chat_template(messages, tools=[TOOL], tokenize=False, add_generation_prompt=True)
    return len(tokenizer(text, add_special_tokens=False).input_ids)


THOUGHTFUL = {
    "role": "assistant", "content": TEXT, "reasoning_content": THOUGHT,
    "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "depth", "arguments": ARGUMENTS}}],
}  # fmt: skip
TURNS = [*user("How deep?"), THOUGHTFUL, RESULT]


def test_chat_completions(url, dictated):
    tokens, tokenizer = dictated
    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEYS[0], max_retries=0) as client:
        asked = dict(model="tiny", messages=user("How deep?"), tools=[TOOL], max_tokens=tokens, temperature=0)
        answer = client.chat.completions.create(**asked)
        message = answer.choices[0].message
        assert (message.reasoning_content, message.reasoning, message.content) == (THOUGHT, THOUGHT, TEXT)
        (call,) = message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("depth", ARGUMENTS)
        thought = answer.usage.completion_tokens_details.reasoning_tokens
        assert (
            0 < thought - len(tokenizer(THOUGHT, add_special_tokens=False).input_ids) < 30
        )  # the marks are in letters here
        deltas = [chunk.choices[0].delta for chunk in client.chat.completions.create(**asked, stream=True)]
        assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == THOUGHT
        assert "".join(delta.content or "" for delta in deltas).strip() == TEXT
        calls = [part.function for delta in deltas for part in delta.tool_calls or []]
        assert calls[0].name == "depth" and json.loads("".join(part.arguments for part in calls)) == ARGUMENTS
        for name in ("reasoning_content", "reasoning"):
            back = {
                "role": "assistant",
                "content": TEXT,
                name: THOUGHT,
                "tool_calls": [call.model_dump() | {"id": "c1"}],
            }
            third = client.chat.completions.create(**asked | {"messages": [*user("How deep?"), back, RESULT]})
            assert third.usage.prompt_tokens == prompt_tokens(tokenizer, TURNS)


def test_responses(url, dictated):
    tokens, tokenizer = dictated
    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEYS[0], max_retries=0) as client:
        tool = {
            "type": "function",
            "name": "depth",
            "parameters": SCHEMA,
            "description": TOOL["function"]["description"],
        }
        asked = dict(model="tiny", tools=[tool], max_output_tokens=tokens, temperature=0)
        whole = client.responses.create(**asked, input="How deep?")
        events = list(client.responses.create(**asked, input="How deep?", stream=True))
        assert "".join(event.delta for event in events if event.type == "response.reasoning_text.delta") == THOUGHT
        done = [event.item for event in events if event.type == "response.output_item.done"]
        for output in (whole.output, done, events[-1].response.output):
            assert [item.type for item in output] == ["reasoning", "message", "function_call"]
            assert (output[0].content[0].text, output[1].content[0].text) == (THOUGHT, TEXT)
            assert json.loads(output[2].arguments) == ARGUMENTS
        assert whole.usage.output_tokens_details.reasoning_tokens > 0
        result = {"type": "function_call_output", "call_id": whole.output[2].call_id, "output": "7 m"}
        back = [{"role": "user", "content": "How deep?"}, *(item.model_dump() for item in whole.output), result]
        third = client.responses.create(**asked, input=back)
        assert third.usage.input_tokens == prompt_tokens(tokenizer, TURNS)


def test_messages(url, dictated):
    tokens, tokenizer = dictated
    with anthropic.Anthropic(base_url=url, api_key=KEYS[0], max_retries=0) as client:
        tool = {"name": "depth", "input_schema": SCHEMA, "description": TOOL["function"]["description"]}
        asked = dict(model="tiny", tools=[tool], max_tokens=tokens, extra_body={"temperature": 0})
        with client.messages.stream(**asked, messages=user("How deep?")) as stream:
            streamed = stream.get_final_message()
        for message in (client.messages.create(**asked, messages=user("How deep?")), streamed):
            thought, text, call = message.content
            assert (thought.type, thought.thinking, text.text, call.input) == ("thinking", THOUGHT, TEXT, ARGUMENTS)
            assert thought.signature and message.stop_reason == "tool_use"
        result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "7 m"}]}
        blocks = [block.model_dump(exclude_none=True) for block in streamed.content]
        back = [*user("How deep?"), {"role": "assistant", "content": blocks}, result]
        assert client.messages.count_tokens(model="tiny", tools=[tool], messages=back).input_tokens == prompt_tokens(
            tokenizer, TURNS
        )


@pytest.mark.parametrize("fields", [{"reasoning": {"exclude": True}}, {"include_reasoning": False}])
def test_a_thought_that_is_left_out(url, dictated, fields):
    """As OpenRouter's clients and vLLM's ask for it: of the text, of its tokens and of every piece. Usage counts it."""
    tokens, _ = dictated
    asked = dict(model="tiny", messages=user("How deep?"), tools=[TOOL], max_tokens=tokens, temperature=0)
    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEYS[0], max_retries=0) as client:
        create = partial(client.chat.completions.create, **asked)
        told = create(extra_body={"reasoning": {"exclude": None}, "include_reasoning": None})
        assert told.choices[0].message.reasoning == THOUGHT
        answer = create(extra_body=fields, logprobs=True, top_logprobs=1, n=2)
        for choice in answer.choices:
            message = choice.message.model_dump(exclude_none=True)
            assert message["content"] == TEXT and not {"reasoning", "reasoning_content"} & message.keys()
            assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == ARGUMENTS
            said = "".join(one.token for one in choice.logprobs.content)
            assert said.endswith(f"\n\n{TEXT}\n{XML}") and "harbour" not in said
        counts = [one.usage.completion_tokens_details.reasoning_tokens for one in (told, answer)]
        assert counts[1] == 2 * counts[0] > 0 and answer.usage.completion_tokens == 2 * told.usage.completion_tokens
        chunks = list(create(extra_body=fields, stream=True, stream_options={"include_usage": True}))
        deltas = [choice.delta.model_dump(exclude_none=True) for chunk in chunks for choice in chunk.choices]
        assert not any({"reasoning", "reasoning_content"} & delta.keys() for delta in deltas)
        assert "".join(delta.get("content", "") for delta in deltas).strip() == TEXT
        assert chunks[-1].usage.completion_tokens_details.reasoning_tokens == counts[0]
        create = partial(
            client.responses.create, model="tiny", input="How deep?", temperature=0, max_output_tokens=tokens
        )
        if "reasoning" in fields:
            whole = create(extra_body=fields)
            items = [
                one.item for one in create(extra_body=fields, stream=True) if one.type == "response.output_item.done"
            ]
            assert [item.type for item in (*whole.output, *items)] == ["message", "message"]
            assert whole.usage.output_tokens_details.reasoning_tokens == counts[0]
        asks = {"reasoning": {"summary": "auto", "effort": "low"}, "include": ["reasoning.encrypted_content"]}
        assert create(**asks).output[0].content[0].text == THOUGHT
        for field, value in (("reasoning.exclude", "yes"), ("reasoning.exclude", 1), ("include_reasoning", "false")):
            outer, *inner = field.split(".")
            with pytest.raises(openai.BadRequestError, match=f"{field}: "):
                client.chat.completions.create(**asked, extra_body={outer: {inner[0]: value} if inner else value})


def test_a_thought_alone_is_no_beginning_of_the_same_request(url, dictated):
    """Its cache has read the thought, which the prompt lacks."""
    for _ in range(2):
        said = chat(url, user("How deep is it without an answer?"), max_tokens=12).json()
        assert said["choices"][0]["message"]["reasoning_content"] and not said["choices"][0]["message"]["content"]
        assert said["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_stop_texts_end_the_text_alone(url, dictated):
    """Not the thought and not a call's arguments, which have them too."""
    tokens, _ = dictated
    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEYS[0], max_retries=0) as client:
        asked = dict(model="tiny", messages=user("How deep?"), tools=[TOOL], max_tokens=tokens, temperature=0)
        (choice,) = client.chat.completions.create(**asked, stop=["harbour", "bay", "2 <"]).choices
        said = choice.message.reasoning, choice.message.content, choice.message.tool_calls, choice.finish_reason
        assert said == (THOUGHT, TEXT.partition("2 <")[0], None, "stop")
        (choice,) = client.chat.completions.create(**asked, stop=["harbour", "bay"]).choices
        assert (choice.message.content, choice.finish_reason) == (TEXT, "tool_calls")
        assert json.loads(choice.message.tool_calls[0].function.arguments) == ARGUMENTS
        deltas = [one.choices[0].delta for one in client.chat.completions.create(**asked, stop="2 <", stream=True)]
        assert "".join(delta.content or "" for delta in deltas) == TEXT.partition("2 <")[0]
    with anthropic.Anthropic(base_url=url, api_key=KEYS[0], max_retries=0) as client:
        made = client.messages.create(
            model="tiny", max_tokens=tokens, messages=user("How deep?"), stop_sequences=["harbour", "look"],
            extra_body={"temperature": 0},
        )  # fmt: skip
        assert [block.type for block in made.content] == ["thinking", "text"] and made.content[0].thinking == THOUGHT
        assert (made.stop_reason, made.stop_sequence, made.content[1].text.strip()) == ("stop_sequence", "look", "I")


PLACED = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}<think>\n{{ (m.reasoning_content or '').strip('\n') }}"
    "\n</think>\n\n{% endif %}{{ m.content }}<end>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
BARE = PLACED.replace("<think>\n{{ (m.reasoning_content or '').strip('\n') }}\n</think>\n\n", "{# <think></think> #}")


@pytest.mark.parametrize(("template", "last", "end", "within"), [
    (PLACED, {"content": None, "reasoning_content": "Two and"}, "<think>\nTwo and", True),
    (PLACED, {"content": "", "reasoning": "Two\n\nand "}, "<think>\nTwo\n\nand ", True),
    (PLACED, {"content": "<think>\nTwo and"}, "<think>\nTwo and", True),
    (PLACED, {"content": "<think>Two</think>Five"}, "<think>\nTwo\n</think>\n\nFive", False),
    (PLACED, {"content": "Five", "reasoning_content": "Two"}, "<think>\nTwo\n</think>\n\nFive", False),
    (BARE, {"content": "<think>\nTwo and"}, "<think>\nTwo and", True),
    (BARE, {"content": "<think>\nTwo</think>\nFive"}, "<think>\nTwo</think>\nFive", False),
])  # fmt: skip
def test_a_beginning_with_a_thought_goes_on_in_the_same_turn(engine, template, last, end, within):
    tokenizer = deepcopy(engine.tokenizer)
    tokenizer.chat_template = template
    body = ChatBody.model_validate({"messages": [*user("a"), {"role": "assistant", **last}]})
    (ids,) = body.ids(tokenizer, None)
    assert tokenizer.decode(list(ids)) == f"<user>a<end><assistant>{end}"
    assert completions.begins_in_thought(tokenizer, answer_form(tokenizer), ids, body) == within


def test_a_thought_that_a_template_has_no_place_for(url):
    """It is left out of an answer; one without an answer at the end is refused."""
    asked = {"model": "tiny", "max_tokens": 1}
    headers = {"authorization": f"Bearer {KEYS[0]}"}
    post = partial(httpx.post, f"{url}/v1/chat/completions", headers=headers, timeout=300)
    turns = [*user("a"), {"role": "assistant", "content": "b"}, *user("c")]
    plain = post(json=asked | {"messages": turns}).json()
    turns[1] |= {"reasoning_content": "hm"}
    assert post(json=asked | {"messages": turns}).json()["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]
    turns[1] |= {"content": None}
    refused = post(json=asked | {"messages": turns[:2]})
    said = refused.json()["error"]["message"]
    assert refused.status_code == 400 and "messages.1 (assistant): the chat template has no place" in said


def test_a_template_for_tools_is_used_where_there_are_some(engine):
    tokenizer = deepcopy(engine.tokenizer)
    tokenizer.chat_template = {
        "default": "{{ messages[0].content }}", "tool_use": "{{ tools[0].function.name }}<function={{ messages[0].content }}",
    }  # fmt: skip
    for tools, text, form in (([TOOL], "depth<function=a", "xml"), ([], "a", "tags")):
        body = ChatBody.model_validate({"messages": user("a"), "tools": tools})
        messages, shown = body.rendering(tokenizer)
        assert shown(messages)[1] == text and answer_form(tokenizer, tools=bool(tools)).calls == CALLS[form]


def test_a_call_that_the_bound_cuts(url, engine, monkeypatch):
    """Its stream has what there is of it; a whole answer leaves it out."""
    tokenizer = engine.tokenizer
    answer = 'Yes.<tool_call>{"name": "depth", "arguments": {"place": "nor'
    ids, form_of_answer = tokenizer(answer, add_special_tokens=False).input_ids, completions.form_of_answer
    monkeypatch.setattr(
        completions, "form_of_answer", lambda *given: (partial(Dictated, ids), form_of_answer(*given)[1])
    )
    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEYS[0], max_retries=0) as client:
        asked = dict(model="tiny", messages=user("a"), tools=[TOOL], max_tokens=len(ids), temperature=0)
        (whole,) = client.chat.completions.create(**asked).choices
        assert (whole.message.content, whole.message.tool_calls, whole.finish_reason) == ("Yes.", None, "length")
        chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**asked, stream=True)]
        parts = [part.function.arguments for chunk in chunks for part in chunk.delta.tool_calls or []]
        assert "".join(parts) == '{"place": "nor' and len(parts) > 2 and chunks[-1].finish_reason == "length"
