"""What vLLM's own parsers, and for gpt-oss openai-harmony, read in the answers of ten families: the record for tests/answers.
Most of the parsers import mistral_common, which needs pycountry.
"""

import json
import os
from pathlib import Path

import pytest
from families import FAMILIES, TOOL, family_tokenizer
from openai_harmony import Role, load_harmony_encoding
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager

FILE = Path(__file__).parents[1] / "answers" / "vllm_parsers.json"


def harmony(answer: str) -> dict[str, object]:
    """By channels: the analysis, what has no recipient, and what a function is to get."""
    encoding = load_harmony_encoding("HarmonyGptOss")
    said = encoding.parse_messages_from_completion_tokens(
        encoding.encode(answer, allowed_special="all"), Role.ASSISTANT
    )
    texts = {"thought": "", "text": ""}
    calls = list[list[object]]()
    for message in said:
        (content,) = message.content
        if message.recipient is not None:
            calls.append([message.recipient.removeprefix("functions."), json.loads(content.text)])
        else:
            texts["thought" if message.channel == "analysis" else "text"] += content.text
    return {**texts, "calls": calls}


def parsed(name: str) -> dict[str, object]:
    if name == "gpt-oss":
        return harmony(FAMILIES[name].answer)
    family, tokenizer = FAMILIES[name], family_tokenizer(name)
    request = ChatCompletionRequest(model="m", messages=[{"role": "user", "content": "How deep?"}], tools=[TOOL])
    thought, text = "", family.answer
    if family.reasoning:
        parser = ReasoningParserManager.get_reasoning_parser(family.reasoning)(tokenizer)
        thought, text = parser.extract_reasoning(text, request)
    tools = ToolParserManager.get_tool_parser(family.tools)(tokenizer, request.tools)
    found = tools.extract_tool_calls(text or "", request)
    calls = [[call.function.name, json.loads(call.function.arguments)] for call in found.tool_calls]
    return {"thought": (thought or "").strip(), "text": (found.content or "").strip(), "calls": calls}


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_recorded(name):
    assert parsed(name) == json.loads(FILE.read_text(encoding="utf-8"))[name]


if __name__ == "__main__" and os.environ.get("RECORD"):
    # RECORD=1 python tests/vllm/test_answers.py writes the file anew.
    said = json.dumps({name: parsed(name) for name in FAMILIES}, indent=1, ensure_ascii=False)
    FILE.write_text(f"{said}\n", encoding="utf-8")
