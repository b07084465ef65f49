"""The form of a model's answers by its chat template: tags around their text, and how a call's parameters are written."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

import regex

from ..text.template import render

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NAME, FIRST, SECOND, TEXT = "locretname", "locretfirst", "locretsecond", "locrettext"
"""Words that no template has."""
KINDS = {
    "type": "object",
    "properties": {FIRST: {"type": "string"}, SECOND: {"type": "boolean"}},
    "required": [FIRST, SECOND],
}
TOOL = {"type": "function", "function": {"name": NAME, "description": "?", "parameters": KINDS}}
CALL = {"type": "function", "id": "locret001", "function": {"name": NAME, "arguments": {FIRST: TEXT, SECOND: True}}}
ANSWERS = ("answer", "response")
"""Names of tags around answers. A template with others has them around an answer, or cuts them from one."""


def shown(tokenizer: PreTrainedTokenizerBase, content: str, *, calls: bool = False, result: str = "") -> str:
    """The template's text of an answer after a question, with a call, or with one and its result; '' where it refuses it."""
    turns = list[Mapping[str, object]]([{"role": "user", "content": "?"}, {"role": "assistant", "content": content}])
    if calls:
        turns[1] = {**turns[1], "tool_calls": [CALL]}
        turns += [{"role": "tool", "tool_call_id": CALL["id"], "name": NAME, "content": result}] if result else []
    with suppress(ValueError):
        return render(tokenizer, turns, tools=[TOOL] if calls else ())
    return ""


def tags_around(tokenizer: PreTrainedTokenizerBase, template: str) -> tuple[str, ...]:
    """Names of tags around answers, such as Hunyuan's ``<answer>``. MiniMax's ``<response>`` is around a tool's result."""
    tags = regex.findall(r"<(\w+)>", template)
    if not tags:
        return ()
    told = set(regex.findall(rf"<({'|'.join(ANSWERS)})>[^<{{}}'\"]*</\1>", template))
    around = rf"<(\w+)>\s*{TEXT}\s*</\1>"
    told.update(regex.findall(around, shown(tokenizer, TEXT)))
    if likely := {*tags}.intersection(ANSWERS) - told:
        told |= likely.difference(regex.findall(around, shown(tokenizer, "", calls=True, result=TEXT)))
    for name in {tag for tag in tags if f"</{tag}>" in template} - told:
        for before in ("", "<think>?</think>\n"):
            text = shown(tokenizer, f"{before}<{name}>\n{TEXT}\n</{name}>")
            told |= {name} if TEXT in text and not regex.search(rf"{name}>\s*{TEXT}", text) else set()
    return tuple(sorted(told))


def parameters_shown(
    tokenizer: PreTrainedTokenizerBase, head: str, end: str
) -> tuple[tuple[str, str, str, str, str], bool] | None:
    """Form of a call whose parameters have marks of their own, and whether its values are Python's; None where the
    template shows no such call.

    Args:
        head, end: patterns of a call up to its parameters, and of all that follows them.
    """
    text = shown(tokenizer, "", calls=True)
    start = next((found for found in regex.finditer(head, text) if found["name"] == NAME), None)
    at, other = text.rfind(TEXT), text.rfind(SECOND)
    begin = text[start.end() : at] if start is not None else ""
    if start is None or FIRST not in begin:
        return None
    second = text.find(again := begin.replace(FIRST, SECOND), at)
    between, value = text[at + len(TEXT) : second], text[second + len(again) :]
    last = regex.match(end, value[4 + len(between) :])
    if not at < second < other or value[:4].lower() != "true" or not value.startswith(between, 4) or not last[0]:
        return None
    written = start[0].replace(NAME, "{name}"), begin.replace(FIRST, "{key}"), between, "", last[0]
    return written, value.startswith("T")
