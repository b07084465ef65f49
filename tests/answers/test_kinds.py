"""Answers as models write them beside their form: stop texts, open thoughts, tags around answers, quotes, broken calls."""

from copy import copy
from types import SimpleNamespace
from unittest import mock

import pytest
from families import TOOL, XML, chatml, family_tokenizer, follows, joined, read_pieces

from locret_kit.answers import forms
from locret_kit.answers.forms import AnswerForm, answer_form, call_form
from locret_kit.answers.grammar import call_rules
from locret_kit.answers.reader import Reader
from locret_kit.serving.bodies import ChatBody
from locret_kit.serving.completions import form_of_answer

ANY = {"properties": {
    "t": {"type": ["string", "null", "integer", "boolean", "array"]}, "s": {"type": "string"}, "n": {"type": "integer"},
}}  # fmt: skip
SCHEMAS = {"w": ANY, "now": {}, "depth": TOOL["function"]["parameters"]}


def form_of(template: str, base: str = "granite-4") -> AnswerForm:
    tokenizer = copy(family_tokenizer(base))
    tokenizer.chat_template = template
    return answer_form(tokenizer, tools=True)


def read(form: AnswerForm, answer: str, **given) -> list[tuple[str, str]]:
    """The events, the same whole, in characters and in two pieces."""
    found = list[list[tuple[str, str]]]()
    for pieces in ([answer], [*answer], *([answer[:at], answer[at:]] for at in range(1, len(answer)))):
        found.append(read_pieces(Reader(form, SCHEMAS, **given), pieces))
        assert found[-1] == found[0], pieces
    return found[0]


CALL = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
NOW = [("call", "now"), ("arguments", "{}")]
THINKS = "{{ tools }}<tool_call><think></think>"


@pytest.mark.parametrize(("template", "answer", "stops", "events"), [
    (THINKS, "<think>a\n\nQ: b</think>\n\nYes.\n\nQ: c", ["\n\n"], [("thought", "a\n\nQ: b"), ("text", "Yes.")]),
    (THINKS, "<think>Q: b</think>Yes. Q: c", ["Q:"], [("thought", "Q: b"), ("text", "Yes. ")]),
    (THINKS, '<tool_call>{"name": "now", "arguments": {"a": "Q: b"}}</tool_call>Yes. Q:', ["Q:"],
     [("call", "now"), ("arguments", '{"a": "Q: b"}'), ("text", "Yes. ")]),
    ("<|channel|><|message|>{{ tools }}", "<|channel|>analysis<|message|>Q: a<|end|><|start|>assistant<|channel|>final"
     "<|message|>Yes. Q: c", ["Q:"], [("thought", "Q: a"), ("text", "Yes. ")]),
    (THINKS, "abcd", ["abce", "bcd", "bc"], [("text", "a")]), (THINKS, "a Q", ["Q:", "Qu"], [("text", "a Q")]),
])  # fmt: skip
def test_a_stop_text_ends_the_text_alone(template, answer, stops, events):
    assert read(form_of(template), answer, stops=stops) == events


@pytest.mark.parametrize(("template", "answer", "events"), [
    (THINKS, f"I look.\n{CALL}\n", [("thought", "I look."), *NOW]),
    (THINKS, f"I write <tool_call> tags. {CALL}{CALL}", [("thought", "I write <tool_call> tags."), *NOW, *NOW]),
    (THINKS, f"I look. {CALL} and so", [("thought", f"I look. {CALL} and so")]),
    (THINKS, f"I look. {CALL}</think>Yes.", [("thought", f"I look. {CALL}"), ("text", "Yes.")]),
    (THINKS, f"I look. {CALL.replace('now', 'other')}", [("thought", f"I look. {CALL.replace('now', 'other')}")]),
    (THINKS, 'I look. <tool_call>{"name": "now", "argu', [("thought", 'I look. <tool_call>{"name": "now", "argu')]),
    ("{{ tools }}<|tool_call_begin|><think></think>", "I look. <|tool_calls_section_begin|><|tool_call_begin|>functions.now:0"
     "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>", [("thought", "I look."), *NOW]),
    (chatml("", tools="<function=<think></think>"), f"I look. {XML}",
     [("thought", "I look."), ("call", "depth"), ("arguments", '{"place": "north \\"bay\\"", "days": 3, "tide": true}')]),
])  # fmt: skip
def test_calls_that_end_an_open_thought(template, answer, events):
    assert read(form_of(template), answer, thinks=True) == events


def test_a_call_in_a_thought_that_the_bound_cuts_is_a_thought():
    reader = Reader(form_of(THINKS), SCHEMAS, thinks=True)
    assert joined([*reader.feed(f"I look. {CALL}"), *reader.end(cut=True)]) == [("thought", f"I look. {CALL}")]


@pytest.mark.parametrize("thinks", [True, False])
@pytest.mark.parametrize("answer", ["<think><think>Hm.</think>Yes.", "<think>\n<think> <think>Hm.</think>\nYes."])
def test_a_mark_more_than_once(answer, thinks):
    assert read(form_of(THINKS), answer, thinks=thinks) == [("thought", "Hm."), ("text", "Yes.")]


TURN = (
    "{%% for m in messages %%}{%% if m.role == 'assistant' %%}%s{%% else %%}{{ m.role }}: {{ m.content }}\n{%% endif %%}"
    "{%% endfor %%}"
)
CUTS = TURN % (
    "{% set c = m.content %}{% if '<answer>' in c %}{% set c = c.split('<answer>')[-1].split('</answer>')[0] %}{% endif %}"
    "{{ c }}"
)
WRITES = TURN % "<final>\n{{ m.content }}\n</final>"
TELLS = (
    "Write your thoughts between <think></think> and your response between <response></response>. "
    + TURN % "{{ m.content }}"
)
RESULTS = (
    "{% for m in messages %}{% if m.role == 'tool' %}<response>{{ m.content }}</response>{% else %}{{ m.content }}{% endif %}"
    "{% endfor %}{{ tools }}<invoke name="
)


@pytest.mark.parametrize(("template", "answer", "text"), [
    (CUTS, "<answer>\nFive.\n</answer>\n", "Five."), (WRITES, "<final>Five.</final>", "Five."),
    (TELLS, "<response>Five.</response>", "Five."),
    (TELLS, "Use `<response>`ok`</response>`.", "Use `<response>`ok`</response>`."),
    (CUTS, "<answer>a</answer> is a tag </answer>", "a</answer> is a tag"),
    (CUTS, "so <answer>a</answer>", "so <answer>a</answer>"),
    (RESULTS, "<response>ok</response>", "<response>ok</response>"), (RESULTS, "a <response>", "a <response>"),
])  # fmt: skip
def test_tags_around_an_answer(template, answer, text):
    for thought in ("", "<think>Hm.</think>\n"):
        form = form_of(f"{{# <think></think> #}}{template}")
        found = read(form, thought + answer)
        assert found == [*([("thought", "Hm.")] if thought else []), ("text", text)]


MINIMAX = chatml(
    "{{- m.content }}{%- for call in m.tool_calls or [] %}"
    "{{- '<minimax:tool_call>\n<invoke name=\"' + call.function.name + '\">\n' }}"
    "{%- for k, v in call.function.arguments.items() %}{{- '<parameter name=\"' + k + '\">' }}"
    "{{- v if v is string else v | tojson }}{{- '</parameter>\n' }}{%- endfor %}"
    "{{- '</invoke>\n</minimax:tool_call>' }}{%- endfor %}",
    tools="<invoke name=",
)
MINI = '<minimax:tool_call>\n<invoke name="w">\n<parameter name="{}">{}</parameter>\n</invoke>\n</minimax:tool_call>'
QWEN = "<tool_call>\n<function=w>\n<parameter={}>\n{}\n</parameter>\n</function>\n</tool_call>"
GEMMA = "<|tool_call>call:w{{{}:{}}}<tool_call|>"
LFM2 = "<|tool_call_start|>[w({}={})]<|tool_call_end|>"
TEMPLATES = {
    MINI: MINIMAX, QWEN: chatml(
        "{{- m.content }}{%- for call in m.tool_calls or [] %}{{- '<tool_call>\n<function=' + call.function.name + '>\n' }}"
        "{%- for k, v in call.function.arguments.items() %}{{- '<parameter=' + k + '>\n' + (v | string) + '\n</parameter>\n' }}"
        "{%- endfor %}{{- '</function>\n</tool_call>' }}{%- endfor %}", tools="<function="),
    GEMMA: "{{ tools }}<|tool_call>", LFM2: "{{ tools }}<|tool_list_start|>",
}  # fmt: skip


@pytest.mark.parametrize(("form", "key", "value", "arguments"), [
    *((form, "t", f"{quote}{text}{quote}", f'{{"t": "{text}"}}')
      for form, quote in ((GEMMA, '<|"|>'), (LFM2, "'")) for text in ("None", "null", "42", "true", "[1, 2]")),
    (GEMMA, "n", '<|"|>42<|"|>', '{"n": 42}'), (LFM2, "n", '"42"', '{"n": 42}'), (GEMMA, "t", "null", '{"t": null}'),
    (MINI, "s", "\nx\n", '{"s": "\\nx\\n"}'), (MINI, "t", "None", '{"t": "None"}'), (MINI, "t", "null", '{"t": null}'),
    (QWEN, "s", "\nx\n", '{"s": "\\nx\\n"}'), (QWEN, "s", "x", '{"s": "x"}'), (QWEN, "t", "None", '{"t": null}'),
    (LFM2, "s", '"<|tool_call_start|>[now()]<|tool_call_end|>"', '{"s": "<|tool_call_start|>[now()]<|tool_call_end|>"}'),
    (LFM2, "s", r"'it\'s \d'", '{"s": "it\'s \\\\d"}'), (LFM2, "n", "9007199254740993", '{"n": 9007199254740993}'),
])  # fmt: skip
def test_values_of_arguments(form, key, value, arguments):
    assert read(form_of(TEMPLATES[form]), form.format(key, value)) == [("call", "w"), ("arguments", arguments)]


def test_a_grammar_writes_a_call_as_the_template_does():
    form = form_of(MINIMAX).calls
    assert form.written[1:3] == ('<parameter name="{key}">', "</parameter>\n") and form.written[0].startswith(
        "<minimax:tool_call>"
    )
    assert call_rules({"w": ANY}, form)


JSON = '{"name": "now", "arguments": {}}'
KIMI = "<|tool_call_begin|>functions.w:0<|tool_call_argument_begin|>"


@pytest.mark.parametrize(("template", "answer", "events"), [
    ("<|tool_call|>", f"<|tool_call|>[{JSON}] So.", [*NOW, ("text", " So.")]),
    ("[TOOL_CALLS]", f"[TOOL_CALLS] [{JSON}, {JSON}]\nSo.", [*NOW, *NOW, ("text", "\nSo.")]),
    ('"parameters"', f"{JSON}; {JSON}\n\nSo {{.", [*NOW, *NOW, ("text", "\n\nSo {.")]),
    ("<|python_tag|>", f"<|python_tag|>{JSON} So.", [*NOW, ("text", " So.")]),
    ("<tool_call>", f"<tool_call>{JSON} So.", [*NOW, ("text", " So.")]),
    ("<tool_call>", f'<tool_call>{JSON[:-1]}, "id": "x"}}}}</tool_call> So.', [*NOW, ("text", " So.")]),
    ("<TOOLCALL>", '<TOOLCALL>[{"name": "w", "arguments": {"s": "</TOOLCALL>"}}]</TOOLCALL>',
     [("call", "w"), ("arguments", '{"s": "</TOOLCALL>"}')]),
    ("<|tool_call_begin|>", KIMI + '{"s": "a<|tool_call_end|>b"}<|tool_call_end|>So.',
     [("call", "w"), ("arguments", '{"s": "a<|tool_call_end|>b"}'), ("text", "So.")]),
    ("<|tool_call_begin|>", KIMI + '{"n": 3<|tool_call_end|>So.', [("call", "w"), ("arguments", '{"n": 3'), ("text", "So.")]),
    ("<|tool_call_begin|>", KIMI + '{"s": "a<|tool_call_end|>So.', [("call", "w"), ("arguments", '{"s": "a'), ("text", "So.")]),
    ("<|tool_call_begin|>", f'{KIMI}{{"s": "a<|tool_call_end|>{KIMI}{{"n": 3}}<|tool_call_end|>',
     [("call", "w"), ("arguments", '{"s": "a'), ("call", "w"), ("arguments", '{"n": 3}')]),
    ("<|tool_list_start|>", "<|tool_call_start|>[other(s='<|tool_call_start|>[now()]<|tool_call_end|>')]<|tool_call_end|>",
     [("text", "<|tool_call_start|>[other(s='<|tool_call_start|>[now()]<|tool_call_end|>')]<|tool_call_end|>")]),
])  # fmt: skip
def test_calls_beside_their_form(template, answer, events):
    assert read(form_of("{{ tools }}" + template), answer) == events


@pytest.mark.parametrize(("name", "template", "before", "after"), [
    ("gpt-oss", "", "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>", ""),
    ("qwen3", "{# <think></think> #}" + CUTS, "<think>\nHm.\n</think>\n<answer>\n", "\n</answer>"),
    ("qwen3", "{# <think></think> #}" + TELLS, "<think>\nHm.\n</think>\n\n", ""),
])  # fmt: skip
def test_an_answer_of_a_schema_takes_the_models_own_way(name, template, before, after):
    tokenizer = copy(family_tokenizer(name))
    tokenizer.chat_template = template or tokenizer.chat_template
    engine = SimpleNamespace(tokenizer=tokenizer, stop_ids=frozenset({tokenizer.eos_token_id}))
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "boolean"}}}
    body = ChatBody.model_validate({"messages": [{"role": "user", "content": "a"}], "response_format": schema})
    form = answer_form(tokenizer)
    make, reader = form_of_answer(engine, body, form, False)
    for text, right in ((f"{before}true{after}", True), (f"{before}yes{after}", False), ("true", True)):
        assert follows(make(), tokenizer, text) == right, text
    assert read_pieces(reader(thinks=False), [f"{before}true{after}"])[-1] == ("text", "true")


def test_marks_that_the_vocabulary_alone_has():
    assert call_form("{{ tools }}", family_tokenizer("granite-4")).name == "tags"
    assert form_of("{{ messages }}", "gpt-oss").anywhere and not form_of("{{ messages }}").anywhere


@pytest.mark.parametrize("field", [{"open": "<c>", "close": "</c>", "content": "python-call-list"},
                                   {"open_pattern": r"(?=\[)", "content": "python-call-list"}])  # fmt: skip
def test_calls_of_python_in_a_transformers_that_cannot_read_them(field):
    from transformers.utils.chat_parsing import content_parsers, response_templates

    known = {name: parser for name, parser in content_parsers.CONTENT_PARSERS.items() if name != "python-call-list"}
    tokenizer = copy(family_tokenizer("magistral"))
    tokenizer.chat_template, tokenizer.response_template = "{{ tools }}", {"fields": {"tool_calls": field}}
    said = "[w(s='a', n=3)]"
    with (
        mock.patch.object(content_parsers, "CONTENT_PARSERS", known),
        mock.patch.object(response_templates, "CONTENT_PARSERS", known),
    ):
        text = f"<c>{said}</c>" if "open" in field else said
        assert read(answer_form(tokenizer, tools=True), text) == [("call", "w"), ("arguments", '{"s": "a", "n": 3}')]
        form = form_of("{{ tools }}<|tool_list_start|>")
        assert read(form, f"<|tool_call_start|>{said}<|tool_call_end|>")[0][0] == "call"


@pytest.mark.parametrize("name", ["tool_calls", "thinking"])
def test_a_field_that_this_transformers_cannot_read_is_an_error(name):
    tokenizer = copy(family_tokenizer("magistral"))
    tokenizer.chat_template = "{{ tools }}"
    tokenizer.response_template = {"fields": {name: {"open": "<c>", "content": "yaml-of-later"}}}
    with pytest.raises(ValueError, match=f"response_template, field '{name}': .*yaml-of-later"):
        forms.answer_form(tokenizer, tools=True)
