"""Tools in the prompts of models whose chat template knows none: the tools stand in the system prompt, and calls and results in
the messages, in the form of Qwen and Hermes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from ..answers.forms import CLOSE, OPEN
from .messages import Message, Tool

WORDS = """You may call functions. Each is described by its name, its purpose and the JSON schema of its arguments:
{tools}
To call one, answer with nothing but
<tool_call>
{{"name": "its name", "arguments": {{"an argument": "its value"}}}}
</tool_call>"""


def call_text(call: Mapping[str, object]) -> str:
    """A call in words."""
    return f"{OPEN}\n{json.dumps(call['function'], ensure_ascii=False)}\n{CLOSE}"


def result_text(content: str) -> str:
    """A tool's result in words."""
    return f"<tool_response>\n{content}\n</tool_response>"


def rewritten(messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
    """The conversation for a template that knows no tools."""
    made = list[Message]()
    for message in messages:
        if message.role == "tool":
            said = {"role": "user", "content": result_text(message.content), "tool_call_id": None, "name": None}
            made.append(message.model_copy(update=said))
            continue
        content = "\n".join(filter(None, [message.content, *map(call_text, message.tool_calls)]))
        made.append(message.model_copy(update={"content": content, "tool_calls": []}))
    if tools:
        lines = (json.dumps(tool.function.model_dump(), ensure_ascii=False) for tool in tools)
        before = f"{made.pop(0).content}\n\n" if made and made[0].role == "system" else ""
        made.insert(0, Message(role="system", content=before + WORDS.format(tools="\n".join(lines))))
    return made
