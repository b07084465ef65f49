"""Thoughts and calls over HTTP, by the clients of three protocols, whole and streamed, and back in the next turn's prompt."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import replace
from functools import partial

import httpx
import openai
import pytest
from families import ARGUMENTS, TEXT, THINKS, THOUGHT, TOOL, XML, XML_CALLS, chatml, family_tokenizer
from http_bodies import NOW, bearer, chat, user
from served import LIMITS, dictate, serving, stopped, with_template
from tiny_models import tiny_model

from locret_kit.answers.forms import CALLS, answer_form
from locret_kit.policies.grammar import parse_policy
from locret_kit.serving.bodies import ChatBody
from locret_kit.serving.engine_thread import EngineThread
from locret_kit.settings import RunSettings

BOTH = f"<think>\n{THOUGHT}\n</think>\n\n{TEXT}"
TEMPLATES = {
    "written": (chatml(THINKS + XML_CALLS, tools="<function=name>"), f"{BOTH}\n{XML}"),
    "begun": (chatml(THINKS + XML_CALLS, "<think>\n", "<function=name>"), f"{THOUGHT}\n</think>\n\n{TEXT}\n{XML}"),
}
"""Templates whose model begins a thought, or that begin it themselves; and an answer."""
SCHEMA = TOOL["function"]["parameters"]
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "7 m"}


@pytest.fixture(scope="module")
def url(engine):
    with serving(engine, replace(LIMITS, answer_tokens=600)) as address:
        yield address


WRITTEN = pytest.mark.parametrize("dictated", ["written"], indirect=True)


@pytest.fixture(params=TEMPLATES)
def dictated(request, engine, monkeypatch):
    """Tokens of the answer that a server with one of the templates says, its tokenizer, and characters of its thought."""
    template, answer = TEMPLATES[request.param]
    tokenizer = with_template(monkeypatch, engine, template)
    return len(dictate(monkeypatch, tokenizer, answer)), tokenizer


def prompt_tokens(tokenizer, messages: list[dict]) -> int:
    """Of the template's own text of a conversation."""
    text = tokenizer.apply_chat_template(messages, tools=[TOOL], tokenize=False, add_generation_prompt=True)
    return len(tokenizer(text, add_special_tokens=False).input_ids)


THOUGHTFUL = {
    "role": "assistant", "content": TEXT, "reasoning_content": THOUGHT,
    "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "depth", "arguments": ARGUMENTS}}],
}  # fmt: skip
TURNS = [*user("How deep?"), THOUGHTFUL, RESULT]


def test_chat_completions(client, dictated):
    tokens, tokenizer = dictated
    asked = dict(model="tiny", messages=user("How deep?"), tools=[TOOL], max_tokens=tokens, temperature=0)
    answer = client.chat.completions.create(**asked)
    message = answer.choices[0].message
    assert (message.reasoning_content, message.reasoning, message.content) == (THOUGHT, THOUGHT, TEXT)
    (call,) = message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("depth", ARGUMENTS)
    thought = answer.usage.completion_tokens_details.reasoning_tokens
    # The marks are in letters here.
    assert 0 < thought - len(tokenizer(THOUGHT, add_special_tokens=False).input_ids) < 30
    deltas = [chunk.choices[0].delta for chunk in client.chat.completions.create(**asked, stream=True)]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == THOUGHT
    assert "".join(delta.content or "" for delta in deltas).strip() == TEXT
    calls = [part.function for delta in deltas for part in delta.tool_calls or []]
    assert calls[0].name == "depth" and json.loads("".join(part.arguments for part in calls)) == ARGUMENTS
    for name in ("reasoning_content", "reasoning"):
        back = {"role": "assistant", "content": TEXT, name: THOUGHT, "tool_calls": [call.model_dump() | {"id": "c1"}]}
        asked |= {"messages": [*user("How deep?"), back, RESULT], "max_tokens": 1}
        third = client.chat.completions.create(**asked)
        assert third.usage.prompt_tokens == prompt_tokens(tokenizer, TURNS)


@pytest.mark.parametrize("dictated", ["begun"], indirect=True)
def test_responses(client, dictated):
    tokens, tokenizer = dictated
    tool = {"type": "function", "name": "depth", "parameters": SCHEMA, "description": TOOL["function"]["description"]}
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
    third = client.responses.create(**asked | {"max_output_tokens": 1}, input=back)
    assert third.usage.input_tokens == prompt_tokens(tokenizer, TURNS)


@WRITTEN
def test_messages(claude, dictated):
    tokens, tokenizer = dictated
    tool = {"name": "depth", "input_schema": SCHEMA, "description": TOOL["function"]["description"]}
    asked = dict(model="tiny", tools=[tool], max_tokens=tokens, extra_body={"temperature": 0})
    with claude.messages.stream(**asked, messages=user("How deep?")) as stream:
        streamed = stream.get_final_message()
    for message in (claude.messages.create(**asked, messages=user("How deep?")), streamed):
        thought, text, call = message.content
        assert (thought.type, thought.thinking, text.text, call.input) == ("thinking", THOUGHT, TEXT, ARGUMENTS)
        assert thought.signature and message.stop_reason == "tool_use"
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "7 m"}]}
    blocks = [block.model_dump(exclude_none=True) for block in streamed.content]
    back = [*user("How deep?"), {"role": "assistant", "content": blocks}, result]
    counted = claude.messages.count_tokens(model="tiny", tools=[tool], messages=back).input_tokens
    assert counted == prompt_tokens(tokenizer, TURNS)


def test_a_thought_that_is_left_out(client, engine, monkeypatch):
    """As OpenRouter's clients and vLLM's ask for it: of the text, of its tokens and of every piece. Usage counts it."""
    tokenizer = with_template(monkeypatch, engine, TEMPLATES["written"][0])
    tokens, fields = len(dictate(monkeypatch, tokenizer, BOTH)), {"reasoning": {"exclude": True}}
    asked = dict(model="tiny", messages=user("How deep?"), max_tokens=tokens, temperature=0)
    create = partial(client.chat.completions.create, **asked)
    told = create(extra_body={"reasoning": {"exclude": None}, "include_reasoning": None})
    assert told.choices[0].message.reasoning == THOUGHT
    assert "reasoning" not in create(extra_body={"include_reasoning": False}).choices[0].message.model_dump()
    answer = create(extra_body=fields, logprobs=True, top_logprobs=1, n=2)
    for choice in answer.choices:
        message = choice.message.model_dump(exclude_none=True)
        assert message["content"] == TEXT and not {"reasoning", "reasoning_content"} & message.keys()
        said = "".join(one.token for one in choice.logprobs.content)
        assert said.endswith(f"\n\n{TEXT}") and "harbour" not in said
    counts = [one.usage.completion_tokens_details.reasoning_tokens for one in (told, answer)]
    assert counts[1] == 2 * counts[0] > 0 and answer.usage.completion_tokens == 2 * told.usage.completion_tokens
    chunks = list(create(extra_body=fields, stream=True, stream_options={"include_usage": True}))
    deltas = [choice.delta.model_dump(exclude_none=True) for chunk in chunks for choice in chunk.choices]
    assert not any({"reasoning", "reasoning_content"} & delta.keys() for delta in deltas)
    assert "".join(delta.get("content", "") for delta in deltas).strip() == TEXT
    assert chunks[-1].usage.completion_tokens_details.reasoning_tokens == counts[0]
    create = partial(client.responses.create, model="tiny", input="How deep?", temperature=0, max_output_tokens=tokens)
    whole = create(extra_body=fields)
    items = [one.item for one in create(extra_body=fields, stream=True) if one.type == "response.output_item.done"]
    assert [item.type for item in (*whole.output, *items)] == ["message", "message"]
    assert whole.usage.output_tokens_details.reasoning_tokens == counts[0]
    asks = {"reasoning": {"summary": "auto", "effort": "low"}, "include": ["reasoning.encrypted_content"]}
    assert create(**asks).output[0].content[0].text == THOUGHT
    for field, value in (("reasoning.exclude", "yes"), ("reasoning.exclude", 1), ("include_reasoning", "false")):
        outer, *inner = field.split(".")
        with pytest.raises(openai.BadRequestError, match=f"{field}: "):
            client.chat.completions.create(**asked, extra_body={outer: {inner[0]: value} if inner else value})


@WRITTEN
def test_a_thought_alone_is_no_beginning_of_the_same_request(url, dictated):
    """Its cache has read the thought, which the prompt lacks, and which is taken back."""
    for number in range(2):
        said = chat(url, user("How deep is it without an answer?"), max_tokens=12).json()
        assert said["choices"][0]["message"]["reasoning_content"] and not said["choices"][0]["message"]["content"]
        cached = said["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached == number * (said["usage"]["prompt_tokens"] - 1)


@WRITTEN
def test_stop_texts_end_the_text_alone(claude, client, dictated):
    """Not the thought and not a call's arguments, which have them too."""
    tokens, _ = dictated
    asked = dict(model="tiny", messages=user("How deep?"), tools=[TOOL], max_tokens=tokens, temperature=0)
    (choice,) = client.chat.completions.create(**asked, stop=["harbour", "bay", "2 <"]).choices
    said = choice.message.reasoning, choice.message.content, choice.message.tool_calls, choice.finish_reason
    assert said == (THOUGHT, TEXT.partition("2 <")[0], None, "stop")
    (choice,) = client.chat.completions.create(**asked, stop=["harbour", "bay"]).choices
    assert (choice.message.content, choice.finish_reason) == (TEXT, "tool_calls")
    assert json.loads(choice.message.tool_calls[0].function.arguments) == ARGUMENTS
    deltas = [one.choices[0].delta for one in client.chat.completions.create(**asked, stop="2 <", stream=True)]
    assert "".join(delta.content or "" for delta in deltas) == TEXT.partition("2 <")[0]
    asked = dict(model="tiny", max_tokens=tokens, messages=user("How deep?"), extra_body={"temperature": 0})
    made = claude.messages.create(**asked, stop_sequences=["harbour", "look"])
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
    assert body.begins_in_thought(tokenizer, ids) == within


def test_a_thought_that_a_template_has_no_place_for(url):
    """It is left out of an answer; one without an answer at the end is refused."""
    turns = [*user("a"), {"role": "assistant", "content": "b"}, *user("c")]
    plain = chat(url, turns, max_tokens=1).json()["usage"]["prompt_tokens"]
    turns[1] |= {"reasoning_content": "hm"}
    assert chat(url, turns, max_tokens=1).json()["usage"]["prompt_tokens"] == plain
    turns[1] |= {"content": None}
    refused = chat(url, turns[:2], max_tokens=1)
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


def test_a_call_that_the_bound_cuts(client, engine, monkeypatch, caplog):
    """Its stream has what there is of it; a whole answer leaves it out, and says so where it was forced."""
    ids = dictate(monkeypatch, engine.tokenizer, 'Yes.<tool_call>{"name": "depth", "arguments": {"place": "nor')
    asked = dict(model="tiny", messages=user("a"), tools=[TOOL], max_tokens=len(ids), temperature=0)
    for choice in ("auto", "required"):
        (whole,) = client.chat.completions.create(**asked, tool_choice=choice).choices
        assert (whole.message.content, whole.message.tool_calls, whole.finish_reason) == ("Yes.", None, "length")
        warning = whole.model_extra.get("warning", "")
        assert warning.startswith(f"max_tokens={len(ids)} ended the answer before") == (choice == "required"), warning
        said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert said == [warning] * bool(warning)
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**asked, stream=True)]
    parts = [part.function.arguments for chunk in chunks for part in chunk.delta.tool_calls or []]
    assert "".join(parts) == '{"place": "nor' and len(parts) > 2 and chunks[-1].finish_reason == "length"


# ---- bounds that a request may name: of its thought, and of tokens beyond the server's --------------------------------------

OPENED = chatml("<think></think>", "<think>\n")
ENOUGH = {"type": "enabled", "budget_tokens": 5}


def test_a_thought_ends_at_its_budget_and_the_answer_follows(url, engine, monkeypatch):
    tokenizer = with_template(monkeypatch, engine, OPENED)
    end, asked = len(tokenizer("</think>", add_special_tokens=False).input_ids), user("How deep?")
    biased = {"max_tokens": 40, "logit_bias": {tokenizer.eos_token_id: -100}}
    answer = chat(url, asked, **biased, thinking=ENOUGH).json()
    message, usage = answer["choices"][0]["message"], answer["usage"]
    assert message["content"].strip() and message["reasoning_content"]
    assert usage["completion_tokens"] == 40, "thoughts are tokens of the answer here"
    assert usage["completion_tokens_details"]["reasoning_tokens"] <= 5 + end + 1
    body = {"messages": asked, "temperature": 0, **biased, "thinking": ENOUGH}
    answer = httpx.post(f"{url}/v1/messages", json=body, headers=bearer()).json()
    assert [block["type"] for block in answer["content"]] == ["thinking", "text"]
    for budget in (0, -1, "many", 1.5):
        answer = chat(url, asked, thinking={"type": "enabled", "budget_tokens": budget})
        assert answer.status_code == 400 and "thinking.budget_tokens" in answer.json()["error"]["message"]


def test_a_budget_that_ends_within_a_character():
    """A random model writes half of a character at many a budget; its thought is closed there, and the call follows."""
    tokenizer = family_tokenizer("qwen3.5")
    model, settings = tiny_model("llama", vocab_size=len(tokenizer)), RunSettings(budget=256, chunk=64, local_len=5)
    made = EngineThread(model, tokenizer, settings, parse_policy("streaming"), None, sessions=2)
    asked = {"tools": [NOW], "tool_choice": "required", "max_tokens": 200, "temperature": 1}
    with stopped(made) as engine, serving(engine, replace(LIMITS, answer_tokens=300)) as url:
        for seed in range(8):
            thinking = {"type": "enabled", "budget_tokens": 4 + seed % 4}
            (choice,) = chat(url, user("How?"), **asked, seed=seed, thinking=thinking).json()["choices"]
            assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["now"]


def test_without_max_tokens_a_thought_has_a_bound_of_its_own(engine, monkeypatch):
    tokenizer = with_template(monkeypatch, engine, OPENED)
    end = len(tokenizer("</think>", add_special_tokens=False).input_ids)
    with serving(engine, replace(LIMITS, answer_tokens=30)) as url:
        for thinking, thought in ((None, 24), (ENOUGH, 5)):
            fields = {"logit_bias": {tokenizer.eos_token_id: -100}, "thinking": thinking, "max_tokens": None}
            answer = chat(url, user("How deep?"), **fields)
            usage = answer.json()["usage"]
            assert usage["completion_tokens_details"]["reasoning_tokens"] == thought + end
            assert usage["completion_tokens"] == thought + end + 6
            assert answer.headers["x-max-tokens"] == str(thought + 6)


def test_more_tokens_than_served_are_refused_where_that_is_asked_for(engine):
    """``test_serving_wire.py`` has the other servers."""
    with serving(engine, replace(LIMITS, answer_tokens=3, strict=True)) as url:
        for wanted in (3, -1):
            answer = chat(url, user("How deep?"), max_tokens=wanted)
            assert answer.status_code == 200 and answer.headers["x-max-tokens"] == "3"
        answer = chat(url, user("How deep?"), max_tokens=32000)
        said = answer.json()["error"]["message"]
        assert (answer.status_code, said) == (400, "max_tokens=32000 must be at most 3")
