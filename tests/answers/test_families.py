"""Answers of ten families, read whole, token by token and with every cut, against what vLLM's parsers make of them."""

import json
from copy import copy
from pathlib import Path

import pytest
from families import ARGUMENTS, FAMILIES, TEXT, THOUGHT, TOOL, family_tokenizer, follows, joined, read_pieces
from real_templates import real_tokenizer

from locret_kit.answers.forms import UNKNOWN, answer_form
from locret_kit.answers.grammar import after_thought, call_rules
from locret_kit.answers.reader import Reader
from locret_kit.serving.constraint import constraint, speller
from locret_kit.text.template import render
from locret_kit.text.tokens import TextStream

RECORDED = json.loads((Path(__file__).parent / "vllm_parsers.json").read_text(encoding="utf-8"))
"""Of each family the thought, the text and the calls that vLLM 0.32 reads, or openai-harmony for gpt-oss, as
``tests/vllm/test_answers.py`` checks."""
SCHEMAS = {"depth": TOOL["function"]["parameters"]}


def new_reader(name: str) -> Reader:
    tokenizer = family_tokenizer(name)
    form = answer_form(tokenizer, tools=True)
    prompt = render(tokenizer, [{"role": "user", "content": "How deep?"}], generation=True, tools=[TOOL])
    return Reader(form, SCHEMAS, thinks=form.opened(prompt))


def read(name: str, pieces: list[str]) -> list[tuple[str, str]]:
    return read_pieces(new_reader(name), pieces)


def parts(runs: list[tuple[str, str]]) -> dict[str, str]:
    """Texts by the kinds of events, without the blanks around them."""
    kinds = ("thought", "text", "call", "arguments")
    return {kind: "".join(text for one, text in runs if one == kind).strip() for kind in kinds}


@pytest.mark.parametrize("name", FAMILIES)
def test_an_answer_is_read_the_same_in_whatever_pieces(name):
    answer, tokenizer = FAMILIES[name].answer, family_tokenizer(name)
    whole = read(name, [answer])
    assert tuple(kind for kind, text in whole if text.strip()) == FAMILIES[name].events
    assert new_reader(name).thinks == FAMILIES[name].thinks
    assert read(name, list(answer)) == whole
    for at in range(len(answer)):
        assert read(name, [answer[:at], answer[at:]]) == whole, at
    marks = new_reader(name).marks
    shown = frozenset(id for mark, id in tokenizer.get_added_vocab().items() if mark in marks)
    stream = TextStream(tokenizer, shown=shown)
    ids = tokenizer(answer, add_special_tokens=False).input_ids
    pieces = [*map(stream.add, ids)]
    assert read(name, [*pieces, stream.end()]) == whole


@pytest.mark.parametrize("name", FAMILIES)
def test_an_answer_is_what_its_familys_parsers_read(name):
    found = parts(read(name, [FAMILIES[name].answer]))
    assert (found["text"], found["call"], json.loads(found["arguments"])) == (TEXT, "depth", ARGUMENTS)
    assert found["thought"] == (THOUGHT if "thought" in FAMILIES[name].events else "")
    reference = RECORDED[name]
    assert (found["thought"], found["text"]) == (reference["thought"], reference["text"])
    assert [[found["call"], json.loads(found["arguments"])]] == reference["calls"]


@pytest.mark.parametrize("name", FAMILIES)
def test_an_answer_that_is_cut_is_a_beginning_of_the_whole(name):
    answer = FAMILIES[name].answer
    whole = parts(read(name, [answer]))
    for at in range(len(answer)):
        reader = new_reader(name)
        found = parts(joined([*reader.feed(answer[:at]), *reader.end(cut=True)]))
        assert whole["thought"].startswith(found["thought"])
        assert found["call"] in ("", whole["call"]) and whole["arguments"].startswith(found["arguments"])
        assert whole["text"].startswith(found["text"].rstrip("<[").strip())  # a sign alone may be of any text


def _deep(text: str) -> str:
    return text.replace("{", "<\uff5ctool\u2581").replace("}", "\uff5c>").replace("_", "\u2581")


HARMONY = "<|end|><|start|>assistant".join([
    "<|channel|>analysis<|message|>A", "<|channel|>commentary<|message|>B", "<|channel|>analysis<|message|>C",
    "<|channel|>analysis<|message|>D", '<|channel|>commentary to=functions.depth<|message|>{"days": 3}',
    "<|channel|>final<|message|>E",
]) + "<|return|>"  # fmt: skip
DEPTH, NONE = ([("call", "depth"), ("arguments", values)] for values in ('{"days": 3}', "{}"))
OTHERS = [
    ("<|tool_call_begin|>", "Yes.<|tool_calls_section_begin|><|tool_call_begin|>functions.depth:0<|tool_call_argument_begin|>"
     '{"days": 3}<|tool_call_end|><|tool_calls_section_end|>', [("text", "Yes."), *DEPTH]),
    (_deep("{call_begin}"), _deep("{calls_begin}{call_begin}depth{sep}") + '{"days": 3}' + _deep("{call_end}{calls_end}"), DEPTH),
    ("<TOOLCALL>", '<TOOLCALL>[{"name": "depth", "arguments": {"days": 3}}]</TOOLCALL>', DEPTH),
    ("<|tool_call|>", '<|tool_call|>[{"name": "depth", "arguments": {"days": 3}}]', DEPTH),
    ("<|python_tag|>", '<|python_tag|>{"name": "depth", "parameters": {"days": 3}}', DEPTH),
    ('"parameters"', '{"name": "depth", "parameters": {"days": 3}}', DEPTH),
    ("[TOOL_CALLS]", 'Yes.[TOOL_CALLS] [{"name": "depth", "arguments": {"days": 3}}]', [("text", "Yes."), *DEPTH]),
    ("[TOOL_CALLS][THINK][/THINK]", '[THINK]Hm.[/THINK]depth? [TOOL_CALLS]depth{"days": 3}',
     [("thought", "Hm."), ("text", "depth?"), *DEPTH]),
    ("<seed:think></seed:think><function=", "<seed:think>Hm.</seed:think>\n<seed:tool_call><function=depth><parameter=days>3"
     "</parameter></function></seed:tool_call>", [("thought", "Hm."), *DEPTH]),
    ("<think></think><invoke name=", '<think>\nHm.\n</think>\n\n<minimax:tool_call>\n<invoke name="depth">\n'
     '<parameter name="days">3' "</parameter>\n</invoke>\n</minimax:tool_call>", [("thought", "Hm."), *DEPTH]),
    ("<|channel>thought\n<|tool_call>", "<|channel>thought\nHm.<channel|>Yes.<|tool_call>call:depth{days:3}<tool_call|>",
     [("thought", "Hm."), ("text", "Yes."), *DEPTH]),
    ("<|START_THINKING|>", "<|START_THINKING|>Hm.<|END_THINKING|>Yes.", [("thought", "Hm."), ("text", "Yes.")]),
    ("\u25c1/think\u25b7", "\u25c1think\u25b7Hm.\u25c1/think\u25b7Yes.", [("thought", "Hm."), ("text", "Yes.")]),
    ("Here is my thought process:", "Here is my thought process: Hm. Here is my response: Yes.",
     [("thought", "Hm."), ("text", "Yes.")]),
    ("<think></think><response>", "<think>Hm.</think><response>Yes.</response>", [("thought", "Hm."), ("text", "Yes.")]),
    ("<|channel|><|message|>", "<|channel|>final<|message|>Yes.<|return|>", [("text", "Yes.")]),
    ("<|channel|><|message|>", HARMONY, [("thought", "A"), ("text", "B"), ("thought", "\nC\nD"), *DEPTH, ("text", "\nE")]),
    ("<think></think><tool_call>", '<think>A</think>B<tool_call>{"name": "depth", "arguments": {"days": 3}}</tool_call>'
     "<think>C</think>D", [("thought", "A"), ("text", "B"), *DEPTH, ("thought", "\nC"), ("text", "\nD")]),
    ("<|channel|><|message|>", ' to=functions.depth<|channel|>commentary json<|message|>{"days": 3}<|call|>', DEPTH),
    ("<think></think>", "<think>\n\n</think>\n\nYes, <think> is a tag, and so is </think>.",
     [("text", "Yes, <think> is a tag, and so is </think>.")]),
    ("<think></think><tool_call>", '<think>A <tool_call> {"name": "depth"} </think>Yes.',
     [("thought", 'A <tool_call> {"name": "depth"}'), ("text", "Yes.")]),
    ("<think></think>", "<think>Hm.", [("thought", "Hm.")]),
    ("<tool_call>", '<tool_call>{"name": "depth", "arguments": {"place": "a \\\\\\" } </tool_call> ]"}}</tool_call>',
     [("call", "depth"), ("arguments", '{"place": "a \\\\\\" } </tool_call> ]"}')]),
    ('"parameters"', '{"name": "depth", "parameters": {"days": 3}}; {"name": "depth", "parameters": null}', [*DEPTH, *NONE]),
    ("<tool_call>", '<tool_call>{"name": "depth", "arguments": ""}</tool_call>', NONE),
    ("<tool_call>", '<tool_call>\n{"name": "depth", "arguments": {"days": 3}}\n' * 2 + "</tool_call>", [*DEPTH, *DEPTH]),
    ("<tool_call>", '<tool_call>\n{"name": "depth", "arguments": {"days": 3}\n</tool_call> Yes.', [*DEPTH, ("text", " Yes.")]),
    ("<tool_call>", 'Yes.\n```json\n{\n  "name": "depth",\n  "arguments": {"days": 3}\n}\n```\nThen?',
     [("text", "Yes."), *DEPTH, ("text", "\nThen?")]),
    ("<tool_call>", '```\n{{"name": "depth", "arguments": {"days": 3}}}\n```', DEPTH),
    ("<tool_call>", '<tool_call>\n{{"name": "depth", "arguments": {"days": 3}}}\n</tool_call>', DEPTH),
    ("<tool_call>", '```json\n{"name": "Ada", "arguments": {"days": 3}}\n``` or ```json\n{"days": 3}\n```',
     [("text", '```json\n{"name": "Ada", "arguments": {"days": 3}}\n``` or ```json\n{"days": 3}\n```')]),
    ("<|channel|><|message|>", "<|channel|>commentary to=functions.depth <|constrain|>json<|message|><|call|>", NONE),
    ("<|tool_call_begin|>", "<|tool_call_begin|>functions.depth:0<|tool_call_argument_begin|><|tool_call_end|>", NONE),
    ("<|tool_list_start|>", "Yes.<|tool_call_start|>[depth(days=3)]<|tool_call_end|>", [("text", "Yes."), *DEPTH]),
]  # fmt: skip
"""What a template says, an answer of its model, and the events."""


@pytest.mark.parametrize(("marks", "answer", "events"), OTHERS)
def test_forms_of_others(marks, answer, events):
    tokenizer = copy(family_tokenizer("granite-4"))
    tokenizer.chat_template, thoughts = f"{{{{ tools }}}}{marks}", None
    for pieces in ([answer], list(answer), *([answer[:at], answer[at:]] for at in range(len(answer)))):
        reader = Reader(answer_form(tokenizer, tools=True), SCHEMAS)
        assert read_pieces(reader, pieces) == events, pieces
        thoughts = thoughts or reader.thoughts
        assert reader.thoughts == thoughts, pieces


def test_without_tools_a_call_is_text_and_channels_are_read():
    tokenizer = family_tokenizer("gpt-oss")
    reader = Reader(answer_form(tokenizer))
    said = f"<|channel|>analysis<|message|>{THOUGHT}<|end|><|start|>assistant<|channel|>final<|message|>{TEXT}"
    assert read_pieces(reader, [f"{said}<|return|>"]) == [("thought", THOUGHT), ("text", TEXT)]
    assert all(mark in reader.marks for mark in ("<|channel|>", "<|message|>", "<|start|>", "<|end|>"))
    qwen = Reader(answer_form(family_tokenizer("qwen3")))
    assert read_pieces(qwen, [FAMILIES["qwen3"].answer])[1][1].endswith("</tool_call>")


def test_a_form_that_nothing_tells():
    tokenizer = copy(real_tokenizer("smollm2"))
    tokenizer.chat_template = "{{ tools }}{{ messages }}"
    form = answer_form(tokenizer, tools=True)
    assert form.calls == UNKNOWN and not form.thinks
    reader = Reader(form, SCHEMAS)
    text = "<call>depth(north)</call> <think>no</think>"
    assert read_pieces(reader, [text]) == [("text", text)]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_grammar_lets_a_family_think_and_call_in_its_own_form(name):
    """The recorded answer without its text, token by token, and no answer without a call."""
    family, tokenizer = FAMILIES[name], family_tokenizer(name)
    reader, spell = new_reader(name), speller(tokenizer)
    rules = call_rules(SCHEMAS, reader.form.calls, spell)
    if reader.form.words is not None:
        rules = after_thought(rules, reader.form.words, reader.thinks, spell)
    maker = constraint(tokenizer, frozenset({tokenizer.eos_token_id}), rules, reader.form.calls.text_end)
    start = family.answer.index(reader.form.words[0][:1]) if "thought" in family.events and not reader.thinks else 0
    answer = family.answer[start:].removesuffix("<|call|>").strip()
    text = answer.replace(f"{TEXT}\n\n", "").replace(f"{TEXT}\n", "").replace(TEXT, "")
    text = text.replace("<|channel|>commentary<|message|><|end|><|start|>assistant", "")
    for said, right in ((text, True), (f"{answer} more", False), (text[:-9], False)):
        assert follows(maker(), tokenizer, said) == right, said
