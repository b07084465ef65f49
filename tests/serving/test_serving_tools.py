"""Calls of tools and answers by a schema, over HTTP and by themselves."""

from __future__ import annotations

import ast
import json
from copy import copy, deepcopy
from dataclasses import replace
from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import anthropic
import httpx
import pytest
import regex
from families import follows
from http_bodies import CHAT_TOOL, NOW, user
from hypothesis import assume, given
from hypothesis import strategies as st
from read_texts import parts
from real_templates import real_tokenizer
from served import KEYS, LIMITS, dictate, serving
from tokenizers import AddedToken

from locret_kit.answers.forms import CALLS, UNKNOWN, AnswerForm, answer_form, call_form
from locret_kit.answers.grammar import call_rules, json_rule
from locret_kit.answers.reader import Call, Reader
from locret_kit.serving import completions
from locret_kit.serving.answers import AnswerStream
from locret_kit.serving.bodies import ChatBody
from locret_kit.serving.constraint import constraint, speller
from locret_kit.serving.histories import rewritten

TOOLS = [CHAT_TOOL, NOW]
FORMS = {
    "tags": ('<tool_call>\n{"name": "depth", "arguments": {"name": "north", "tide": true}}\n</tool_call>', 2),
    "list": ('[TOOL_CALLS] [{"name": "depth", "arguments": {"name": "north", "tide": true}}]', 1),
    "object": ('{"name": "depth", "parameters": {"name": "north", "tide": true}}', 1),
}  # fmt: skip


@pytest.fixture(scope="module")
def url(engine):
    with serving(engine, replace(LIMITS, answer_tokens=600)) as address:
        yield address


def reader(form: str, tools, **given) -> Reader:
    """A reader of calls in a form."""
    return Reader(AnswerForm(calls=CALLS[form]), tools, **given)


def read(reader: Reader, text: str, **end) -> tuple[str, list[Call]]:
    """An answer that comes in characters. ``tests/answers/test_fuzz.py``: it is the same in all other pieces."""
    events = [event for letter in text for event in reader.feed(letter)] + reader.end(**end)
    for call in reader.calls:
        assert call.arguments == "".join(one.text for one in events if one.kind == "arguments" and one.call is call)
    return "".join(one.text for one in events if one.kind == "text"), reader.calls


def test_one_call_alone_where_calls_are_not_parallel():
    now = '{"name": "now"}'
    for form, text, before in [
        ("tags", f"I look.<tool_call>{now}</tool_call> <tool_call>{now}</tool_call> more", "I look."),
        ("tags", f"<tool_call>no</tool_call><tool_call>{now}</tool_call>", "<tool_call>no</tool_call>"),
        ("tags", f"<tool_call>[{now}, {now}]</tool_call>", ""), ("list", f"[TOOL_CALLS] [{now}, {now}]", ""),
        ("object", f"[{now}, {now}]", ""),
    ]:  # fmt: skip
        said, calls = read(reader(form, ["now"], parallel=False), text)
        assert said == before and [call.name for call in calls] == ["now"]


NOW = '<tool_call>{"name": "now"}</tool_call>'


def test_texts_and_calls_by_turns(url, client, monkeypatch):
    """By the protocols that tell an answer block by block: whole, by its events, and by the last of them."""
    asked = {"model": "tiny", "extra_body": {"temperature": 0}}
    tokens = len(dictate(monkeypatch, parts("llama")[1], f"I look. {NOW} {NOW} and then\n{NOW}  "))
    want = ["I look.", "now", "now", " and then", "now"]
    responses = partial(client.responses.create, **asked, input="a", tools=[{"type": "function", "name": "now"}])
    whole, events = (responses(stream=stream, max_output_tokens=tokens) for stream in (False, True))
    seen = list(events)
    done = [event.item for event in seen if event.type == "response.output_item.done"]
    for items in (whole.output, done, seen[-1].response.output):
        assert [item.name if item.type == "function_call" else item.content[0].text for item in items] == want
    assert "".join(event.delta for event in seen if event.type.endswith("text.delta")) == "I look. and then"
    with anthropic.Anthropic(base_url=url, api_key=KEYS[0], max_retries=0) as claude:
        asked |= {
            "messages": user("a"),
            "tools": [{"name": "now", "input_schema": {"type": "object"}}],
            "max_tokens": tokens,
        }
        with claude.messages.stream(**asked) as stream:
            streamed = stream.get_final_message()
        for message in (claude.messages.create(**asked), streamed):
            assert [block.name if block.type == "tool_use" else block.text for block in message.content] == want


def test_an_answer_ends_with_its_first_call_where_calls_are_not_parallel(url, client, monkeypatch):
    first = len(parts("llama")[1](NOW, add_special_tokens=False).input_ids)
    whole = len(dictate(monkeypatch, parts("llama")[1], f"{NOW} {NOW} a"))
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


def test_what_is_no_call_is_text():
    for form, text in [
        ("tags", "a < b <tool"), ("tags", "x <tool_call>{}</tool_call> y"), ("tags", '<tool_call>{"name": "other"}</tool_call>'),
        ("tags", "<tool_call>never closed"), ("object", '{"a": 1}'), ("object", "words {}"), ("list", '[{"name": "other"}]'),
        ("list", "[1] or {2}"), ("object", '{"name": "depth"'), ("list", ""),
        ("tags", '<tool_call>{"name": []}</tool_call>'), ("object", '{"name": {}}'), ("list", "[[], null]"),
    ]:  # fmt: skip
        assert read(reader(form, ["depth"]), text) == (text, [])


TYPED = {
    "type": "object", "required": ["city"], "$defs": {"Wind": {
        "type": "object", "properties": {"gale": {"type": "boolean"}}, "required": ["gale"], "additionalProperties": False,
    }},
    "properties": {
        "city": {"type": "string"}, "days": {"type": "integer"}, "limit": {"type": "number"}, "tide": {"type": "boolean"},
        "by": {"type": ["null", "integer"]}, "names": {"type": "array"}, "wind": {"$ref": "#/$defs/Wind"},
        "kind": {"enum": ["a", "b"]},
    },
}  # fmt: skip
VALUES = {"city": '  if a < b:\n    say("ü </b>") ', "days": "3", "limit": "2.5", "tide": "true", "by": "null"}
VALUES["names"] = '["x", 1]'
TYPES = {**VALUES, "days": 3, "limit": 2.5, "tide": True, "by": None, "names": ["x", 1]}
GEMMA = 'call:weather{city:<|"|>' + VALUES["city"] + '<|"|>,days:3,limit:2.5,tide:true,by:null,names:[<|"|>x<|"|>,1]}'


def xml(name: str, values: dict[str, str]) -> str:
    said = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{said}</function>\n</tool_call>"


def pairs(name: str, values: dict[str, str]) -> str:
    said = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in values.items())
    return f"<tool_call>{name}\n{said}</tool_call>"


OWN = {
    "xml": ("<function=", xml("weather", VALUES), xml("now", {}), [
        xml("other", {}), "<tool_call>\n<function=now>", "<tool_call> <function>now</function></tool_call>",
    ], ["<tool_call>\n<function=now>\n<parameter=a>\n1\n</tool_call>", "<function=now>\n<parameter=a>\n1\n"]),
    "pairs": ("<arg_key>", pairs("weather", VALUES), pairs("now", {}), [
        pairs("other", {}), "<tool_call>now\n<arg_key>a</arg_key>\n</tool_call>", "<tool_call>now and then</tool_call>",
    ], ["<tool_call>now<arg_key>a</arg_key><arg_value>1</arg_valu"]),
    "gemma": ("<|tool_call>", f"<|tool_call>{GEMMA}<tool_call|>", "<|tool_call>call:now{}<tool_call|>", [
        "<|tool_call>call:other{}<tool_call|>", "<|tool_call>call:now{",
    ], ['<|tool_call>call:now{a:<|"|>}<tool_call|>', "<|tool_call>call:now{a:[1,2}<tool_call|>"]),
}  # fmt: skip


@pytest.mark.parametrize("form", OWN)
def test_forms_of_other_families(form):
    """Of Qwen3-Coder and Qwen 3.5, GLM 4.5, Gemma 4."""
    mark, call, empty, wrong, endless = OWN[form]
    assert call_form("{{ tools }}<tool_call>" * (form != "gemma") + f"{{{{ tools }}}}{mark}") == CALLS[form]
    said, calls = read(reader(form, {"weather": TYPED, "now": {}}), f"I < look.{call}\n{empty}")
    assert said.strip() == "I < look."
    assert [(one.name, json.loads(one.arguments)) for one in calls] == [("weather", TYPES), ("now", {})]
    one = reader(form, ["now"], parallel=False)
    assert [call.name for call in read(one, f"{empty} {empty} more")[1]] == ["now"] and one.ended
    for text in wrong:
        assert read(reader(form, ["now"]), text) == (text, [])
    for text in endless:
        one = reader(form, ["now"])
        assert read(one, text)[0] == "" and one.calling and one.whole_calls == []


def gemma(name: str, values: dict[str, object]) -> str:
    return f"<|tool_call>call:{name}{gemma_value(values)}<tool_call|>"


def gemma_value(value: object) -> str:
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{gemma_value(inner)}' for key, inner in value.items())}}}"
    if isinstance(value, list):
        return f"[{','.join(map(gemma_value, value))}]"
    return f'<|"|>{value}<|"|>' if type(value) is str else str(value) if isinstance(value, str) else json.dumps(value)


WORDS = st.lists(st.sampled_from([
    "a", " ", "\n", '"', "'", "\\", "<", "</", "<|", ">", "{", "}", "[", ",", ":", "\u00fc", "\U0001f600", "\\u00e9", "</p",
    "</parameter>", "</function>", "</tool_call>", "</arg_value>", "<parameter=x>", "<arg_key>", "<tool_call|>", "city:", "\x00",
]), max_size=8).map("".join)  # fmt: skip
LEAVES = st.none() | st.booleans() | st.integers(-99, 99) | WORDS
INNER = st.dictionaries(
    st.sampled_from("abc"), st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3), max_leaves=4)
)
ENDED = regex.compile(
    r"</parameter>\s*</function>|</function>\s*</tool_call>|</arg_value>\s*(<arg_key>|</tool_call>)|</function>\Z"
)


@pytest.mark.parametrize(("form", "make"), [("xml", xml), ("pairs", pairs), ("gemma", gemma)])
@given(
    text=WORDS,
    other=WORDS,
    inner=INNER,
    number=st.integers() | st.booleans() | st.none(),
    cuts=st.lists(st.integers(0, 999), max_size=9),
)
def test_arguments_come_piece_by_piece(form, make, text, other, inner, number, cuts):
    """Values end where a family's own parser ends them. Texts come as they are written, others when they are whole."""
    assume(form == "gemma" or not any(ENDED.search(f"{one}\n") for one in (text, other)))
    schema = {
        "properties": {
            "city": {"type": "string"},
            "wind": {"type": "object"},
            "n": {"type": ["integer", "boolean", "null"]},
        }
    }
    values = {"city": text, "wind": inner, "n": number, "other": other}
    said = values if form == "gemma" else {
        key: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) for key, value in values.items()
    }  # fmt: skip
    answer = make("weather", said)
    whole, places = json.dumps(values, ensure_ascii=False), sorted(cut % len(answer) for cut in cuts)
    for pieces in ([answer[a:b] for a, b in pairwise([0, *places, len(answer)])], [*answer]):
        one, come = reader(form, {"weather": schema}), ""
        for piece in pieces:
            come += "".join(event.text for event in one.feed(piece) if event.kind == "arguments")
            assert whole.startswith(come)
        one.end()
        assert (one.calls[0].arguments, len(one.whole_calls)) == (whole, 1)
    if form == "gemma":
        (bare,) = read(reader(form, ["w"]), "<|tool_call>call:w{a: plain words ,b:12:30,c:x}<tool_call|>")[1]
        assert bare.values == {"a": "plain words", "b": "12:30", "c": "x"}
    if len(text) > 20:
        half = reader(form, {"weather": schema})
        half.feed(answer[: answer.index(text) + len(text)])
        assert len(half.calls[0].arguments) > len('{"city": "') + len(text) // 4


A, B = ("w", {"text": "a"}), ("w", {"n": "a"})
PART = "<parameter=text>\n{}\n</parameter>\n"
HALF = "<function=w>\n" + PART.format("a")
FAULTS = [
    (f"<tool_call>\n{HALF}</function>\n{HALF.replace('=text>', '=n>')}</function>\n</tool_call>", "", [A, B]),
    (f"<tool_call>{HALF}</function>", "", [A]), (f"<tool_call>{HALF}</tool_call>", "", [A]), (f"<tool_call>{HALF}", "", [A]),
    (f"{HALF}</function>\n</tool_call> so", " so", [A]), (f"{HALF}</function>", "", [A]),
    (f"x <seed:tool_call>{HALF}</function></seed:tool_call>", "x", [A]),
    ('<minimax:tool_call><invoke name="w"><parameter name="text">a</parameter></invoke></minimax:tool_call>', "", [A]),
    ("<tool_call><function=w><parameter=text>\na\n</function></tool_call>", "", [A]),
    ("<tool_call><function=w><parameter=text>\na\n<parameter=n>\n3\n</parameter></function></tool_call>", "",
     [("w", {"text": "a", "n": 3})]),
    (f"<think> a <tool_call>? </think>{xml('w', {'text': 'a'})}", "<think> a <tool_call>? </think>", [A]),
    *((xml("w", {"text": text}), "", [("w", {"text": text})]) for text in (
        "an </parameter> in it", "an </tool_call> in it", "<parameter=x>\nin it", '{"a": 1}', "3", "null", "\n\n",
        "</tool_call>" * 9, xml("now", {}))),
    (f"<tool_call><function=w >\n{PART.format('a')}</function></tool_call>", "", [A]),
    (xml("w", {"none": "null", "refers": "3", "kind": "2", "one": "None", "all": "{'a': True}", "is": "3", "any": "3",
                "n": "NaN"}), "",
     [("w", {"none": None, "refers": 3, "kind": 2, "one": None, "all": {"a": True}, "is": 3, "any": "3", "n": "NaN"})]),
    (xml("w", {"none": '"x"', "refers": "x", "kind": "x", "one": "4", "n": "1e400"}), "",
     [("w", {"none": '"x"', "refers": "x", "kind": "x", "one": 4, "n": "1e400"})]),
]  # fmt: skip
"""Answers in Qwen's form as models write them, their text and calls."""
LOOSE = {"$defs": {"I": {"anyOf": [{"type": "integer"}, {"$ref": "#/$defs/I"}]}}, "properties": {
    "text": {"type": "string"}, "none": {"anyOf": [{"type": "string"}, {"type": "null"}]}, "refers": {"$ref": "#/$defs/I"},
    "kind": {"enum": [1, 2, "x"]}, "one": {"type": "integer", "nullable": True}, "all": {"allOf": [{"type": "object"}]},
    "is": {"const": 3}, "any": {}, "n": {"type": "number"},
}}  # fmt: skip


@pytest.mark.parametrize(("text", "shown", "calls"), FAULTS)
def test_calls_as_models_write_them(text, shown, calls):
    said, made = read(reader("xml", {"w": LOOSE}), text)
    assert (said, [(one.name, json.loads(one.arguments)) for one in made]) == (shown, calls)


def test_an_answer_that_is_cut_off_calls_nothing():
    pair = "<tool_call>w<arg_key>text</arg_key><arg_value>a</arg_value>"
    for form, text in (("xml", f"<tool_call>{HALF}"), ("pairs", pair)):
        for cut in (True, False):
            one = reader(form, {"w": LOOSE})
            assert read(one, text, cut=cut)[0] == "" and len(one.whole_calls) == (not cut)
            assert one.calls[0].arguments in (['{"text": "a', '{"text": "a"'] if cut else ['{"text": "a"}'])


@pytest.mark.parametrize(("form", "make"), [("xml", xml), ("pairs", pairs), ("gemma", gemma)])
def test_a_call_that_must_be_has_the_models_own_form(form, make):
    tokenizer, form = real_tokenizer("smollm2"), CALLS[form]
    offered = {"weather": TYPED, "now": {}, "any": {"properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}}
    offered["odd"] = {"properties": {"a b-c": {"type": "string"}}, "required": ["a b-c"]}
    maker = constraint(tokenizer, frozenset({tokenizer.eos_token_id}), call_rules(offered, form), form.text_end)
    whole = {"city": "a </i>\n\nb < c", "days": "3", "wind": '{"gale": true}', "kind": "b"}
    marked = {"days": 3, "wind": Raw('{"gale": true}')} if make is gemma else {}
    for values, right in (
        (whole | marked, True), ({"city": ""}, True), ({"days": "3"}, False), ({"city": "a", "days": "x"}, False),
        ({"city": "a", "kind": "c"}, False), ({"city": "a", "wind": "{}"}, False),
    ):  # fmt: skip
        assert follows(maker(), tokenizer, make("weather", values)) == right, values
        if right:
            (call,) = read(reader(form.name, offered), make("weather", values))[1]
            assert call.values == values | ({"days": 3, "wind": {"gale": True}} if "days" in values else {})
    odd = make("odd", {'"a b-c"' if make is gemma else "a b-c": "x"})
    assert follows(maker(), tokenizer, odd) and read(reader(form.name, offered), odd)[1][0].values == {"a b-c": "x"}
    one = 1 if make is gemma else "1"
    for text, right in [
        (make("now", {}), True), (make("other", {}), False), ("Hello", False), (make("any", {}), True),
        (make("any", {"b": "x"}), True), (make("any", {"a": one, "b": "x"}), True), (make("any", {"a": one}), True),
    ]:  # fmt: skip
        assert follows(maker(), tokenizer, text) == right, text


class Raw(str):
    """A value as it is."""


FN = {"name": "{name}", "arguments": "{content}"}
PAIR = {"tag_pattern": r"<p=(?P<key>[^>]+)>\s*(?P<value>.*?)\s*</p>"}
DECLARED = [
    ({"open": "<<", "close": [">>", "]]"], "content": "json", "transform": {"function": "{content}"}},
     '<<{"name": "depth", "arguments": {"place": "a", "days": 3}}>>'),
    ({"open_pattern": r"\s*<c>\s*call:(?P<name>\w+)", "close_pattern": r"</c>\s*", "content": "json",
      "transform": {"function": FN}},
     '<c>call:depth{"place": "a", "days": 3}</c>'),
    ({"open": "<c>", "close": "</c>", "content": "json",
      "transform": {"function": {"name": "{content.tool}", "arguments": "{content.args}"}}},
     '<c>{"tool": "depth", "args": {"place": "a", "days": 3}}</c>'),
    ({"open_pattern": r"<f=(?P<name>[^>\n]+)>", "close": "</f>", "content": "xml-inline", "content_args": PAIR,
      "transform": {"type": "function", "function": FN}}, "<f=depth><p=place>a</p><p=days>3</p></f>"),
    ({"open_pattern": "<(a|b)>", "close": "</c>", "content": "json", "transform": {"function": "{content}"}}, None),
    ({"open": "<c>", "close": "</c>", "content": "python-call-list"}, '<c>[depth(place="a", days=3)]</c>'),
    ({"open_pattern": r"(?=\[)", "content": "python-call-list", "transform_each": True, "transform": {
        "function": {"name": "{name}", "arguments": "{arguments}"}}}, '[depth(place="a", days=3)]'),
    ({"open_pattern": r"<c:(?P<name>[\w.-]+)>\n", "close": "</c>", "content": "kv-lines", "transform": {"function": FN}},
     "<c:depth>\nplace:a\ndays:3\n</c>"),
    ({"open_pattern": "<c>(?P<name>[^\n]+)\n", "close": "</c>", "content": "kv-lines", "transform": {"function": FN},
      "content_args": {"kv_sep": " = ", "value_parser": {"name": "json"}}}, '<c>depth\nplace = "a"\ndays = 3\n</c>'),
    ({"open": "<c>", "close": "</c>", "content": "python-call-list", "transform": {"function": "{content}"},
      "transform_each": True}, None),
    ({"open": "<c>", "close": "</c>", "content": "text"}, None),
]  # fmt: skip
"""Fields of a response template, and a call as the grammar makes it; None for none."""


@pytest.mark.parametrize(("field", "text"), DECLARED)
def test_a_call_that_must_be_in_a_form_that_a_tokenizer_declares(field, text):
    tokenizer = copy(real_tokenizer("smollm2"))
    tokenizer.response_template = {
        "start_anchor": "a",
        "fields": {"tool_calls": field | {"repeats": field["content"] == "json"}},
    }
    tokenizer.chat_template = "{{ tools }}"
    properties = {"place": {"type": "string"}, "days": {"type": "integer"}}
    tools = {
        "depth": {"properties": properties, "required": [*properties], "type": "object", "additionalProperties": False}
    }
    form = answer_form(tokenizer, tools=True).calls
    if text is None:
        with pytest.raises(ValueError, match=f"must be 'auto' .*: of this tokenizer's calls, {field['content']} with"):
            call_rules(tools, form)
        assert read(Reader(AnswerForm(calls=form), tools), "<c>depth</c> so")[1] == []
        return
    ends, spell = frozenset({tokenizer.eos_token_id}), speller(tokenizer)
    maker = constraint(tokenizer, ends, call_rules(tools, form, spell), form.text_end)
    for said, right in (
        (text, True),
        (text.replace("depth", "other"), False),
        (text.replace("3", "x"), False),
        ("Hello", False),
    ):
        assert follows(maker(), tokenizer, said) == right, said
    (call,) = read(Reader(AnswerForm(calls=form), tools), f"I look.{text}")[1]
    assert (call.name, call.values) == ("depth", {"place": "a", "days": 3})
    if len(form.written) > 2 and (form.json or "kv" in field["content"]):
        with pytest.raises(ValueError, match="cannot write 'depth' or"):
            call_rules({"depth": {"properties": {"a\nb": {}}}}, form)


LFM2 = [
    ("[now()]", True, [("now", {})]), ('[w(text="a, ü\\" ] )")]', True, [("w", {"text": 'a, ü" ] )'})]),
    ('[w(text="a", rows=[[1], []], all={"b": null})]', True, [("w", {"text": "a", "rows": [[1], []], "all": {"b": None}})]),
    ("[now(), now()]", False, [("now", {}), ("now", {})]),
    ("[w(text='a', rows='[1]')]", False, [("w", {"text": "a", "rows": [1]})]),
    ("[w(rows=[])]", False, [("w", {"rows": []})]), ("[w('a')]", False, []), ("[other()]", False, []),
]  # fmt: skip
"""Calls in LFM2's form; whether a call that must be may be written so, and what is read."""


@pytest.mark.parametrize(("text", "right", "calls"), LFM2)
def test_calls_as_python_writes_them(text, right, calls):
    tokenizer = copy(real_tokenizer("smollm2"))
    tokenizer.chat_template = "{{ tools }}<|tool_list_start|>"
    kinds = {"text": {"type": "string"}, "rows": {"type": "array"}, "all": {"type": "object"}}
    tools = {"now": {}, "w": {"type": "object", "properties": kinds, "required": ["text"]}}
    form, said = answer_form(tokenizer, tools=True), f"<|tool_call_start|>{text}<|tool_call_end|>"
    rules = call_rules(tools, form.calls, speller(tokenizer))
    maker = constraint(tokenizer, frozenset({tokenizer.eos_token_id}), rules, form.calls.text_end)
    assert follows(maker(), tokenizer, said) == right
    before, made = read(Reader(form, tools), f"I look. {said}")
    assert [(one.name, one.values) for one in made] == calls and before == ("I look." if calls else f"I look. {said}")


LONG = [
    "9007199254740991", "9007199254740993", "-9007199254740993", "123456789012345678901234567890", "9" * 4000, "1e22",
    "0", "-0.5", '[1, {"a": [-9007199254740993, 9007199254740995], "9007199254740993": "9007199254740993"}]',
    '["a\\\" 9007199254740993, ", 9007199254740993, \'it"s 12345678901234567\', "\\\\", 12345678901234567]',
]  # fmt: skip
"""Values in a call, as Python writes them."""


CALLED = "w(n=1)", "now()"
AS_JSON = '{"name": "w", "arguments": {"n": 1}}', '{"name": "now", "arguments": {}}'
ROWS = [
    ("{{ tools }}<|tool_list_start|>", None, "<|tool_call_start|>[{}]<|tool_call_end|>", CALLED),
    ("{{ tools }}", DECLARED[5][0], "<c>[{}]</c>", CALLED),
    ("{{ tools }}", DECLARED[6][0], "[{}]", CALLED),
    ("{{ tools }}[TOOL_CALLS]", None, "[{}]", AS_JSON),
    ("{{ tools }}<TOOLCALL>", None, "<TOOLCALL>[{}]</TOOLCALL>", AS_JSON),
    ("{{ tools }}<|tool_call|>", None, "<|tool_call|>[{}]", AS_JSON),
]
"""Chat templates and response templates of models whose calls stand in a list, a list of them, and two calls."""


@pytest.mark.parametrize(("template", "field", "row", "pair"), ROWS)
def test_calls_that_must_be_are_as_many_as_a_list_may_have(template, field, row, pair):
    tokenizer = copy(real_tokenizer("smollm2"))
    tokenizer.chat_template = template
    tokenizer.response_template = field and {"start_anchor": "a", "fields": {"tool_calls": field}}
    parameters = {
        "type": "object",
        "properties": {"n": {"type": "integer"}},
        "required": ["n"],
        "additionalProperties": False,
    }
    tools = [
        {"function": {"name": "w", "parameters": parameters}},
        {"function": {"name": "now", "parameters": {"type": "object", "additionalProperties": False}}},
    ]
    one, other = pair
    engine = SimpleNamespace(tokenizer=tokenizer, stop_ids=frozenset({tokenizer.eos_token_id}))
    form, named = answer_form(tokenizer, tools=True), {"type": "function", "function": {"name": "w"}}
    for fields, most in (({}, 16), ({"parallel_tool_calls": False}, 1), ({"tool_choice": named}, 1)):
        asked = {"messages": user("a"), "tools": tools, "tool_choice": "required"} | fields
        make, new = completions.form_of_answer(engine, ChatBody.model_validate(asked), form, False)
        for calls in ([one], [one, other], [one, one], [one, other] * 8, [one, other] * 8 + [one], []):
            text = row.format(", ".join(calls))
            assert follows(make(), tokenizer, text) == (0 < len(calls) <= most), text
            if 0 < len(calls) <= most:
                made = [(call.name, call.values) for call in read(new(), text)[1]]
                assert made == [("w", {"n": 1}) if said == one else ("now", {}) for said in calls]


@pytest.mark.parametrize("value", LONG)
@pytest.mark.parametrize(
    ("field", "said"),
    [
        (None, "<|tool_call_start|>[w(v={})]<|tool_call_end|>"),
        (DECLARED[6][0], "[w(v={})]"),
        (DECLARED[7][0], "<c:w>\nv:{}\n</c>"),
    ],
)
def test_numbers_of_calls_are_exact(field, said, value):
    """Also beyond 2^53, from where on floats and JavaScript round integers."""
    tokenizer = copy(real_tokenizer("smollm2"))
    tokenizer.chat_template = "{{ tools }}<|tool_list_start|>" if field is None else "{{ tools }}"
    tokenizer.response_template = field and {"start_anchor": "a", "fields": {"tool_calls": field}}
    tools = {"w": {"properties": {"v": {"type": ["number", "integer", "array"]}, "n": {"type": "integer"}}}}
    form = answer_form(tokenizer, tools=True)
    (call,) = read(Reader(form, tools), said.format(value))[1]
    assert call.values == {"v": (want := ast.literal_eval(value))} and repr(call.values["v"]) == repr(want)
    if "\n" in said:
        text = said.replace("v:{}", "n:9007199254740993.0\nv:12345678901234567e5")
        (call,) = read(Reader(form, tools), text)[1]
        assert call.values == {"n": 9007199254740993, "v": 12345678901234567e5}
    for wrong in ("9" * 5000, "1e999", "012345678901234567"):  # no JSON, or no number of Python's
        assert "\n" in said or read(Reader(form, tools), said.format(wrong)) == (said.format(wrong), [])


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


def test_forms_of_templates():
    for template, form in (("", "tags"), ("{{ messages }}", "tags"), ("{{ tools }}[TOOL_CALLS]", "list")):
        assert call_form(template) == CALLS[form]
    assert call_form("{{ tools }}<tool_call>") == CALLS["tags"] and call_form("{{ tools }}") == UNKNOWN


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
    {"type": "function", "name": "f", "parameters": {"a": 1}}, {"name": "f", "input_schema": {"a": 1}},
    {"type": "custom", "name": "f", "description": None, "input_schema": {"a": 1}},
])  # fmt: skip
def test_tools_as_every_protocol_has_them(tool):
    (made,) = ChatBody.model_validate({"messages": user("a"), "tools": [tool]}).tools
    assert made.model_dump() == {
        "type": "function",
        "function": {"name": "f", "description": "", "parameters": {"a": 1}},
    }
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


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_an_answer(form):
    """Every form of calls: the answer, a call, whose schema may refer to its own parts, and nothing else."""
    _, tokenizer, _ = parts("llama")
    end = tokenizer.eos_token_id
    schema = json.loads(json.dumps(TOOLS[0]["function"]["parameters"]))
    schema["$defs"] = {"Name": schema["properties"].pop("name")}  # as pydantic writes a class of its own
    schema["properties"] = {"name": {"$ref": "#/$defs/Name"}, **schema["properties"]}
    tools = {"depth": schema, "now": {}}
    answer = json_rule({"type": "object", "properties": {"deep": {"type": "boolean"}}, "required": ["deep"]})
    make = constraint(tokenizer, frozenset({end}), [answer, *call_rules(tools, CALLS[form])])
    call = FORMS[form][0].removeprefix("[TOOL_CALLS] ")
    fitting = {call, '{"deep": true}', call.replace("depth", "now")}
    for text in (*fitting, call.replace("north", "east"), call.replace("depth", "dept"), "It is deep", f"{call}{call}"):
        assert follows(make(), tokenizer, text) == (text in fitting), text


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
