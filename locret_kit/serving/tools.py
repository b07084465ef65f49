"""Tools in prompts, and the grammars of their calls.

A template that knows ``tools`` is given them. For any other the conversation is rewritten: the tools stand in the system prompt,
and calls and results in the messages, in the form of Qwen and Hermes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from ..answers.forms import CLOSE, DEEPSEEK, OPEN
from ..answers.values import properties_of, resolved, types_of
from .constraint import Spell, json_rule
from .messages import JsonObject, TemplateMessage, Tool

CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END, SEP = DEEPSEEK
WORDS = """You may call functions. Each is described by its name, its purpose and the JSON schema of its arguments:
{tools}
To call one, answer with nothing but
<tool_call>
{{"name": "its name", "arguments": {{"an argument": "its value"}}}}
</tool_call>"""
WRITTEN: dict[str, tuple[str, str, str, str]] = {
    "xml": ("<tool_call>\n<function={}>\n", "<parameter={}>\n", "\n</parameter>\n", "</function>\n</tool_call>"),
    "pairs": ("<tool_call>{}\n", "<arg_key>{}</arg_key>\n<arg_value>", "</arg_value>\n", "</tool_call>"),
}
"""Beginnings and ends of calls and of their parameters, as models write them."""
JSON_MARKS = {
    "tags": (f"{OPEN}\n", f"\n{CLOSE}"), "toolcall": ("<TOOLCALL>[", "]</TOOLCALL>"), "piped": ("<|tool_call|>[", "]"),
    "list": ("[", "]"),
}  # fmt: skip
"""Marks around a call that is one JSON object."""
NAMED = {
    "args": ("[TOOL_CALLS]{}[ARGS]", ""),
    "deepseek": (f"{CALLS_BEGIN}{CALL_BEGIN}function{SEP}{{}}\n```json\n", f"\n```{CALL_END}{CALLS_END}"),
    "kimi": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.{}:0<|tool_call_argument_begin|>",
        "<|tool_call_end|><|tool_calls_section_end|>",
    ),
    "channels": ("<|channel|>commentary to=functions.{} <|constrain|>json<|message|>", ""),
}
"""Marks around the arguments of a call."""


def rewritten(messages: Sequence[TemplateMessage], tools: Sequence[Tool]) -> list[TemplateMessage]:
    """The conversation for a template that knows no tools."""
    made: list[TemplateMessage] = []
    for message in messages:
        content = message["content"]
        if message["role"] == "tool":
            made.append({"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"})
        elif message.get("tool_calls"):
            calls = [json.dumps(call["function"], ensure_ascii=False) for call in message["tool_calls"]]
            texts = ([content] if content else []) + [f"{OPEN}\n{call}\n{CLOSE}" for call in calls]
            made.append({**message, "content": "\n".join(texts)})
            del made[-1]["tool_calls"]
        else:
            made.append(message)
    if tools:
        said = WORDS.format(
            tools="\n".join(json.dumps(tool.function.model_dump(), ensure_ascii=False) for tool in tools)
        )
        before = f"{made.pop(0)['content']}\n\n" if made and made[0]["role"] == "system" else ""
        made.insert(0, {"role": "system", "content": before + said})
    return made


def call_rules(tools: Mapping[str, JsonObject], form: str, spell: Spell = json.dumps) -> list[str]:
    """The rules of an answer that calls one of the tools, whose names have the schemas of their arguments. Each has its schema as
    it is, since references in one count from its root."""
    if form in ("gemma", "declared"):
        raise ValueError(
            "tool_choice must be 'auto' or 'none', without response_format: no grammar of this model's calls is here"
        )
    if form in WRITTEN:
        return [written(*tool, form, spell) for tool in tools.items()]
    rules = []
    for name, schema in tools.items():
        before, after = NAMED.get(form, ("", ""))
        pieces = [before.format(name)]
        if form not in NAMED:
            before, after = JSON_MARKS.get(form, ("", ""))
            arguments = "arguments" if before else "parameters"
            pieces = [before, "{", '"name"', ": ", json.dumps(name, ensure_ascii=False), ", ", f'"{arguments}"', ": "]
            after = "}" + after
        rules.append(json_rule(schema or {"type": "object"}, filter(None, pieces), filter(None, [after]), spell))
    return rules


def written(name: str, schema: JsonObject, form: str, spell: Spell) -> str:
    """The rule of a call whose parameters have tags of their own, in the schema's order: texts as they are, the rest as JSON."""
    head, begin, end, tail = WRITTEN[form]
    required = schema.get("required")
    shared: JsonObject = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    rule = spell(head.format(name))
    for key, given in properties_of(schema).items():
        one = resolved(given, schema)
        choices, types = one.get("enum"), types_of(one, schema)
        if isinstance(choices, list) and types == {"string"}:
            value = f"({' | '.join(spell(choice + end) for choice in choices)})"
        elif not types or "string" in types:
            value = f"{form}_text"
        else:
            value = json_rule({**one, **shared}, (), (end,), spell)
        needed = isinstance(required, list) and key in required
        rule += f" ({spell(begin.format(key))} {value}){'' if needed else '?'}"
    return f"{rule} {spell(tail)}"
