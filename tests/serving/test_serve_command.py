"""``locret-serve`` as users start it: processes of their own, at real ports, and requests as clients send them."""

import json
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from serve_process import Command
from tiny_heads import save_tiny_heads
from tiny_tokenizer import TEXT, save_tiny_backbone

from locret_kit import BoundedCache
from locret_kit.backbones.gguf import bare_name
from locret_kit.backbones.load import load_backbone
from locret_kit.cli.serve import main
from locret_kit.heads import RetainingHeads
from locret_kit.naming import last_part
from locret_kit.policies.registry import UNTRAINED
from locret_kit.runtime.session import Answer
from locret_kit.settings import RunSettings
from locret_kit.text.template import render_messages

SETTINGS = RunSettings(budget=48, chunk=16, local_len=5, stabilizers=4)
OPTIONS = ["--dtype", "float32", "--budget", "48", "--chunk", "16", "--local-len", "5", "--stabilizers", "4"]
KEY = "key-of-anna"
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"{TEXT} Who came in?"}]
LONG = 120
"""Tokens of an answer that is still being written when the server is told to stop."""


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    """Heads and the backbone that they name."""
    folder = tmp_path_factory.mktemp("serve")
    save_tiny_backbone(folder / "backbone", initializer_range=0.3)
    save_tiny_heads(folder, 16, backbone=folder / "backbone", inference={})
    (folder / "keys.txt").write_text(f"\ufeff{KEY}\n")  # as some editors write it
    return folder


@pytest.fixture(scope="module")
def commands(files, tmp_path_factory) -> Iterator[tuple[Command, Command]]:
    """One with heads and a key, one without either."""
    with_heads = ("--ckpt", str(files / "heads"), "--api-key-file", str(files / "keys.txt"))
    folders = [tmp_path_factory.mktemp(name) for name in ("keyed", "open")]
    without = ("--model", str(files / "backbone"), "--allowed-hosts", "Chat.example.org,[fd00::1]")
    made = Command(folders[0], *OPTIONS, *with_heads), Command(folders[1], *OPTIONS, *without)
    yield made
    for command in made:
        command.process.kill()
        command.process.wait()


@pytest.fixture(scope="module")
def keyed(commands) -> str:
    return commands[0].ready()


@pytest.fixture(scope="module")
def unlocked(commands) -> str:
    return commands[1].ready()


def alone(files: Path, messages: list[dict], new: int, *, heads: bool = True) -> str:
    """The answer of a run of its own."""
    model, tokenizer = load_backbone(str(files / "backbone"), dtype="float32", device="cpu")
    ids = tokenizer(render_messages(tokenizer, messages)[1], add_special_tokens=False).input_ids
    loaded = RetainingHeads.from_pretrained(str(files / "heads")) if heads else None
    cache = BoundedCache(SETTINGS, "locret" if heads else UNTRAINED[0], loaded, prompt_length=len(ids))
    return str(Answer(model, tokenizer, ids, cache, max_new_tokens=new))


def test_curl(keyed, files):
    """The bytes that curl sends for the example of docs/serving.md."""
    body = json.dumps({"messages": MESSAGES, "max_tokens": 16, "temperature": 0}).encode()
    host, port = keyed.removeprefix("http://").split(":")
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}:{port}\r\nUser-Agent: curl/8.5.0\r\nAccept: */*\r\n"
        f"Authorization: Bearer {KEY}\r\ncontent-type: application/json\r\nContent-Length: {len(body)}\r\n"
        "Connection: close\r\n\r\n"
    )
    with socket.create_connection((host, int(port)), timeout=300) as line:
        line.sendall(head.encode() + body)
        answer = b"".join(iter(lambda: line.recv(65536), b""))
    status, _, rest = answer.partition(b"\r\n")
    assert status == b"HTTP/1.1 200 OK"
    found = json.loads(rest.partition(b"\r\n\r\n")[2])
    assert found["choices"][0]["message"]["content"] == alone(files, MESSAGES, 16) != ""
    assert found["usage"]["locret"]["evictions"] > 0


def test_a_proxy_passes_its_public_name(unlocked, keyed):
    """As nginx does with ``proxy_set_header Host $http_host``; without keys the server must know the name."""
    for host in ("chat.example.org", "[fd00:0::1]:80"):
        page = {"host": host, "origin": f"https://{host}"}
        asked = {"prompt": "a", "max_tokens": 1}
        answer = httpx.post(f"{unlocked}/v1/completions", json=asked, headers=page, timeout=300)
        assert answer.status_code == 200, answer.text
    [model] = httpx.get(f"{unlocked}/v1/models").json()["data"]
    assert model["id"] == "backbone" and model["object"] == "model"
    other = {"host": "other.example.org"}
    answer = httpx.get(f"{unlocked}/v1/models", headers=other)
    assert answer.status_code == 403 and "--allowed-hosts" in answer.json()["error"]["message"]
    assert httpx.get(f"{keyed}/v1/models", headers=other | {"authorization": f"Bearer {KEY}"}).status_code == 200


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_answers_that_run_are_finished_before_it_stops(commands, files, keyed, unlocked, number):
    """Requests are as Open WebUI sends them."""
    command, url = (commands[0], keyed) if number is signal.SIGINT else (commands[1], unlocked)
    # Not yet asked.
    messages = [*MESSAGES, {"role": "assistant", "content": "Boats."}, {"role": "user", "content": "When?"}]
    body = {
        "messages": messages, "temperature": 0, "max_tokens": LONG, "stream": True, "chat_id": "c1", "params": {}, "tools": [],
        "features": {"web_search": False}, "model_item": {"name": "backbone", "urlIdx": 0}, "user": "u1",
    }  # fmt: skip
    headers = {"authorization": f"Bearer {KEY}", "http-referer": "https://openwebui.com/", "x-openwebui-chat-id": "c1"}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, headers=headers, timeout=300) as answer:
        lines = answer.iter_lines()
        seen = [next(lines) for _ in range(5)]
        command.process.send_signal(number)
        seen += lines
    events = [json.loads(line.removeprefix("data: ")) for line in seen if line.startswith("data: {")]
    said = "".join(choice["delta"].get("content", "") for event in events for choice in event["choices"])
    assert said == alone(files, messages, LONG, heads=number is signal.SIGINT)
    assert seen[-2:] == ["data: [DONE]", ""] and events[-1]["choices"][0]["finish_reason"] == "length"
    out, _ = command.process.communicate(timeout=300)
    said = command.log.read_text()
    assert out == b"" and "Traceback" not in said and "stopping: answers that run have 10 s\n" in said
    # As other programs: Ctrl-C is status 130 and says so, SIGTERM ends the process as it does any.
    if number is signal.SIGINT:
        assert command.process.returncode == 130 and said.endswith("\nlocret-serve: stopped\n")
    else:
        assert command.process.returncode == -signal.SIGTERM


@pytest.mark.parametrize("given", [".", "../mine", "user/mine", "{}/mine/"])
def test_a_model_has_the_last_part_of_its_name(tmp_path, monkeypatch, given):
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path / "mine")
    assert last_part(given.format(tmp_path)) == bare_name(given.format(tmp_path)) == "mine"


def test_errors_are_one_line(files, tmp_path, capsys):
    heads = ["--ckpt", str(files / "heads")]
    (tmp_path / "empty.txt").write_text("\n \n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        cases = [
            ([*heads, "--port", str(port)], 1, f"cannot listen on host=127.0.0.1 port={port}: Address already in use"),
            (["--model", str(tmp_path / "none")], 1, "none"),
            (["--model", str(files / "backbone"), "--policy", "locret"], 1, "scores with retaining heads: give --ckpt"),
            ([*heads, "--budget", "0.5"], 1, "budget=0.5: a session's slots must be known before the start"),
            ([*heads, "--protect", "first+system"], 1, "protect='first+system': the server supports 'first' only"),
            ([*heads, "--api-key-file", str(tmp_path / "empty.txt")], 1, "holds no key"),
            ([*heads, "--api-key-file", str(tmp_path / "no.txt")], 1, "cannot be read"),
            ([*heads, "--allowed-hosts", "a.org,http://b.org"], 1, "allowed_hosts='http://b.org' must be a name or an address"),
            ([*heads, "--policies", "h3o"], 1, "h2o"),
            (["--model", "nowhere", "--policies", "full"], 1, "policy='full' evicts nothing"),
            (["--model", "nowhere", "--policy", "full"], 1, "policy='full' evicts nothing"),
            ([*heads, "--sessions", "0"], 1, "sessions=0"),
            ([*heads, "--sesions", "2"], 2, "Did you mean 'sessions'?"),
        ]  # fmt: skip
        for words, status, says in cases:
            assert main(words if "--port" in words else [*words, "--port", "0"]) == status, words
            out, err = capsys.readouterr()
            [line] = err.splitlines()  # and no address of a server that does not come
            assert not out and line.startswith("locret-serve: ") and says in line
