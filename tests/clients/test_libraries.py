"""LangChain and ``llm`` get text, objects and calls of tools, by each of OpenAI's routes."""

import json
import subprocess
import sys
from typing import Literal

import pytest
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class Harbour(BaseModel):
    """What is said of a harbour."""

    name: Literal["north", "south"]
    deep: bool


@tool
def depth(name: Literal["north", "south"], tide: bool) -> str:
    """How deep a harbour is."""
    return f"{name}: {7 + tide} m"


@pytest.fixture(params=[False, True], ids=["chat", "responses"])
def model(request, url):
    return ChatOpenAI(
        base_url=f"{url}/v1", api_key="none", model="demo", temperature=0, max_tokens=200, use_responses_api=request.param
    )  # fmt: skip


def test_langchain_answers_whole_and_streamed(model):
    question = "Name the capital of France."
    answer = model.invoke(question)
    assert "Paris" in answer.text and answer.usage_metadata["output_tokens"] > 0
    assert "".join(piece.text for piece in model.stream(question)) == answer.text


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_with_structured_output(model, method):
    made = model.with_structured_output(Harbour, method=method).invoke("The north harbour is deep. Describe it.")
    assert isinstance(made, Harbour)


def test_langchain_binds_tools(model):
    asked = HumanMessage("How deep is the north harbour at low tide?")
    answer = model.bind_tools([depth], tool_choice="any").invoke([asked])
    (call,) = answer.tool_calls
    assert call["name"] == "depth" and set(call["args"]) == {"name", "tide"}
    result = depth.invoke(call)
    assert isinstance(result, ToolMessage)
    assert model.bind_tools([depth]).invoke([asked, answer, result]).text


def test_llm_prompts_goes_on_and_follows_a_schema(url, tmp_path, monkeypatch):
    entry = {
        "model_id": "locret", "model_name": "demo", "api_base": f"{url}/v1", "supports_schema": True,
    }  # fmt: skip
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps([entry]))
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    monkeypatch.setenv("OPENAI_API_KEY", "none")

    def llm(*words: str) -> str:
        command = [sys.executable, "-m", "llm", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=900, stdin=subprocess.DEVNULL)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "Paris" in llm("-m", "locret", "What is the capital of France?")
    assert llm("-c", "And of Italy?").strip()
    assert llm("-m", "locret", "--no-stream", "Hello", "-o", "max_tokens", "8").strip()
    schema = json.dumps(Harbour.model_json_schema())
    Harbour.model_validate_json(llm("-m", "locret", "The north harbour is deep.", "--schema", schema))
