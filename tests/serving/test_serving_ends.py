"""The first and the last second of a server: a port that opens before anything is loaded, and a stop in the middle of work."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading

import httpx
import uvicorn
from http_bodies import chat, expected, sent, until, upload, user
from read_texts import text_of
from served import KEYS, held, new_engine

from locret_kit.serving.app import make_app
from locret_kit.serving.process import HeaderTimeout, LoadingApp, Stoppable
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
    running.loading.put(make_app(server), server.stop)
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
    assert (
        not engine._thread.is_alive()
        and engine.figures["requests_running"] == engine.figures["requests_waiting"] == 0
        and engine.figures["sessions_in_use"] == engine.figures["sessions_idle"]
    )
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
