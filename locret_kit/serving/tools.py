"""Tools in the prompts of models whose chat template knows none: the tools stand in the system prompt, and calls and results in
the messages, in the form of Qwen and Hermes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from ..answers.forms import CLOSE, OPEN
from .messages import TemplateMessage, Tool

WORDS = """You may call functions. Each is described by its name, its purpose and the JSON schema of its arguments:
{tools}
To call one, answer with nothing but
<tool_call>
{{"name": "its name", "arguments": {{"an argument": "its value"}}}}
</tool_call>"""


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
