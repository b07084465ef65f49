"""The first and the last second of a server: a port that opens before anything is loaded, a stop in the middle of work, an engine
that fails."""

import asyncio
import json
import logging
import socket
import threading
from array import array
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from unittest import mock

import httpx
import pytest
import uvicorn
from fastapi.testclient import TestClient
from http_bodies import SETTINGS, chat, expected, sent, until, upload, uploaded, user
from read_texts import parts, text_of
from served import KEYS, held, listening, new_engine, new_request

from locret_kit import BoundedCache
from locret_kit.runtime import engine as loop
from locret_kit.serving.app import make_app
from locret_kit.serving.bodies import ChatBody
from locret_kit.serving.engine_thread import EngineThread
from locret_kit.serving.process import HeaderTimeout, LoadingApp, Stoppable
from locret_kit.serving.request import Stopping
from locret_kit.serving.state import Limits, Server
from locret_kit.serving.store import Store


class Running:
    """A server as the command runs it, in a thread, with nothing behind its port yet."""

    def __init__(self, grace: float) -> None:
        self.loading = LoadingApp()
        listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        config = uvicorn.Config(
            self.loading, http=HeaderTimeout, ws="none", lifespan="off", log_config=None, timeout_graceful_shutdown=30
        )
        self.server = Stoppable(config, lambda: self.loading.stop(grace))
        self._thread = threading.Thread(target=self.server.run, args=([listener],))
        self._thread.start()

    def stop(self) -> None:
        self.server.should_exit = True
        self._thread.join(300)
        assert not self._thread.is_alive()


def test_a_stop_while_a_long_prompt_is_read(tmp_path, caplog):
    """From the open port to the closed one: every request gets an answer, the session of the turn before is on disk, no slot
    is taken, and the log has neither an error nor a traceback."""
    caplog.set_level(logging.WARNING)
    running = Running(grace=0.3)
    for path, status in (("/health", {"status": "loading"}), ("/v1/models", None)):
        answer = httpx.get(running.url + path)
        assert answer.status_code == 503 and int(answer.headers["retry-after"]) > 0
        said = answer.json()
        assert said == status or said["error"]["message"] == "the model is being loaded"
    store = Store(tmp_path, 1 << 30)
    engine = new_engine(sessions=3, store=store)
    # Silence ends no wait here: after it, an answer's status would be there before its failure.
    server = Server(engine, "tiny", KEYS, (), Limits(prompt_tokens=1 << 20), salt=store.salt, silence=600.0)
    running.loading.stop, running.loading.app = server.stop, make_app(server)
    first = chat(running.url, user("Who came in?")).json()
    assert first["choices"][0]["message"]["content"] == expected(user("Who came in?"))

    book, answers = text_of(30_000), {}

    def read(stream: bool) -> None:
        answers[stream] = chat(running.url, user(book), stream=stream)

    readers = [threading.Thread(target=read, args=(stream,)) for stream in (True, False)]
    with held(engine, 8):
        name = upload(running.url, "a.txt", book.encode()).json()["id"]
        until(lambda: server.documents[name].read)
        for reader in readers:
            reader.start()
        half = sent(running.url, "/v1/completions", b"{", 9)
        until(lambda: (now := engine.figures)["requests_running"] + now["requests_waiting"] == 3)
    running.stop()
    for reader in readers:
        reader.join()
    half.close()
    event = json.loads(answers[True].text.strip().splitlines()[-1].removeprefix("data: "))
    assert answers[True].status_code == 200 and event["error"]["message"] == "the server is stopping"
    assert answers[False].status_code == 503 and answers[False].json() == event
    assert event["error"]["type"] == "service_unavailable_error"
    now = engine.figures
    assert not engine._thread.is_alive() and now["requests_running"] == now["requests_waiting"] == 0
    assert now["sessions_in_use"] == now["sessions_idle"]
    assert engine.counters.cancelled >= 2
    assert [record for record in caplog.records if record.exc_info or record.levelno >= logging.ERROR] == []
    again = Store(tmp_path, 1 << 30)  # nobody else has it any more
    again.scan(engine.spec)
    (key,) = again.sessions(next(iter(server.owners.values())))
    assert key.tokens >= first["usage"]["prompt_tokens"] and not list(again.documents({key.owner}))
    again.close()


def test_a_second_ctrl_c_waits_for_nothing():
    """``end`` never ends; the server does."""
    never = threading.Event()
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(LoadingApp(), lifespan="off", log_config=None, timeout_graceful_shutdown=30)
    server = Stoppable(config, lambda: never.wait(60) and None)

    async def twice() -> None:
        running = asyncio.create_task(server.serve([listener]))
        while not server.started:
            await asyncio.sleep(0.01)
        server.should_exit = True
        await asyncio.sleep(0.3)
        assert not running.done()
        server.force_exit = True
        await asyncio.wait_for(running, 300)

    try:
        asyncio.run(twice())
    finally:
        never.set()


@contextmanager
def waiting(**sizes: int) -> Iterator[tuple[EngineThread, threading.Event, threading.Event]]:
    """An engine whose forwards wait for the second event; the first says that one has begun."""
    engine = new_engine(**sizes)
    forward, begun, goes_on = loop.logits_after, threading.Event(), threading.Event()

    def slow(*given):
        begun.set()
        assert goes_on.wait(300)
        return forward(*given)

    with mock.patch.object(loop, "logits_after", slow):
        yield engine, begun, goes_on


def test_a_stop_ends_what_came_during_a_long_forward():
    requests = [new_request(array("i", range(2, 40)), 60) for _ in range(2)]
    with waiting(sessions=3) as (engine, begun, goes_on):
        engine.submit(requests[0])
        assert begun.wait(300)
        engine.submit(requests[1])
        stopping = threading.Thread(target=engine.stop, args=(0,))
        stopping.start()
        until(lambda: all(request.cancelled for request in requests))
        goes_on.set()
        stopping.join()
    assert [request.sequence.finish_reason for request in requests] == ["cancelled"] * 2
    assert not engine._thread.is_alive()


def test_a_document_waits_while_the_queue_is_full():
    waits, (model, _, heads) = threading.Event(), parts("llama")
    with waiting(sessions=1, queue=1) as (engine, begun, goes_on), ThreadPoolExecutor(1) as pool:
        for _ in range(2):
            engine.submit(new_request(array("i", range(2, 40)), 3))
            assert begun.wait(300)
        cache = BoundedCache(SETTINGS, "locret", heads, prompt_length=50)
        read = pool.submit(engine.read, model, array("i", range(2, 52)), cache, lambda *_: waits.set())
        assert waits.wait(300) and not read.done()
        goes_on.set()
        read.result(300)
    assert cache.get_seq_length() == 50 and engine.counters.refused == 0
    engine.stop()


def test_a_fault_of_the_engine_ends_everybody_and_health_says_so(monkeypatch, caplog):
    engine = new_engine(sessions=1)

    def tell(request):
        raise ZeroDivisionError("a fault of ours")

    monkeypatch.setattr(engine, "_notify", tell)
    told = [threading.Event(), threading.Event()]
    requests = [new_request(array("i", range(2, 40)), 3, on_change=one.set) for one in told]
    with engine._changed:  # the engine's thread takes nothing meanwhile
        engine.submit(*requests)
    assert all(one.wait(300) for one in told)
    assert [str(request.sequence.error) for request in requests] == ["a fault of ours"] * 2
    assert "the engine has ended" in caplog.text
    with pytest.raises(Stopping, match="ended with an error"):
        engine.submit(requests[0])
    with TestClient(make_app(Server(engine, "tiny"))) as client:
        answer = client.get("/health")
        assert (answer.status_code, answer.json()) == (503, {"status": "failed"})
    engine.stop(0)


def test_a_document_is_there_until_its_server_has_stopped(monkeypatch):
    """A question that came before is not told that its document is gone."""
    engine = new_engine()
    server, ids = Server(engine, "tiny", KEYS, (), Limits()), ChatBody.ids
    with listening(server) as url:
        name = uploaded(url, "a.txt", text_of(60).encode())["id"]
        monkeypatch.setattr(ChatBody, "ids", lambda *given: server.stop(0) or ids(*given))
        answer = chat(url, user("Who?"), document_id=name)
    assert (answer.status_code, answer.json()["error"]["message"]) == (503, "the server is stopping")


def test_a_whole_answer_that_is_broken_off_leaves_no_traceback(monkeypatch, caplog):
    """Its status was sent while it waited."""
    engine, go = new_engine(), threading.Event()

    def fails() -> None:
        go.wait()
        raise ValueError("no room")

    monkeypatch.setattr(engine._engine, "step", fails)
    body, headers = {"messages": user("a")}, {"authorization": f"Bearer {KEYS[0]}"}
    with (
        listening(Server(engine, "tiny", KEYS, silence=0.05)) as url,
        pytest.raises(httpx.RemoteProtocolError),
        httpx.stream("POST", f"{url}/v1/chat/completions", json=body, headers=headers) as answer,
    ):
        for _ in answer.iter_raw():
            go.set()
    assert not [record for record in caplog.records if record.name == "uvicorn.error" and record.exc_info]
    assert "an answer broke off: no room" in caplog.text
    engine.stop()
