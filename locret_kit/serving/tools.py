"""Calls of tools: how a chat template writes them, and how they are read in an answer.

A template that knows ``tools`` is given them. For any other the conversation is rewritten: the tools stand in the system prompt,
and calls and results in the messages, in the form of Qwen and Hermes. Arguments that models write without quotes become values
of their schemas' types.
"""

from __future__ import annotations

import ast
import json
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import regex
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_parsing import parse_response
from transformers.utils.chat_parsing.response_templates import load_response_template

from .constraint import json_rule
from .messages import JsonObject, TemplateMessage, Tool, nested, tool_call

KINDS = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
    type(None): "null",
}
"""Types of values -> their names in a JSON schema."""


def properties_of(schema: JsonObject) -> JsonObject:
    """The schemas of arguments by name."""
    return known if isinstance(known := schema.get("properties"), dict) else {}


def resolved(schema: object, root: JsonObject, depth: int = 8) -> JsonObject:
    """A schema, or what its reference to a definition of ``root`` leads to; empty where it is none."""
    named = nested(schema, "$ref") if depth else None
    if isinstance(named, str):
        return resolved(nested(root, *named.removeprefix("#").split("/")[1:]), root, depth - 1)
    return schema if isinstance(schema, dict) else {}


def types_of(schema: object, root: JsonObject, seen: set[int] | None = None) -> set[str]:
    """Names of the types that a schema says; none where it says nothing."""
    one, seen = resolved(schema, root), seen or set()
    if id(one) in seen:
        return set()
    seen.add(id(one))
    said, values = one.get("type", []), one.get("enum", [one["const"]] if "const" in one else [])
    types = {str(name) for name in (said if isinstance(said, list) else [said])}
    types |= {KINDS[type(value)] for value in (values if isinstance(values, list) else ()) if not types}
    for name in ("anyOf", "oneOf", "allOf"):
        choices = one.get(name)
        types.update(*(types_of(inner, root, seen) for inner in (choices if isinstance(choices, list) else ())))
    return types | ({"null"} if one.get("nullable") else set())


def typed(text: str, types: set[str]) -> object:
    """The value of an argument that is written without quotes: of its types, else the text as it is."""
    for read in (json.loads, ast.literal_eval) if types - {"string"} else ():
        with suppress(ValueError, SyntaxError, LookupError, TypeError, RecursionError, MemoryError, OverflowError):
            value = read(text.strip())
            json.dumps(value, allow_nan=False)
            if isinstance(value, float) and "number" not in types and value.is_integer():
                value = int(value)
            if types & {KINDS[type(value)], "number" if type(value) is int else ""} - {"string"}:
                return value
    return text


Form = Literal["tags", "xml", "pairs", "gemma", "declared", "list", "object"]
OPEN, CLOSE = "<tool_call>", "</tool_call>"
TAGS = "<tool_call>|<seed:tool_call>|<minimax:tool_call>"
WORDS = """You may call functions. Each is described by its name, its purpose and the JSON schema of its arguments:
{tools}
To call one, answer with nothing but
<tool_call>
{{"name": "its name", "arguments": {{"an argument": "its value"}}}}
</tool_call>"""


@dataclass(frozen=True)
class Markup:
    """How calls are marked in an answer.

    Attributes:
        open, close: patterns of what calls stand between. call: the pattern of one whose parameters have tags of their own;
            `field`: a field of a response template of transformers, by which others are read that are no JSON.
    """

    open: str
    close: str
    call: str = ""
    field: Mapping[str, object] | None = None


MARKUP: dict[Form, Markup] = {
    "tags": Markup(OPEN, CLOSE),
    "xml": Markup(
        f"{TAGS}|<function=|<invoke name=", ENDS := f"(?:{TAGS.replace('<', '</')})",
        rf"""(?:(?:{TAGS})\s*)?<(?:function|invoke name)="?(?P<name>[^">\n]+)"?>\s*"""
        r"""(?:(?><parameter(?: name)?="?(?P<key>[^">\n]+)"?>\n?(?P<value>.*?)\n?(?:</parameter>(?=\s*(?:<parameter|</|\Z))"""
        r"""|(?=\n<parameter(?: name)?="?(?:KEYS)"?>|</(?:function|invoke)>\s*(?:</\S*tool|\Z)))\s*))*+"""
        rf"""(?:</(?:function|invoke)>\s*{ENDS}?|(?<=</parameter>\s*)(?:{ENDS}|\Z))""",
    ),
    "pairs": Markup(
        OPEN, CLOSE,
        r"<tool_call>\s*(?P<name>[^\s<{\[]+)\s*(?:(?><arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>"
        r"(?=\s*(?:<arg_key>|</tool|\Z))\s*))*+(?:</tool_call>|(?<=</arg_value>\s*)\Z)",
    ),
    "gemma": Markup("<\\|tool_call>", r"<tool_call\|>", field={
        "open_pattern": r"<\|tool_call>\s*call:(?P<name>[^\s{]+)", "close_pattern": r"<tool_call\|>", "repeats": True,
        "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}, "content": "json",
        "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
    }),
}  # fmt: skip
WRITTEN: dict[Form, tuple[str, str, str, str]] = {
    "xml": ("<tool_call>\n<function={}>\n", "<parameter={}>\n", "\n</parameter>\n", "</function>\n</tool_call>"),
    "pairs": ("<tool_call>{}\n", "<arg_key>{}</arg_key>\n<arg_value>", "</arg_value>\n", "</tool_call>"),
}
"""Beginnings and ends of calls and of their parameters, as models write them."""
MARKS: dict[str, Form] = {"<function=": "xml", "<invoke name=": "xml", "<arg_key>": "pairs"}
"""What a template says whose calls are no JSON."""
FALSE_ENDS = 16
"""Ends of calls within arguments, at most."""


def knows_tools(template: str | None) -> bool:
    """Whether a chat template has a place for tools."""
    return template is not None and "tools" in template


def form_of(template: str | None) -> Form:
    """The form of calls in the answers of a model with this template: each between tags (Qwen, Hermes), a list of them
    (Mistral), or one object as the whole answer (Llama 3). Between tags there is JSON, or parameters between tags of their own
    (Qwen 3.5, GLM 4.5), or Gemma 4's own notation."""
    if form := next((form for mark, form in MARKS.items() if knows_tools(template) and mark in str(template)), None):
        return form
    if not knows_tools(template) or OPEN in str(template):
        return "tags"
    if "<|tool_call>" in str(template):
        return "gemma"
    return "list" if "[TOOL_CALLS]" in str(template) else "object"


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


def template_of(field: Mapping[str, object]) -> dict[str, object]:
    """A response template of nothing but calls."""
    return {"start_anchor": "<", "fields": {"tool_calls": field}}


def declared_by(tokenizer: PreTrainedTokenizerBase) -> Mapping[str, object] | None:
    """The field of calls in a tokenizer's own ``response_template``; None where there is none that can be read."""
    template: Any = getattr(tokenizer, "response_template", None)
    try:
        field: Any = template["fields"]["tool_calls"] if knows_tools(tokenizer.chat_template) else None
        return field if load_response_template(template_of(field)).fields["tool_calls"].open_re else None
    except (LookupError, TypeError, ValueError):
        return None


def call_rules(tools: Mapping[str, JsonObject], form: Form) -> list[str]:
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


def written(name: str, schema: JsonObject, form: Form) -> str:
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


@dataclass(frozen=True)
class Call:
    """A call of a tool."""

    name: str
    arguments: str
    """JSON."""
    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}")

    @property
    def values(self) -> JsonObject:
        """The arguments as an object; empty where the model wrote none."""
        with suppress(ValueError, RecursionError):
            if isinstance(values := json.loads(self.arguments), dict):
                return values
        return {}

    def shown(self) -> JsonObject:
        """As chat completions have it."""
        return tool_call(self.id, self.name, self.arguments)


class CallReader:
    """Reads an answer piece by piece: text to show, and calls of tools, each when it is whole.

    Args:
        tools: their names, and the schemas of their arguments; what calls another is text. parallel: whether an answer may have
            more than one call; otherwise it ends with the first. declared: see ``declared_by``.
    """

    def __init__(
        self, form: Form, tools: Mapping[str, JsonObject] | Sequence[str], *, parallel: bool = True,
        declared: Mapping[str, object] | None = None,
    ) -> None:  # fmt: skip
        self.form, self.parallel = form, parallel
        self.tools = dict(tools) if isinstance(tools, Mapping) else dict.fromkeys(tools, JsonObject())
        self.calls: list[Call] = []
        self._held, self._searched = "", 0
        self._began = False
        self._markup = MARKUP.get(form) if declared is None else Markup("", "", field=declared)
        if declared is not None:
            loaded = load_response_template(template_of(declared)).fields["tool_calls"]
            self._open, self._close = loaded.open_re, loaded.close_re or regex.compile("(?!)")
        elif self._markup is not None:
            self._open, self._close = regex.compile(self._markup.open), regex.compile(self._markup.close)
            keys = {key for schema in self.tools.values() for key in properties_of(schema)}
            call = self._markup.call.replace("KEYS", "|".join(map(regex.escape, keys)) or "(?!)")
            self._call, self._all = (regex.compile(one, regex.DOTALL) for one in (call, rf"(?:{call}\s*)+"))

    @property
    def marks(self) -> str:
        """A text in which every token stands that marks a call."""
        return str(self._markup or "").replace("\\", "")

    @property
    def ended(self) -> bool:
        """Whether the answer has all the calls that it may have."""
        return bool(self.calls) and not self.parallel

    def feed(self, text: str, *, final: bool = False, cut: bool = False) -> tuple[str, list[Call]]:
        """Text that is no part of a call, and the calls that end in this piece.

        Args:
            final: the answer has ended. cut: it would have gone on, and a call without an end is none.
        """
        self._held += text
        if self.ended:
            return "", []
        if self._markup is not None:
            said, calls = self._tagged(final, cut)
            return "" if final and self.ended else said, calls
        begin = self._held.lstrip()
        if not (final or self._began) and (not begin or begin[0] in "[{"):  # it begins as a call does, and waits
            return "", []
        self._began, said, self._held = True, self._held, ""
        self.calls += (calls := self._calls(said) if final else [])
        return "" if calls else said, calls

    def _tagged(self, final: bool, cut: bool) -> tuple[str, list[Call]]:
        said, made = "", list[Call]()
        while True:
            begin = self._open.search(self._held, partial=not final)
            at = len(self._held) if begin is None else begin.start()
            said, self._held = said + self._held[:at], self._held[at:]
            if begin is None or begin.partial or self.ended:  # of what may begin a call
                return said, made
            inner = begin.end() - at
            end = self._close.search(self._held, max(self._searched, inner), partial=not final)
            if (end is None or end.partial) and not final:
                self._searched = len(self._held) if end is None else end.start()
                return said, made
            stop, size = (len(self._held),) * 2 if end is None else end.span()
            block = self._held[:size]
            calls = [] if cut and end is None else self._calls(block[inner:stop]) or self._marked_calls(block)
            if not calls and end is not None and self._may_go_on(block):
                self._searched = size
                continue
            self._searched, size = 0, size if calls else inner
            said, self._held = said + ("" if calls else block[:size]), self._held[size:]
            made, self.calls = made + calls, self.calls + calls
            if self.ended:
                return said, made

    def _may_go_on(self, block: str) -> bool:
        """Whether the end of a call that was found may be part of an argument, as the first few."""
        few = self._markup is not None and self._markup.call and len(self._close.findall(block)) <= FALSE_ENDS
        return bool(few) and self._all.fullmatch(block, partial=True) is not None

    def _marked_calls(self, block: str) -> list[Call]:
        """The calls of a text that is no JSON, their arguments typed by the tool's schema; none where it is something else."""
        markup, found = self._markup, list[Any]()
        if markup is not None and markup.call and self._all.fullmatch(block):
            for one in self._call.finditer(block):
                given = zip(one.captures("key"), one.captures("value"), strict=True)
                found.append({"name": one["name"], "arguments": dict(given)})
        elif markup is not None and markup.field is not None:
            with suppress(ValueError, RecursionError):
                made = parse_response(block, template_of(markup.field), prefix="").get("tool_calls", [])
                found = [call["function"] for call in made]
        for one in found:
            if one.get("name") in [*self.tools] and isinstance(values := one.get("arguments"), dict):
                known = properties_of(schema := self.tools[one["name"]])
                texts = {key: value for key, value in values.items() if isinstance(value, str)}
                values |= {key: typed(text, types_of(known.get(key), schema)) for key, text in texts.items()}
        return self._offered(found)

    def _calls(self, text: str) -> list[Call]:
        """The calls that a text is, as many as there may be; none where it is something else."""
        try:
            value = json.loads(text.strip().removeprefix("[TOOL_CALLS]"))
        except (ValueError, RecursionError):
            return []
        return self._offered(value if isinstance(value, list) else [value])

    def _offered(self, made: Sequence[object]) -> list[Call]:
        """Calls, as many as there may be; none where one is of no tool."""
        calls: list[Call] = []
        for one in made:
            if not isinstance(one, dict) or one.get("name") not in [*self.tools]:  # it may be a list
                return []
            arguments = one.get("arguments", one.get("parameters", {}))
            text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
            calls.append(Call(one["name"], text))
        return calls if self.parallel else calls[:1]
