"""Servers that share a folder, as replicas do: what one has written, the others find. And what the front of replicas knows."""

from __future__ import annotations

import ctypes
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest
from served import SETTINGS, serving
from test_documents import parts, text_of
from test_serving_sessions import bearer, talk_over_http

from locret_kit.policies.grammar import parse_policy
from locret_kit.serving.affinity import affinity_key
from locret_kit.serving.engine import Engine
from locret_kit.serving.freed_memory import _trim
from locret_kit.serving.state import Server, UploadedDocument
from locret_kit.serving.store import Store


@contextmanager
def sharing(folder: Path):
    """A server, and the engine in it."""
    model, tokenizer, heads = parts("llama")
    store = Store(folder, 1 << 30, shares=True)
    engine = Engine(model, tokenizer, SETTINGS, parse_policy("locret"), heads, sessions=3, piece=64, store=store)
    try:
        with serving(engine, salt=store.salt) as url:
            yield engine, url
    finally:
        engine.stop()


def test_a_conversation_and_a_document_go_on_at_another_server(tmp_path):
    """One begins them, the other goes on and deletes; the answers are those of a server that was alone."""
    with ExitStack() as stack:
        (one, first), (two, second) = (stack.enter_context(sharing(tmp_path)) for _ in range(2))
        assert one.store.salt == two.store.salt
        said = talk_over_http(first, 2, [], saved=0)
        said += talk_over_http(second, 1, said, saved=0)
        said += talk_over_http(first, 1, said)  # back: its own cache is older than the file
        with pytest.raises(OSError, match="another server has it"):
            Store(tmp_path, 1 << 30)

        upload = {"file": ("book.txt", text_of(200).encode())}
        name = httpx.post(f"{first}/v1/documents", files=upload, headers=bearer(), timeout=60).json()["id"]
        for _ in range(400):
            if name in one.store._files:
                break
            time.sleep(0.02)
        [listed] = httpx.get(f"{second}/v1/documents", headers=bearer()).json()["data"]
        assert (listed["id"], listed["title"], listed["status"]) == (name, "book.txt", "saved")
        stranger = bearer() | {"authorization": "Bearer key-of-bert"}
        for url in (first, second):
            assert httpx.get(f"{url}/v1/documents", headers=stranger).json()["data"] == []
            assert httpx.get(f"{url}/v1/documents/{name}", headers=stranger).status_code == 404
        body = {
            "messages": [{"role": "user", "content": "Who?"}],
            "document_id": name,
            "temperature": 0,
            "max_tokens": 8,
        }
        answers = [
            httpx.post(f"{url}/v1/chat/completions", json=body, headers=bearer(), timeout=60).json()
            for url in (first, second)
        ]
        assert answers[0]["choices"] == answers[1]["choices"]
        assert all(answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 100 for answer in answers)
        assert httpx.delete(f"{second}/v1/documents/{name}", headers=bearer()).status_code == 200
        for _ in range(400):
            if httpx.get(f"{first}/v1/documents/{name}", headers=bearer()).status_code == 404:
                break
            time.sleep(0.02)
        else:
            pytest.fail("the first server still has it")
    with sharing(tmp_path / "alone") as (_, url):
        whole = talk_over_http(url, 4, [], saved=0)
    assert said == whole and whole[3][1] > whole[2][1] > whole[1][1] > 0


def test_a_document_that_is_deleted_at_one_server_is_gone_at_all(tmp_path):
    """Whether the others have loaded it just now, often, or made it themselves."""
    with ExitStack() as stack:
        (one, first), (two, second) = (stack.enter_context(sharing(tmp_path)) for _ in range(2))
        for looks, at in ((1, first), (2, first), (1, second)):
            upload = {"file": ("book.txt", text_of(100).encode())}
            name = httpx.post(f"{first}/v1/documents", files=upload, headers=bearer(), timeout=60).json()["id"]
            for _ in range(400):
                if name in one.store._files:
                    break
                time.sleep(0.02)
            for _ in range(looks):
                assert httpx.get(f"{second}/v1/documents/{name}", headers=bearer()).status_code == 200
            body = {"messages": [{"role": "user", "content": "Who?"}], "document_id": name, "max_tokens": 1}
            asked = httpx.post(f"{first}/v1/chat/completions", json=body, headers=bearer(), timeout=60)
            assert asked.status_code == 200
            assert httpx.delete(f"{at}/v1/documents/{name}", headers=bearer()).status_code == 200
            for url in (first, second, first, second):
                assert httpx.get(f"{url}/v1/documents/{name}", headers=bearer()).status_code == 404
                assert httpx.get(f"{url}/v1/documents", headers=bearer()).json()["data"] == []
            assert not one.idle and not two.idle  # nor does a conversation about it wait for its next turn


def test_nobody_else_waits_while_a_document_is_loaded(tmp_path, monkeypatch):
    """Two that ask for it wait for one load; another request of the same key has its answer meanwhile."""
    with ExitStack() as stack:
        _, first = stack.enter_context(sharing(tmp_path))
        two, second = stack.enter_context(sharing(tmp_path))
        upload = {"file": ("book.txt", text_of(50).encode())}
        name = httpx.post(f"{first}/v1/documents", files=upload, headers=bearer(), timeout=60).json()["id"]
        load, go, loads = two.load_document, threading.Event(), []

        def slow(path: Path) -> object:
            loads.append(path)
            assert go.wait(30)
            return load(path)

        monkeypatch.setattr(two, "load_document", slow)
        while not httpx.get(f"{second}/v1/documents", headers=bearer()).json()["data"]:
            time.sleep(0.02)
        with ThreadPoolExecutor(2) as pool:
            shown = [
                pool.submit(httpx.get, f"{second}/v1/documents/{name}", headers=bearer(), timeout=60) for _ in range(2)
            ]
            while not loads:
                time.sleep(0.02)
            body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
            assert (
                httpx.post(f"{second}/v1/chat/completions", json=body, headers=bearer(), timeout=60).status_code == 200
            )
            assert not any(answer.done() for answer in shown)
            go.set()
            assert [answer.result().json()["status"] for answer in shown] == ["ready"] * 2 and len(loads) == 1


def test_documents_come_while_others_are_listed():
    """Lists are made by other threads than the one that takes uploads."""
    server = Server(None, "tiny")

    class Slow(UploadedDocument):
        @property
        def owner(self) -> str:
            server.documents[f"doc_{len(server.documents)}"] = UploadedDocument(
                "doc", "bert", "book", 1
            )  # while it is looked at
            return "anna"

        @owner.setter
        def owner(self, value: str) -> None:
            pass

    server.documents["doc_a"] = Slow("doc_a", "anna", "book", 1)
    assert [shown["id"] for shown in server.listed("anna")] == ["doc_a"] and len(server.documents) == 2
    server.stop()
    assert all(held.deleted for held in server.documents.values())


def test_files_that_vanish_while_a_folder_is_looked_through(tmp_path):
    with ExitStack() as stack:
        engine, _ = stack.enter_context(sharing(tmp_path))
        (tmp_path / ("0" * 32)).mkdir()
        (tmp_path / ("0" * 32) / ".x.partial").symlink_to("nowhere")
        engine.store.scan(lambda saved, about: None, engine.spec.origin)


def test_freed_memory_goes_back():
    """Holes between what is held, as ended caches leave them, are no longer resident."""
    trim = _trim()
    if trim is None:
        assert not hasattr(ctypes.CDLL(None), "gnu_get_libc_version")
        return
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    blocks = [libc.malloc(100_000) for _ in range(1000)]  # below the size that the system has pages of its own for
    for block in blocks:
        ctypes.memset(block, 1, 100_000)
    for block in blocks[::2]:
        libc.free(block)
    before = resident()
    trim(0)
    assert before - resident() > 40_000_000
    for block in blocks[1::2]:
        libc.free(block)


def resident() -> int:
    """Bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_turns_of_a_conversation_have_one_name():
    """Of the same key and beginning; a document's id and the client's own name come first."""
    path, key = "/v1/chat/completions", {"authorization": "Bearer a"}
    system, question = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who came in?"}

    def name(*messages: object, headers: dict[str, str] = key, **more: object) -> str:
        return affinity_key(path, headers, json.dumps({"messages": messages, **more}).encode())

    first = name(system, question)
    turns = [{"role": "assistant", "content": "Anna."}, {"role": "user", "content": "And then?"}]
    assert first and name(system, question, *turns, temperature=0) == first
    others = [name(question), name(system, question, headers={"authorization": "Bearer b"}), name(system)]
    assert len({first, *others}) == 4
    assert name(question, document_id="doc_1") == "doc_1" == affinity_key("/v1/documents/doc_1/kept", key, b"")
    ours = key | {"x-session-id": "s"}
    assert name(question, headers=ours) == name(system, headers=ours) != name(question)
    assert affinity_key("/v1/completions", key, b'{"prompt": "x"}') != affinity_key(
        "/v1/completions", key, b'{"prompt": "y"}'
    )
    for body in (b"", b"[]", b"\xff", b'{"messages": [1]}', b'{"messages": {}}', b"[" * 100_000):
        assert len(affinity_key(path, key, body)) in (0, 32)
    claude = {"x-api-key": "a"}
    for route, field in (("/v1/messages", "messages"), ("/v1/responses", "input")):
        asked = [json.dumps({field: [question, *more], "max_tokens": 4}).encode() for more in ([], turns)]
        assert affinity_key(route, claude, asked[0]) == affinity_key(route, claude, asked[1]) != ""
        assert affinity_key(route, claude, asked[0]) != affinity_key(route, {"x-api-key": "b"}, asked[0])
    said = [json.dumps({"input": text}).encode() for text in ("a", "b")]
    assert affinity_key("/v1/responses", key, said[0]) != affinity_key("/v1/responses", key, said[1])
    assert affinity_key("/v1/models", key, b"") == affinity_key("/v1/documents", key, b"file") == ""
