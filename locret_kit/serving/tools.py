"""Calls of tools: how a chat template writes them, and how they are read in an answer.

A template that knows ``tools`` is given them. For any other the conversation is rewritten: the tools stand in the system prompt,
and calls and results in the messages, in the form of Qwen and Hermes.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

from .constraint import AnswerForm
from .messages import JsonObject, TemplateMessage, Tool

Form = Literal["tags", "list", "object"]
OPEN, CLOSE = "<tool_call>", "</tool_call>"
WORDS = """You may call functions. Each is described by its name, its purpose and the JSON schema of its arguments:
{tools}
To call one, answer with nothing but
<tool_call>
{{"name": "its name", "arguments": {{"an argument": "its value"}}}}
</tool_call>"""


def knows_tools(template: str | None) -> bool:
    """Whether a chat template has a place for tools."""
    return template is not None and "tools" in template


def form_of(template: str | None) -> Form:
    """The form of calls in the answers of a model with this template: each between tags (Qwen, Hermes), a list of them
    (Mistral), or one object as the whole answer (Llama 3)."""
    if not knows_tools(template) or OPEN in str(template):
        return "tags"
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


def call_forms(tools: Sequence[Tool], name: str | None, form: Form) -> list[AnswerForm]:
    """The forms of an answer that calls one of the tools, or the one called ``name``. Each has its tool's schema as it is, since
    references in a schema count from its root."""
    arguments = "parameters" if form == "object" else "arguments"
    before, after = {"tags": ([f"{OPEN}\n"], [f"\n{CLOSE}"]), "list": (["["], ["]"]), "object": ([], [])}[form]
    forms = []
    for tool in tools:
        if name in (None, tool.function.name):
            said = json.dumps(tool.function.name, ensure_ascii=False)
            before_arguments = [*before, "{", '"name"', ": ", said, ", ", f'"{arguments}"', ": "]
            forms.append(AnswerForm(tool.function.parameters or {"type": "object"}, before_arguments, ["}", *after]))
    return forms


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
        names: of the tools; what calls another is text. parallel: whether an answer may have more than one call; otherwise
            it ends with the first.
    """

    def __init__(self, form: Form, names: Sequence[str], *, parallel: bool = True) -> None:
        self.form, self.names, self.parallel = form, frozenset(names), parallel
        self.calls: list[Call] = []
        self._held = ""
        self._began = False

    @property
    def ended(self) -> bool:
        """Whether the answer has all the calls that it may have."""
        return bool(self.calls) and not self.parallel

    def feed(self, text: str) -> tuple[str, list[Call]]:
        """Text that is no part of a call, and the calls that end in this piece."""
        if self.ended:
            return "", []
        self._held += text
        return self._tagged() if self.form == "tags" else self._whole_answer()

    def end(self) -> tuple[str, list[Call]]:
        """What is left when the answer ends."""
        held, self._held = self._held, ""
        calls = self._calls(held.removeprefix(OPEN)) if held.strip() and not self.ended else []
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
            before, tag, rest = self._held.partition(OPEN)
            if not tag:
                size = next((n for n in range(len(OPEN) - 1, 0, -1) if self._held.endswith(OPEN[:n])), 0)
                cut = len(self._held) - size  # of what may begin a tag
                said, self._held = said + self._held[:cut], self._held[cut:]
                return said, calls
            inner, end, after = rest.partition(CLOSE)
            if not end:
                said, self._held = said + before, tag + rest
                return said, calls
            found = self._calls(inner)
            said += before if found else before + tag + inner + end
            calls += found
            self.calls += found
            self._held = after
            if self.ended:
                return said, calls

    def _calls(self, text: str) -> list[Call]:
        """The calls that a text is, as many as there may be; none where it is something else."""
        try:
            value = json.loads(text.strip().removeprefix("[TOOL_CALLS]"))
        except (ValueError, RecursionError):
            return []
        calls: list[Call] = []
        for one in value if isinstance(value, list) else [value]:
            if not isinstance(one, dict) or one.get("name") not in self.names:
                return []
            arguments = one.get("arguments", one.get("parameters", {}))
            text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
            calls.append(Call(one["name"], text))
        return calls if self.parallel else calls[:1]
