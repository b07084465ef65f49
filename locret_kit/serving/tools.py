"""Tools in prompts, and the grammars of their calls.

A template that knows ``tools`` is given them. For any other the conversation is rewritten: the tools stand in the system prompt,
and calls and results in the messages, in the form of Qwen and Hermes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from ..answers.forms import CLOSE, OPEN
from ..answers.values import properties_of, resolved, types_of
from .constraint import json_rule
from .messages import JsonObject, TemplateMessage, Tool

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
            made.append({"role": "assistant", "content": "\n".join(texts)})
        else:
            made.append({"role": message["role"], "content": content})
    if tools:
        said = WORDS.format(
            tools="\n".join(json.dumps(tool.function.model_dump(), ensure_ascii=False) for tool in tools)
        )
        before = f"{made.pop(0)['content']}\n\n" if made and made[0]["role"] == "system" else ""
        made.insert(0, {"role": "system", "content": before + said})
    return made


def call_rules(tools: Mapping[str, JsonObject], form: str) -> list[str]:
    """The rules of an answer that calls one of the tools, whose names have the schemas of their arguments. Each has its schema as
    it is, since references in one count from its root."""
    if form in ("gemma", "declared"):
        raise ValueError(
            "tool_choice must be 'auto' or 'none', without response_format: no grammar of this model's calls is here"
        )
    if form in WRITTEN:
        return [written(*tool, form) for tool in tools.items()]
    arguments = "parameters" if form == "object" else "arguments"
    before, after = {"tags": ([f"{OPEN}\n"], [f"\n{CLOSE}"]), "list": (["["], ["]"]), "object": ([], [])}[form]
    rules = []
    for name, schema in tools.items():
        said = json.dumps(name, ensure_ascii=False)
        before_arguments = [*before, "{", '"name"', ": ", said, ", ", f'"{arguments}"', ": "]
        rules.append(json_rule(schema or {"type": "object"}, before_arguments, ["}", *after]))
    return rules


def written(name: str, schema: JsonObject, form: str) -> str:
    """The rule of a call whose parameters have tags of their own, in the schema's order: texts as they are, the rest as JSON."""
    head, begin, end, tail = WRITTEN[form]
    required = schema.get("required")
    shared: JsonObject = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    rule = json.dumps(head.format(name))
    for key, given in properties_of(schema).items():
        one = resolved(given, schema)
        choices, types = one.get("enum"), types_of(one, schema)
        if isinstance(choices, list) and types == {"string"}:
            value = f"({' | '.join(json.dumps(choice + end) for choice in choices)})"
        elif not types or "string" in types:
            value = f"{form}_text"
        else:
            value = json_rule({**one, **shared}, (), (end,))
        needed = isinstance(required, list) and key in required
        rule += f" ({json.dumps(begin.format(key))} {value}){'' if needed else '?'}"
    return f"{rule} {json.dumps(tail)}"
