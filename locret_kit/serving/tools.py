"""Calls of tools: how a chat template writes them, and how they are read in an answer.

A template that knows ``tools`` is given them. For any other the conversation is rewritten: the tools stand in the system prompt,
and calls and results in the messages, in the form of Qwen and Hermes.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import regex
from transformers.utils.chat_parsing import parse_response
from transformers.utils.chat_parsing.response_templates import load_response_template

from .constraint import AnswerForm
from .messages import JsonObject, TemplateMessage, Tool

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Form = Literal["tags", "xml", "pairs", "gemma", "declared", "list", "object"]
OPEN, CLOSE = "<tool_call>", "</tool_call>"
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
        open, close: what a call stands between. field: how it is read where it is no JSON, as a field of a response template of
            transformers.
    """

    open: str
    close: str
    field: Mapping[str, object] | None = None


def markup(open: str, close: str, head: str, tail: str, **content: object) -> Markup:
    """A form whose calls begin and end with these patterns."""
    call = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
    return Markup(
        open, close, {"open_pattern": head, "close_pattern": tail, "repeats": True, "transform": call, **content}
    )


def tagged(head: str, tail: str, part: str) -> Markup:
    """A form whose parameters have tags of their own; of a value's line ends the first and the last are the form's."""
    return markup(OPEN, CLOSE, head, tail, content="xml-inline", content_args={"tag_pattern": part})


MARKUP: dict[Form, Markup] = {
    "tags": Markup(OPEN, CLOSE),
    "xml": tagged(
        r"<tool_call>\s*<function=(?P<name>[^>\n]+)>", r"</function>\s*</tool_call>",
        r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>",
    ),
    "pairs": tagged(
        r"<tool_call>\s*(?P<name>[^\s<{\[]+)", CLOSE,
        r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>",
    ),
    "gemma": markup(
        "<|tool_call>", "<tool_call|>", r"<\|tool_call>\s*call:(?P<name>[^\s{]+)", r"<tool_call\|>", content="json",
        content_args={"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
    ),
}  # fmt: skip
WRITTEN: dict[Form, tuple[str, str, str, str]] = {
    "xml": ("<tool_call>\n<function={}>\n", "<parameter={}>\n", "\n</parameter>\n", "</function>\n</tool_call>"),
    "pairs": ("<tool_call>{}\n", "<arg_key>{}</arg_key>\n<arg_value>", "</arg_value>\n", "</tool_call>"),
}
"""Beginnings and ends of calls and of their parameters, as models write them."""
MARKS: dict[str, Form] = {"<function=": "xml", "<arg_key>": "pairs"}
"""What a template says whose calls stand between tags and are no JSON."""


def knows_tools(template: str | None) -> bool:
    """Whether a chat template has a place for tools."""
    return template is not None and "tools" in template


def form_of(template: str | None) -> Form:
    """The form of calls in the answers of a model with this template: each between tags (Qwen, Hermes), a list of them
    (Mistral), or one object as the whole answer (Llama 3). Between tags there is JSON, or parameters between tags of their own
    (Qwen 3.5, GLM 4.5), or Gemma 4's own notation."""
    if not knows_tools(template) or OPEN in str(template):
        return next((form for mark, form in MARKS.items() if knows_tools(template) and mark in str(template)), "tags")
    if MARKUP["gemma"].open in str(template):
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
        if made and made[0]["role"] == "system":
            made[0] = {"role": "system", "content": f"{made[0]['content']}\n\n{said}"}
        else:
            made.insert(0, {"role": "system", "content": said})
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


def call_forms(tools: Sequence[Tool], name: str | None, form: Form) -> list[AnswerForm]:
    """The forms of an answer that calls one of the tools, or the one called ``name``. Each has its tool's schema as it is, since
    references in a schema count from its root."""
    if form in ("gemma", "declared"):
        raise ValueError(
            "tool_choice must be 'auto' or 'none', without response_format: no grammar of this model's calls is here"
        )
    if form in WRITTEN:
        chosen = [tool.function for tool in tools if name in (None, tool.function.name)]
        return [AnswerForm({}, written=written(one.name, one.parameters, form)) for one in chosen]
    arguments = "parameters" if form == "object" else "arguments"
    before, after = {"tags": ([f"{OPEN}\n"], [f"\n{CLOSE}"]), "list": (["["], ["]"]), "object": ([], [])}[form]
    forms = []
    for tool in tools:
        if name in (None, tool.function.name):
            said = json.dumps(tool.function.name, ensure_ascii=False)
            before_arguments = [*before, "{", '"name"', ": ", said, ", ", f'"{arguments}"', ": "]
            forms.append(AnswerForm(tool.function.parameters or {"type": "object"}, before_arguments, ["}", *after]))
    return forms


def written(name: str, schema: JsonObject, form: Form) -> str:
    """The rule of a call whose parameters have tags of their own, in the schema's order: texts as they are, the rest as JSON."""
    head, begin, end, tail = WRITTEN[form]
    known, required = schema.get("properties"), schema.get("required")
    shared: JsonObject = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    rule = json.dumps(head.format(name))
    for key, given in known.items() if isinstance(known, dict) else ():
        one = given if isinstance(given, dict) else {}
        choices = one.get("enum")
        if isinstance(choices, list) and all(isinstance(choice, str) for choice in choices):
            value = f"({' | '.join(json.dumps(choice + end) for choice in choices)})"
        elif one.keys() & {"$ref", "anyOf", "oneOf", "allOf", "enum", "const"} or one.get("type", "string") != "string":
            value = AnswerForm({**one, **shared}, (), (end,)).rule
        else:
            value = f"{form}_text"
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
        """As the protocol has it."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


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
        self._markup = MARKUP.get(form) if declared is None else Markup("", "", declared)
        if declared is not None:
            loaded = load_response_template(template_of(declared)).fields["tool_calls"]
            self._open, self._close = loaded.open_re, loaded.close_re or regex.compile("(?!)")
        elif self._markup is not None:
            self._open, self._close = (
                regex.compile(regex.escape(end)) for end in (self._markup.open, self._markup.close)
            )

    @property
    def marks(self) -> str:
        """A text in which every token stands that marks a call."""
        return str(self._markup or "").replace("\\", "")

    @property
    def ended(self) -> bool:
        """Whether the answer has all the calls that it may have."""
        return bool(self.calls) and not self.parallel

    def feed(self, text: str) -> tuple[str, list[Call]]:
        """Text that is no part of a call, and the calls that end in this piece."""
        if self.ended:
            return "", []
        self._held += text
        return self._tagged() if self._markup is not None else self._whole_answer()

    def end(self) -> tuple[str, list[Call]]:
        """What is left when the answer ends."""
        held, self._held = self._held, ""
        calls = self._calls(held.removeprefix(OPEN)) if held.strip() and not self.ended else []
        if not calls and self._markup is not None and self._open.match(held) and not self.ended:
            calls = self._marked_calls(held + self._markup.close)
        self.calls += calls
        return ("", calls) if calls or self.ended else (held, [])

    def _whole_answer(self) -> tuple[str, list[Call]]:
        """An answer that begins as a call does waits for its end."""
        begin = self._held.lstrip()
        if not self._began and (not begin or begin[0] in "[{"):
            return "", []
        self._began = True
        said, self._held = self._held, ""
        return said, []

    def _tagged(self) -> tuple[str, list[Call]]:
        said = ""
        calls: list[Call] = []
        while True:
            begin = self._open.search(self._held, partial=True)
            at = len(self._held) if begin is None else begin.start()
            said, self._held = said + self._held[:at], self._held[at:]
            if begin is None or begin.partial:  # of what may begin a call
                return said, calls
            end = self._close.search(self._held, max(self._searched, begin.end() - at), partial=True)
            if end is None or end.partial:
                self._searched = len(self._held) if end is None else end.start()
                return said, calls
            self._searched = 0
            block, self._held = self._held[: end.end()], self._held[end.end() :]
            found = self._calls(block[begin.end() - at : end.start()]) or self._marked_calls(block)
            said += "" if found else block
            calls += found
            self.calls += found
            if self.ended:
                return said, calls

    def _marked_calls(self, block: str) -> list[Call]:
        """The calls of a text that is no JSON, their arguments typed by the tool's schema; none where it is something else."""
        field: Any = self._markup.field if self._markup is not None else None
        if field is None:
            return []
        offered: list[Any] = [{"function": {"name": name, "parameters": schema}} for name, schema in self.tools.items()]
        try:
            made = parse_response(block, template_of(field), prefix="", tools=offered).get("tool_calls", [])
        except (ValueError, RecursionError):
            return []
        if "tag_pattern" in (args := field.get("content_args") or {}):
            ends = f"{field.get('open_pattern')}|{field.get('close_pattern')}"
            if regex.sub(f"(?s){args['tag_pattern']}|{ends}", "", block).strip():  # a parameter without an end
                return []
        return self._offered([call["function"] for call in made])

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
            if not isinstance(one, dict) or one.get("name") not in self.tools:
                return []
            arguments = one.get("arguments", one.get("parameters", {}))
            text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
            calls.append(Call(one["name"], text))
        return calls if self.parallel else calls[:1]
