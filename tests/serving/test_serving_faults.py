"""The server against clients that leave, bodies that are wrong, and an engine that fails. Nothing may leak."""

import errno
import json
import logging
import os
import socket
import sys
import threading
import time
import zlib
from array import array
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from http.client import HTTPResponse
from io import BytesIO
from operator import attrgetter
from select import select

import httpx
import pytest
import torch
from http_bodies import KEYS, bearer, chat, deleted, expected, sent, until, upload, uploaded, user
from made_documents import drawn
from planted_files import plant
from read_texts import text_of
from served import held, listening, new_engine, new_request, running_engine, with_template

from locret_kit.runtime import engine as loop
from locret_kit.serving import document_routes, state
from locret_kit.serving.bodies import ChatBody, TextBody
from locret_kit.serving.engine_thread import EngineThread
from locret_kit.serving.request import Busy
from locret_kit.serving.state import Limits, Server, UploadedDocument
from locret_kit.text.converters import LACKS
from locret_kit.text.reader import Late, Unwanted, convert

LIMITS = Limits(4000, 64, body_bytes=200_000, upload_bytes=100_000, documents=3)


class Watched(EngineThread):
    """An engine that notes, after every step and by its own thread, how many caches there were."""

    seen = 0

    def _notify(self, request):
        self.seen = max(self.seen, self.figures["sessions_in_use"])
        super()._notify(request)


def request_lines(caplog, *answers: httpx.Response) -> list[str]:
    """What the log says of each request, without name and seconds. The server writes it after the answer's last byte, so lines of
    earlier tests' requests may come between."""
    names, end = [answer.headers["x-request-id"] for answer in answers], time.monotonic() + 300
    while True:
        said = dict(line.split(" ", 1) for line in caplog.messages if line.startswith("req_"))
        if said.keys() >= {*names}:
            return [said[name].rpartition(" ")[0] for name in names]
        assert time.monotonic() < end, f"{names}, not {said}"
        time.sleep(0.01)


@pytest.fixture(scope="module")
def engine():
    with running_engine(Watched, sessions=3) as made:
        yield made


@pytest.fixture(scope="module")
def server(engine):
    return Server(engine, "tiny", KEYS, (), LIMITS, silence=600.0)


@pytest.fixture(scope="module")
def url(server):
    engine = server.engine
    with listening(server) as address:
        yield address
    server.engine = engine


def quiet(engine: EngineThread) -> None:
    """Wait until nothing runs, and every cache waits."""

    def is_quiet() -> bool:
        now = engine.figures  # of one moment
        return not now["requests_running"] + now["requests_waiting"] and now["sessions_in_use"] == now["sessions_idle"]

    until(is_quiet)
    assert engine.figures["sessions_in_use"] <= engine.sessions and engine.seen <= engine.sessions


def works(url: str) -> None:
    """Once requests of clients that left, which may come late, are gone."""
    answer = until(lambda: (answer := chat(url, user("Who came in?"))).status_code != 429 and answer)
    assert answer.json()["choices"][0]["message"]["content"] == expected(user("Who came in?"))


def test_many_clients_that_leave(url, engine):
    def leave(number: int) -> None:
        body = {"messages": user(text_of(60)), "max_tokens": 64, "stream": number % 2 == 0, "n": 1 + number % 3}
        try:
            timeout = httpx.Timeout(5, read=0.01 * (number % 20) + 0.001)
            where, given = f"{url}/v1/chat/completions", dict(headers=bearer(), timeout=timeout)
            with httpx.stream("POST", where, json=body, **given) as one:
                if one.status_code == 200:
                    next(one.iter_lines())
        except httpx.HTTPError:
            pass

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(leave, range(40)))
    quiet(engine)
    works(url)


WRONG = [
    b"", b"null", b"1", b"\xff\xfe", b"[" * 100_000, b'{"messages":', b"{}" * 3, b'{"messages": {}}',
    b'{"messages": [[]]}', b'{"messages": "x"}', b'{"messages": [{"role": "user"}]}',
    b'{"messages": [{"role": "user", "content": null}]}', b'{"messages": [{"role": "user", "content": [1]}]}',
    b'{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]}',
    b'{"messages": [{"role": "user", "content": "x"}], "seed": ' + b"9" * 5000 + b"}",
]  # fmt: skip
FIELDS = {
    "n": (0, 17, "x", 1.5, 7), "max_tokens": (0, -2, 1.5, "x"), "temperature": (-1, 2.1, "x"),
    "top_p": (-0.1, 2, "x"), "top_k": (-2,), "seed": (-(2**63) - 1, 2**63), "stop": (1, [1], ["x"] * 65), "stream": ("x", 2),
    "logprobs": ("x",), "repetition_penalty": (0, -1, 1e-300, 1e300), "budget": (0, 97), "policy": ("full", "h2o\n", 1),
    "stream_options": (1,), "document_id": (1,), "top_logprobs": (21,), "frequency_penalty": (2.1,), "presence_penalty": (2.1,),
}  # fmt: skip


def test_malformed_bodies(url):
    bodies = [*WRONG, json.dumps({"messages": user("\ud800")}).encode()]
    fields = ((name, value) for name, values in FIELDS.items() for value in values)
    bodies += [json.dumps({"messages": user("x"), name: value}).encode() for name, value in fields]
    assert len(bodies) >= 50
    with httpx.Client(headers=bearer() | {"content-type": "application/json"}, timeout=300) as client:
        for body in bodies:
            answer = client.post(f"{url}/v1/chat/completions", content=body)
            assert 400 <= answer.status_code < 500, (body[:80], answer.text)
            assert set(answer.json().get("error", ())) == {"message", "type", "param", "code"}, (body[:80], answer.text)
        plain = client.post(f"{url}/v1/chat/completions", content=b"x", headers={"content-type": "text/plain"})
        assert plain.status_code == 400
        try:
            many = client.get(f"{url}/health", headers={f"x-{i}": "y" * 100 for i in range(5000)})
            assert many.status_code in (400, 431)
        except httpx.NetworkError:  # it closed the line before all of them were sent
            pass
    works(url)


def test_an_error_names_half_of_a_surrogate_pair(url, engine, monkeypatch):
    with_template(monkeypatch, engine, None)
    body = json.dumps({"messages": user("x"), "chat_template_kwargs": {"\ud800": 1}})
    headers = bearer() | {"content-type": "application/json"}
    answer = httpx.post(f"{url}/v1/chat/completions", content=body, headers=headers)
    assert answer.status_code == 400 and answer.json()["error"]["message"].endswith(r"would take \ud800")


def test_a_slow_body_and_a_body_without_a_key(url, server, monkeypatch):
    monkeypatch.setattr(server, "limits", replace(LIMITS, body_seconds=0.5))
    with sent(url, "/v1/chat/completions", b" ", 90_000) as line:
        while not select([line], [], [], 0.1)[0]:
            line.sendall(b" ")
        answer = HTTPResponse(line)
        answer.begin()
        assert answer.status == 408 and b"took more than 0.5 s" in answer.read()
    with socket.create_connection(httpx.URL(url).netloc.decode().split(":")) as line:  # refused before a byte of it
        line.sendall(b"POST /v1/documents HTTP/1.1\r\nHost: x\r\nContent-Length: 90000\r\n\r\n")
        assert line.recv(4096).startswith(b"HTTP/1.1 401")


def test_answers_that_do_not_all_fit_are_refused_together(engine):
    small = new_engine(sessions=1, queue=3)
    ids = array("i", range(2, 60))
    with small._changed:  # the engine's thread takes nothing meanwhile
        small.submit(*(new_request(ids, 2) for _ in range(2)))
        with pytest.raises(Busy):
            small.submit(*(new_request(ids, 2) for _ in range(2)))
        assert small.figures["requests_waiting"] == 2
    with pytest.raises(ValueError, match="4 answers must be at most 3"):
        small.submit(*(new_request(ids, 2) for _ in range(4)))
    small.stop()
    assert small.counters.requests == 2


def failing(error: Exception):
    def call(*given):
        raise error

    return lambda real: call


@pytest.mark.parametrize(
    ("place", "made"),
    [
        ("logits_after", failing(RuntimeError("broken"))),
        ("logits_after", failing(torch.OutOfMemoryError("no memory"))),
        ("logits_after", failing(KeyError("x"))),
        ("logits_after", lambda real: lambda *given: real(*given) * torch.nan),
        ("Engine._turns", failing(ZeroDivisionError("a fault of ours"))),
    ],
)
def test_a_step_that_fails_ends_its_requests_alone(url, engine, monkeypatch, place, made):
    """An error, logits that are not finite, and a fault of the batch itself."""
    monkeypatch.setattr(f"locret_kit.runtime.engine.{place}", made(attrgetter(place)(loop)))
    answer = chat(url, user("x"), max_tokens=4, temperature=1)
    assert answer.status_code == 500 and set(answer.json()["error"]) == {"message", "type", "param", "code"}
    monkeypatch.undo()
    quiet(engine)
    works(url)


def test_an_error_in_a_stream_is_that_of_a_whole_answer(url, engine, monkeypatch):
    with held(engine):  # an error of the request's own settings waits for nobody
        early = chat(url, user("x"), budget=4, stream=True)
    assert early.status_code == 400 and "must be below budget=4" in early.json()["error"]["message"]
    monkeypatch.setattr(engine.spec, "cache", failing(ValueError("no room"))(None))
    whole, stream = (chat(url, user("x"), stream=stream) for stream in (False, True))
    assert whole.status_code == 400 and whole.json()["error"]["message"] == "no room"
    assert json.loads(stream.text.strip().splitlines()[-1].removeprefix("data: ")) == whole.json()


def test_a_fault_of_a_route_has_the_shape_of_an_error(url, server, monkeypatch, caplog):
    """And a name in the log, as a refusal before every route has."""

    def listed(owner):
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(server, "listed", listed)
    with caplog.at_level(logging.INFO):
        answers = [httpx.get(f"{url}/v1/documents", headers=headers) for headers in (bearer("wrong"), bearer())]
        assert request_lines(caplog, *answers) == [f"GET /v1/documents {status}" for status in (401, 500)]
    fault = {"message": "the server failed", "type": "server_error", "param": None, "code": None}
    assert answers[1].json()["error"] == fault
    wrong = httpx.put(f"{url}/v1/models", headers=bearer())
    assert wrong.status_code == 405 and wrong.headers["allow"] == "GET"


def test_documents_deleted_while_they_are_read_or_asked(url, engine, server, monkeypatch):
    for begun in (False, True):
        document = upload(url, "a.txt", text_of(1000).encode()).json()
        held = server.documents[document["id"]]
        until(lambda held=held, begun=begun: held.read or held.document or not begun)
        assert deleted(url, document)
        assert httpx.get(f"{url}/v1/documents/{document['id']}", headers=bearer()).status_code == 404
    until(lambda: not server.documents and not server.tasks)
    asked, ids = uploaded(url, "a.txt", text_of(100).encode()), ChatBody.ids

    def deleting(*given):
        assert deleted(url, asked)
        return ids(*given)

    with monkeypatch.context() as patch:  # while its question becomes tokens
        patch.setattr(ChatBody, "ids", deleting)
        assert chat(url, user("Who?"), document_id=asked["id"]).status_code == 404
    quiet(engine)
    engine.forget("")
    works(url)


def test_uploads_at_once_never_pass_the_limit(url, server):
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda _: upload(url, "a.txt", text_of(100).encode()), range(6)))
    assert sorted(answer.status_code for answer in answers) == [202] * 3 + [429] * 3
    for answer in answers:
        if answer.status_code == 429:
            assert "retry-after" not in answer.headers and "documents=3 at most: delete one" in answer.text
    emptied(url, server)


@pytest.mark.parametrize(
    ("documents", "says"), [(0, "documents=0: the server takes none"), (1, "or deleted while they are read")]
)
def test_an_upload_that_nobody_can_make_room_for(url, engine, server, monkeypatch, documents, says):
    monkeypatch.setattr(server, "limits", replace(LIMITS, documents=documents))
    with held(engine, 1):
        if documents:
            first = upload(url, "a.txt", text_of(300).encode()).json()
            until(lambda: httpx.get(f"{url}/v1/documents/{first['id']}", headers=bearer()).json().get("read_tokens"))
            assert deleted(url, first)
        refused = upload(url, "b.txt", b"The harbour.")
    assert refused.status_code == 429 and refused.json()["error"]["message"].endswith(says)
    emptied(url, server)


def test_uploads_that_fail_hold_no_place(url, server, monkeypatch):
    monkeypatch.setattr(server, "limits", replace(LIMITS, documents=2))
    for number in range(3):  # each stays listed
        assert "the text is not UTF-8" in uploaded(url, f"{number}.txt", b"a\xff")["error"]
    assert len(server.documents) == 3
    assert "\nlocret_documents 0.0\n" in httpx.get(f"{url}/metrics", headers=bearer()).text
    two = [("file", (name, b"The boats came in.")) for name in ("a.txt", "b.txt")]  # one would be lost, and nobody told
    refused = httpx.post(f"{url}/v1/documents", files=two, headers=bearer())
    assert refused.status_code == 400 and "file: List should have at most 1 item" in refused.text, refused.text
    form = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a\\ud800.txt"\r\n\r\nThe boats.\r\n--b--\r\n'
    kind = {"content-type": "multipart/form-data; boundary=b; charset=unicode_escape"}
    named = httpx.post(f"{url}/v1/documents", content=form, headers=bearer() | kind, timeout=300)
    assert named.json()["title"] == "a?.txt"
    emptied(url, server)


def test_one_upload_stops_nobody_else(url, server, monkeypatch):
    """Three files that a parser works on without end, then an honest one of the same owner and one of another."""
    started, ended = [], threading.Event()

    def convert(data, name, *, seconds, unwanted, lost):
        if name.startswith("bomb"):
            started.append((name, seconds))
            ended.wait(0.2 if seconds == state.SHORT else None)
            raise Late(f"{name}: its conversion took more than {seconds} s")
        return text_of(50)

    monkeypatch.setattr(state, "convert", convert)
    monkeypatch.setattr(server, "limits", replace(server.limits, documents=9))
    bombs, honest = [f"bomb{number}.html" for number in range(3)], ["a.html", "a.txt"]
    for name in bombs + honest:
        upload(url, name, text_of(50).encode())
    upload(url, "b.pdf", b"%PDF-", KEYS[1])
    wanted = dict.fromkeys(bombs, "reading") | dict.fromkeys([*honest, "b.pdf"], "ready")
    try:
        until(lambda: {held.title: held.shown()["status"] for held in server.documents.values()} == wanted)
        until(lambda: len(started) == 4)
        assert ("bomb0.html", state.LONG) in started
    finally:
        ended.set()
    emptied(url, server)


def emptied(url: str, server: Server) -> None:
    """Delete every document, and wait until those that were being read are gone."""
    for one in list(server.documents.values()):
        for key in KEYS:
            httpx.delete(f"{url}/v1/documents/{one.id}", headers=bearer(key))
    until(lambda: not server.documents)


def pdf(size: int) -> bytes:
    """A PDF whose page unpacks, in two steps, to so many bytes."""
    pack = zlib.compressobj(1)
    page = zlib.compress(b"".join([pack.compress(bytes(1 << 20)) for _ in range(size >> 20)]) + pack.flush())
    return drawn(page, stream="/Filter [/FlateDecode /FlateDecode]")


def test_a_bomb_ends_its_conversion_alone(url, engine, server, monkeypatch):
    data = pdf(256 << 20)
    assert len(data) < 2 << 20
    monkeypatch.setattr("locret_kit.serving.state.convert", partial(convert, memory=320 << 20))
    monkeypatch.setattr(server, "limits", replace(LIMITS, upload_bytes=2 << 20))
    held = uploaded(url, "a.pdf", data)
    assert held["status"] == "failed" and " s or 320 MiB" in held["error"], held
    emptied(url, server)
    quiet(engine)
    works(url)


@pytest.mark.parametrize(("name", "size"), [("a.locret", 5000), ("a.locret", 90_000), ("a.txt", 90_000)])
def test_a_full_disk_while_a_file_is_uploaded(url, server, monkeypatch, tmp_path, name, size):
    """Of a saved cache, and of a form that is too large for memory. What a killed server leaves is nothing."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("starlette.formparsers.MultiPartParser.spool_max_size", 10_000)
    data, seen, begin = b"word " * (size // 5), [], document_routes.read_document
    monkeypatch.setattr(
        document_routes, "read_document", lambda *given: seen.extend(tmp_path.rglob("*")) or begin(*given)
    )
    assert upload(url, name, data).status_code == 202 and not seen
    emptied(url, server)
    until(lambda: not server.places)

    class Full(BytesIO):
        def write(self, data):
            raise OSError(errno.ENOSPC, f"No space left on {tmp_path}")

    monkeypatch.setattr("tempfile.TemporaryFile", lambda *given, **named: Full())
    answer = upload(url, name, data)
    said = answer.json()["error"]["message"]
    assert (answer.status_code, said) == (507, "the upload cannot be put on disk: No space left on device")
    assert not [*tmp_path.iterdir()] and not server.places
    monkeypatch.undo()
    works(url)


def test_readers_that_do_not_read(url, engine):
    """Their answers end, and so do their sessions; nobody waits for them."""
    body = json.dumps({"messages": user(text_of(30)), "max_tokens": 64, "stream": True, "ignored": "x" * 100}).encode()
    lines = [sent(url, "/v1/chat/completions", body) for _ in range(6)]
    for line in lines:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
    works(url)
    quiet(engine)
    for line in lines:
        line.close()


def test_a_conversion_ends_at_its_limits():
    with pytest.raises(ValueError, match="above the limit of 10"):
        convert(b"x" * 11, "a.txt", text=10)
    began = time.monotonic()
    with pytest.raises(Unwanted):
        convert(b"x" * 50_000_000, "a.html", unwanted=lambda: time.monotonic() > began + 0.1)


def test_a_conversion_that_starts_slowly_gets_its_whole_input(tmp_path, monkeypatch):
    slow = tmp_path / "python"
    slow.write_text(f'#!/bin/sh\nsleep 0.3\nexec {sys.executable} "$@"\n')
    slow.chmod(0o700)
    monkeypatch.setattr("locret_kit.text.reader.sys.executable", str(slow))
    assert convert(b"word " * 100_000, "a.txt", seconds=10) == "word " * 100_000


def test_a_page_is_read_without_modules_of_the_servers_folder(url, server, tmp_path, monkeypatch):
    ran = plant(tmp_path, "markdownify", "subprocess", "json", "resource", "locret_kit", "sitecustomize")
    monkeypatch.chdir(tmp_path)
    held = uploaded(url, f"{'a' * 250}.html", f"<p>{text_of(50)}</p>".encode())  # a long name, which is cut
    assert held["status"] == "ready" and held["lost"] == [f"{'a' * 195}.html: {LACKS}"] and not ran.exists(), held
    emptied(url, server)


def test_a_broken_library_is_named_in_the_log_alone(url, tmp_path, monkeypatch, caplog):
    (tmp_path / "markdownify.py").write_text("raise ImportError(f'cannot import name x ({__file__})')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    held = uploaded(url, "a.html", b"<p>some words</p>")
    assert held["error"] == "a.html: the server lacks a library that this format needs, which its log names"
    assert f"cannot import name x ({tmp_path}" in caplog.text


def test_logs_hold_neither_prompts_nor_keys(url, caplog):
    with caplog.at_level(logging.INFO):
        whole = chat(url, user("a secret word"), max_tokens=2)
        request_lines(caplog, whole, httpx.get(f"{url}/v1/a%0Ab", headers=bearer("wrong-key")))
    said = "\n".join(record.getMessage() for record in caplog.records)
    assert "/v1/chat/completions 200" in said and "secret" not in said
    assert not any(key in said for key in (*KEYS, "wrong-key"))
    assert all("\n" not in record.getMessage() for record in caplog.records)


def test_a_document_stays_whose_deletion_is_refused():
    """A server that still loads knows the documents that it has loaded."""
    server = Server(None, "tiny")
    server.documents["doc_1"] = UploadedDocument("doc_1", *server.owners.values(), "a", 0, error="it has no text")
    with listening(server) as url:
        assert httpx.delete(f"{url}/v1/documents/doc_1").status_code == 503
        assert [one["id"] for one in httpx.get(f"{url}/v1/documents").json()["data"]] == ["doc_1"]


@pytest.mark.parametrize("given", [["tool web"], "tool web", {"tool": 1}])
def test_a_client_says_nothing_of_what_is_left_out(given):
    body = {"messages": user("a"), "prompt": "a", "left_out": given}
    assert [kind.model_validate(body).left_out for kind in (ChatBody, TextBody)] == [[], []]
