"""Calls of tools by themselves: what is read of an answer, and what a grammar lets a model write."""

import ast
import json
from copy import copy
from itertools import pairwise
from types import SimpleNamespace

import pytest
import regex
from families import follows
from http_bodies import CHAT_TOOL, user
from hypothesis import assume, given
from hypothesis import strategies as st
from read_texts import parts
from real_templates import real_tokenizer
from written_calls import OWN, TYPED, TYPES, pairs, read, reader, xml

from locret_kit.answers.forms import CALLS, UNKNOWN, AnswerForm, answer_form, call_form, example
from locret_kit.answers.grammar import call_rules, json_rule
from locret_kit.answers.reader import Reader
from locret_kit.serving import completions
from locret_kit.serving.bodies import ChatBody
from locret_kit.serving.constraint import constraint, speller

FORMS = {
    "tags": '<tool_call>\n{"name": "depth", "arguments": {"name": "north", "tide": true}}\n</tool_call>',
    "list": '[{"name": "depth", "arguments": {"name": "north", "tide": true}}]',
    "object": '{"name": "depth", "parameters": {"name": "north", "tide": true}}',
}


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


def test_what_is_no_call_is_text():
    for form, text in [
        ("tags", "a < b <tool"), ("tags", "x <tool_call>{}</tool_call> y"), ("tags", '<tool_call>{"name": "other"}</tool_call>'),
        ("tags", "<tool_call>never closed"), ("object", '{"a": 1}'), ("object", "words {}"), ("list", '[{"name": "other"}]'),
        ("list", "[1] or {2}"), ("object", '{"name": "depth"'), ("list", ""),
        ("tags", '<tool_call>{"name": []}</tool_call>'), ("object", '{"name": {}}'), ("list", "[[], null]"),
    ]:  # fmt: skip
        assert read(reader(form, ["depth"]), text) == (text, [])


@pytest.mark.parametrize("form", OWN)
def test_forms_of_other_families(form):
    """Forms of Qwen3-Coder and Qwen 3.5, GLM 4.5, Gemma 4."""
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
    st.sampled_from("abc"), st.recursive(LEAVES, lambda each: st.lists(each, max_size=3), max_leaves=4)
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
    kinds = {"city": "string", "wind": "object", "n": ["integer", "boolean", "null"]}
    schema = {"properties": {key: {"type": kind} for key, kind in kinds.items()}}
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
    *((f"<tool_call><function=w><parameter=text>\na\n<parameter={key}>\n3\n</parameter></function></tool_call>", "",
       [("w", {"text": "a", key: 3})]) for key in ("n", "SENDER")),
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
    (xml("w", {"all": r'{"a": "\ud83d"}'}), "", [("w", {"all": r'{"a": "\ud83d"}'})]),
]  # fmt: skip
"""Answers in Qwen's form as models write them, their text and calls."""
LOOSE = {"$defs": {"I": {"anyOf": [{"type": "integer"}, {"$ref": "#/$defs/I"}]}}, "properties": {
    "text": {"type": "string"}, "none": {"anyOf": [{"type": "string"}, {"type": "null"}]}, "refers": {"$ref": "#/$defs/I"},
    "kind": {"enum": [1, 2, "x"]}, "one": {"type": "integer", "nullable": True}, "all": {"allOf": [{"type": "object"}]},
    "is": {"const": 3}, "any": {}, "n": {"type": "number"}, "SENDER": {"type": "number"},
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
    kinds = {"one": {"type": "string", "enum": ["a", None, 1]}, "two": {"const": "b"}}
    chosen = constraint(
        tokenizer, frozenset({tokenizer.eos_token_id}), call_rules({"w": {"properties": kinds}}, form), form.text_end
    )
    for one, two in (("a", "b"), ("a", "c"), ("None", "b"), ("1", "b")):
        assert follows(chosen(), tokenizer, make("w", {"one": one, "two": two})) == ((one, two) == ("a", "b"))
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
    field = field | {"repeats": field["content"] == "json"}
    tokenizer.response_template = {"start_anchor": "a", "fields": {"tool_calls": field}}
    tokenizer.chat_template = "{{ tools }}"
    kinds = {"place": {"type": "string"}, "days": {"type": "integer"}}
    tools = {"depth": {"properties": kinds, "required": [*kinds], "type": "object", "additionalProperties": False}}
    form = answer_form(tokenizer, tools=True).calls
    if text is None:
        with pytest.raises(ValueError, match=f"must be 'auto' .*: of this tokenizer's calls, {field['content']} with"):
            call_rules(tools, form)
        assert read(Reader(AnswerForm(calls=form), tools), "<c>depth</c> so")[1] == []
        return
    ends, spell = frozenset({tokenizer.eos_token_id}), speller(tokenizer)
    maker = constraint(tokenizer, ends, call_rules(tools, form, spell), form.text_end)
    for said in (text, text.replace("depth", "other"), text.replace("3", "x"), "Hello"):
        assert follows(maker(), tokenizer, said) == (said == text), said
    (call,) = read(Reader(AnswerForm(calls=form), tools), f"I look.{text}")[1]
    assert (call.name, call.values) == ("depth", {"place": "a", "days": 3})
    if len(form.written) > 2 and (form.json or "kv" in field["content"]):
        with pytest.raises(ValueError, match="cannot write 'depth' or"):
            call_rules({"depth": {"properties": {"a\nb": {}}}}, form)


NAMES = [
    "depth", "my tool", "ns:tool", "a:1", "a/b", "a.b-c_1", "größe", "天气", 'a"b', "a>b", "a<b", "a{b", "a[b", "a\\b",
]  # fmt: skip
PLAIN = ("depth", "a.b-c_1", "größe", "天气")


@pytest.mark.parametrize("form", [*CALLS.values(), UNKNOWN], ids=lambda form: form.name)
def test_a_call_that_must_be_is_read_under_its_names_or_refused(form):
    """A form that ends a name at a blank would give a call that is read as text."""
    for name, key in [*((name, "k") for name in NAMES), *(("depth", key) for key in (*NAMES, "k\nl", "a b é"))]:
        tools = {name: {"type": "object", "properties": {key: {"type": "string"}}, "required": [key]}}
        said = example(form, name, [key])
        found = [(call.name, call.values) for call in read(Reader(AnswerForm(calls=form), tools), said)[1]]
        if {name, key} <= {*PLAIN, "k"} or found == [(name, {key: "v"})]:
            assert call_rules(tools, form) and found == [(name, {key: "v"})]
        else:
            with pytest.raises(ValueError, match="the model's form of calls cannot write"):
                call_rules(tools, form)


INTEGER = {"properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.mark.parametrize("schema", [
    INTEGER, INTEGER | {"type": ["object", "null"]}, {"$ref": "#/$defs/I", "$defs": {"I": INTEGER}},
    {"anyOf": [INTEGER, {"type": "null"}]},
])  # fmt: skip
def test_arguments_are_an_object_whatever_else_a_schema_takes(schema):
    tokenizer, form = real_tokenizer("smollm2"), CALLS["tags"]
    make = constraint(tokenizer, frozenset({tokenizer.eos_token_id}), call_rules({"w": schema}, form))
    for said, right in (('{"a": 1}', True), ('{"a": "x"}', False), ("3", False), ("null", False), ("[]", False)):
        text = f'<tool_call>\n{{"name": "w", "arguments": {said}}}\n</tool_call>'
        assert follows(make(), tokenizer, text) == right, said


def test_a_tools_name_may_have_a_colon_in_kimis_form():
    name, said = (
        "files:read",
        "<|tool_call_begin|>functions.files:read:3<|tool_call_argument_begin|>{}<|tool_call_end|>",
    )
    assert [call.name for call in read(Reader(AnswerForm(calls=CALLS["kimi"]), [name]), said)[1]] == [name]


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
    none = {"type": "object", "additionalProperties": False}
    number = none | {"properties": {"n": {"type": "integer"}}, "required": ["n"]}
    tools = [{"function": {"name": name, "parameters": x}} for name, x in (("w", number), ("now", none))]
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


def test_forms_of_templates():
    for template, form in (("", "tags"), ("{{ messages }}", "tags"), ("{{ tools }}[TOOL_CALLS]", "list")):
        assert call_form(template) == CALLS[form]
    assert call_form("{{ tools }}<tool_call>") == CALLS["tags"] and call_form("{{ tools }}") == UNKNOWN


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_an_answer(form):
    """Every form of calls: the answer, a call, whose schema may refer to its own parts, and nothing else."""
    _, tokenizer, _ = parts("llama")
    end = tokenizer.eos_token_id
    schema = json.loads(json.dumps(CHAT_TOOL["function"]["parameters"]))
    schema["$defs"] = {"Name": schema["properties"].pop("name")}  # as pydantic writes a class of its own
    schema["properties"] = {"name": {"$ref": "#/$defs/Name"}, **schema["properties"]}
    tools = {"depth": schema, "now": {}}
    answer = json_rule({"type": "object", "properties": {"deep": {"type": "boolean"}}, "required": ["deep"]})
    make = constraint(tokenizer, frozenset({end}), [answer, *call_rules(tools, CALLS[form])])
    call = FORMS[form]
    fitting = {call, '{"deep": true}', call.replace("depth", "now")}
    for text in (*fitting, call.replace("north", "east"), call.replace("depth", "dept"), "It is deep", f"{call}{call}"):
        assert follows(make(), tokenizer, text) == (text in fitting), text
