"""``locret-vllm`` over HTTP, by the official clients, over the demo backbone."""

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import anthropic
import httpx
import jsonschema
import openai
import pytest
import tiny
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from locret_kit.cli import plan
from locret_kit.documents.document import Document

ROOT = Path(__file__).resolve().parents[2]
BACKBONE, HEADS = ROOT / "checkpoints" / "SmolLM2-135M-Instruct", ROOT / "checkpoints" / "smollm2-135m-locret"
PORT = 8765
SETTINGS = dict(budget=512, chunk=512, stabilizers=64, local_len=64, positions="compact")
POLICY = "lookahead-locret"
LONG = " ".join(f"In {1000 + i} the town had {i * i % 977} houses." for i in range(260))
pytestmark = pytest.mark.backbone


@pytest.fixture(scope="module")
def document(tmp_path_factory):
    """A library with one document, read by the kit."""
    folder = tmp_path_factory.mktemp("library")
    model = AutoModelForCausalLM.from_pretrained(BACKBONE, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(BACKBONE)
    document = Document.read(model, tokenizer, LONG, policy=POLICY, heads=str(HEADS), **SETTINGS)
    document.save(folder / "town.locret")
    return folder, document


@pytest.fixture(scope="module")
def said(document, tmp_path_factory):
    """A server, and what it said when it was ready."""
    words = [
        "--ckpt", str(HEADS), "--model", str(BACKBONE), "--sessions", "4", "--documents", str(document[0]), "--port", str(PORT),
        *(f"{name}={value}" for name, value in SETTINGS.items()), "--dtype", "float32", "--max-num-batched-tokens", "512",
        "--max-model-len", "16384", "--served-model-name", "demo",
    ]  # fmt: skip
    log = tmp_path_factory.mktemp("log") / "server.txt"
    with open(log, "w") as out:
        server = subprocess.Popen([sys.executable, "-m", "locret_kit.cli.vllm", *words], stdout=out, stderr=out)
    try:
        until = time.monotonic() + 300
        while not (ready := re.search(r"^ready: (.*)$", log.read_text(), re.M)):
            assert server.poll() is None and time.monotonic() < until, log.read_text()[-3000:]
            time.sleep(1)
        yield ready[1]
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(60)


@pytest.fixture
def client(said):
    return openai.OpenAI(base_url=f"http://127.0.0.1:{PORT}/v1", api_key="none", timeout=120)


def ask(client, question: str = "What is the capital of France?", **rest):
    rest = {"temperature": 0, "max_tokens": 16, **rest}
    return client.chat.completions.create(model="demo", messages=[{"role": "user", "content": question}], **rest)


def running() -> float:
    """Requests that have a page, by vLLM's own count."""
    text = httpx.get(f"http://127.0.0.1:{PORT}/metrics").text
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith("vllm:num_requests_running"))


def test_the_plan_said_the_same(said, capsys):
    words = f"--model {BACKBONE} --gpu-memory 4GiB --engine vllm --sessions 4 --dtype float32".split()
    assert plan.main([*words, f"policy={POLICY}", *(f"{k}={v}" for k, v in SETTINGS.items() if k != "positions")]) == 0
    (planned,) = re.findall(r"^vLLM: (.*)$", capsys.readouterr().out, re.M)
    assert said == f"http://127.0.0.1:{PORT}, {planned}, documents: 1" and planned.startswith("4 requests fit")


@pytest.mark.parametrize("own", [{}, {"budget": 128}])
def test_tokens_are_the_kits(client, document, own):
    """A prompt of 1,500 tokens, by the server's budget of 512 and by one of its own."""
    ids = document[1].tokenizer(LONG[::-1]).input_ids[:1500]
    asked = {"return_token_ids": True, "ignore_eos": True, "vllm_xargs": own}
    answer = client.completions.create(model="demo", prompt=ids, max_tokens=24, temperature=0, extra_body=asked)
    wanted = tiny.kit(document[1].model, ids, 24, policy=POLICY, heads=str(HEADS), **{**SETTINGS, **own})
    assert answer.choices[0].token_ids == wanted


def test_a_document_goes_through_the_connector(client, document):
    question = "How many houses had the town in 1100?"
    wanted = document[1].ask(question, max_new_tokens=16)
    answer = ask(client, LONG + "\n\n" + question)
    assert answer.choices[0].message.content == "".join(wanted)
    assert answer.usage.prompt_tokens_details.cached_tokens == document[1].cache.get_seq_length()


def test_streams_and_their_abort(client):
    whole = ask(client, max_tokens=40).choices[0].message.content
    parts = [chunk.choices[0].delta.content or "" for chunk in ask(client, max_tokens=40, stream=True) if chunk.choices]
    assert "".join(parts) == whole
    for _ in range(6):  # more than there are pages
        stream = ask(client, LONG, max_tokens=2000, stream=True)
        next(iter(stream))
        stream.close()
    until = time.monotonic() + 30
    while running() and time.monotonic() < until:
        time.sleep(0.2)
    assert running() == 0 and ask(client, max_tokens=40).choices[0].message.content == whole


def test_json_of_a_schema_is_valid(client):
    schema = {
        "type": "object", "required": ["city", "inhabitants"], "additionalProperties": False,
        "properties": {"city": {"type": "string", "maxLength": 12}, "inhabitants": {"type": "integer", "maximum": 9999}},
    }  # fmt: skip
    form = {"type": "json_schema", "json_schema": {"name": "town", "schema": schema}}
    text = ask(client, "Describe a town as JSON.", max_tokens=120, response_format=form).choices[0].message.content
    jsonschema.validate(json.loads(text), schema)


def test_several_answers_and_logprobs(client):
    answer = ask(client, n=2, temperature=0.8, logprobs=True, top_logprobs=2)
    assert len(answer.choices) == 2
    assert all(len(choice.logprobs.content[0].top_logprobs) == 2 for choice in answer.choices)


def test_anthropics_protocol(said, client):
    other = anthropic.Anthropic(base_url=f"http://127.0.0.1:{PORT}", api_key="none", timeout=120)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    answer = other.messages.create(model="demo", max_tokens=16, messages=question, extra_body={"temperature": 0})
    text = ask(client).choices[0].message.content
    assert answer.content[0].text == text
    with other.messages.stream(model="demo", max_tokens=16, messages=question, extra_body={"temperature": 0}) as stream:
        assert "".join(stream.text_stream) == text


def test_what_is_refused(client):
    for rest, words in (
        ({"extra_body": {"vllm_xargs": {"budget": 513}}}, "budget=513 must be an integer from 1 to 512, the server's"),
        ({"extra_body": {"vllm_xargs": {"policy": "knorm"}}}, "policy='knorm' is unknown. Known: lookahead-locret"),
        ({"extra_body": {"vllm_xargs": {"chunk": 5}}}, "vllm_xargs='chunk' is unknown. Known: budget, policy"),
        ({"extra_body": {"vllm_xargs": {"bugdet": 99}}}, "vllm_xargs='bugdet' is unknown. Did you mean 'budget'"),
        ({"seed": 1}, "fails at seeds"),
        ({"n": 5}, "n must be at most 4"),
        ({"n": 10000, "stream": True}, "n must be at most 4"),
    ):
        with pytest.raises(openai.BadRequestError, match=words):
            ask(client, **rest)
