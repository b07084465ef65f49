"""The server over a tiny backbone, at a real port."""

from __future__ import annotations

import socket
import threading
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import torch
import uvicorn
from read_texts import parts
from strangers import tokens

from locret_kit.engine import Sequence
from locret_kit.policies.grammar import parse_policy
from locret_kit.serving import completions
from locret_kit.serving.app import make_app
from locret_kit.serving.engine_thread import EngineThread
from locret_kit.serving.process import HeaderTimeout
from locret_kit.serving.request import AnswerSpec, Prompt, ServerRequest
from locret_kit.serving.state import Limits, Server
from locret_kit.serving.store import Store
from locret_kit.settings import RunSettings

httpx._config.DEFAULT_TIMEOUT_CONFIG.__init__(300)  # of every request; five seconds are not enough on a busy machine
# Of every client: certificates, which nobody here looks at, take 20 ms to read.
httpx._transports.default.create_ssl_context = cache(httpx._config.create_ssl_context)
SETTINGS = RunSettings(budget=96, chunk=32, stabilizers=4, local_len=5)
KEYS = ("key-of-anna", "key-of-bert")
LIMITS = Limits(prompt_tokens=4000, answer_tokens=64, body_bytes=200_000, upload_bytes=1_000_000, documents=3)


def new_engine(kind: type[EngineThread] = EngineThread, settings: RunSettings = SETTINGS, **sizes: Any) -> EngineThread:
    """An engine over the tiny backbone."""
    model, tokenizer, heads = parts("llama")
    return kind(model, tokenizer, settings, parse_policy("locret"), heads, piece=64, **sizes)


@contextmanager
def running_engine(kind: type[EngineThread] = EngineThread, **sizes: Any) -> Iterator[EngineThread]:
    """An engine, of four sessions where nothing else is said."""
    with stopped(new_engine(kind, **{"sessions": 4, "queue": 6, **sizes})) as made:
        yield made


@contextmanager
def stopped(engine: EngineThread) -> Iterator[EngineThread]:
    """An engine that is stopped at the end."""
    try:
        yield engine
    finally:
        engine.stop()


class Dictated:
    """A constraint that lets an answer be these tokens alone."""

    def __init__(self, ids: list[int]) -> None:
        self.ids = list(ids)

    def allowed(self, vocabulary: int) -> torch.Tensor:
        return torch.arange(vocabulary) == self.ids[0]

    def take(self, token: int) -> None:
        self.ids.pop(0)


def new_request(
    ids: array[int], tokens: int, *, owner: str = "", shared_tokens: int = 0, spec: dict | None = None, **given: Any
) -> ServerRequest:
    """A request for so many tokens; ``spec`` has other fields of its specification."""
    return ServerRequest(Prompt(ids, shared_tokens), AnswerSpec(tokens, **(spec or {})), owner=owner, **given)


def with_template(monkeypatch: Any, engine: EngineThread, template: str) -> Any:
    """The tokenizer of an engine, which has this chat template from now on."""
    tokenizer = deepcopy(engine.tokenizer)
    tokenizer.chat_template = template
    monkeypatch.setattr(engine, "tokenizer", tokenizer)
    return tokenizer


def dictate(monkeypatch: Any, tokenizer: Any, text: str) -> list[int]:
    """Have every answer be this text. Gives its tokens."""
    ids, form_of_answer = tokenizer(text, add_special_tokens=False).input_ids, completions.form_of_answer
    dictated = lambda *given: (partial(Dictated, ids), form_of_answer(*given)[1])  # noqa: E731
    monkeypatch.setattr(completions, "form_of_answer", dictated)
    return ids


def ask(engine: EngineThread, owner: str, ids: array[int], **given: object) -> ServerRequest:
    """A request that has ended, for four tokens."""
    return ask_together(engine, ids, owner=owner, **given)[0]


def ask_together(
    engine: EngineThread, *prompts: array[int], owner: str = "", tokens: int = 4, **given: Any
) -> list[ServerRequest]:
    """Requests that were submitted at once and have ended."""
    requests, ended = [new_request(ids, tokens, owner=owner, **given) for ids in prompts], threading.Semaphore(0)
    for request in requests:
        request.on_change = lambda own=request: ended.release() if own.sequence.finish_reason is not None else None
    engine.submit(*requests)
    assert all(ended.acquire(timeout=300) for _ in requests)
    for request in requests:
        assert request.sequence.error is None, request.sequence.error
    return requests


def random_ids(length: int, seed: int) -> array[int]:
    return array("i", tokens(length, seed=seed)[0].tolist())


@contextmanager
def held(engine: EngineThread, forwards: int = 0) -> Iterator[threading.Event]:
    """An engine that waits for the event, or the block's end, after so many forwards: what is looked at meanwhile cannot pass."""
    step, left, goes_on = engine._engine.step, iter(range(forwards)), threading.Event()

    def wait() -> list[Sequence]:
        if next(left, None) is None:
            goes_on.wait()
        return step()

    with mock.patch.object(engine._engine, "step", wait):
        try:
            yield goes_on
        finally:
            goes_on.set()


@contextmanager
def serving(
    engine: EngineThread | None, limits: Limits = LIMITS, keys: tuple[str, ...] = KEYS, address: str = "127.0.0.1",
    silence: float = 600.0, **given: object,
) -> Iterator[str]:  # fmt: skip
    """The address of a server, which is still loading without an engine; an engine goes on when it ends."""
    with listening(Server(engine, "tiny", keys, ("h2o",), limits, silence=silence, **given), address) as url:
        yield url


@contextmanager
def listening(server: Server, address: str = "127.0.0.1") -> Iterator[str]:
    """The address of a server; its engine goes on when it ends."""
    with socket.socket() as listener:
        listener.bind((address, 0))
        runner = uvicorn.Server(
            uvicorn.Config(
                make_app(server), http=HeaderTimeout, log_config=None, log_level="error", timeout_keep_alive=600
            )
        )
        thread = threading.Thread(target=runner.run, args=([listener],), daemon=True)
        thread.start()
        while not runner.started:
            time.sleep(0.02)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.engine = None
        runner.should_exit = True
        thread.join(60)
        server.stop()


def serve_until_killed(folder: Path) -> int:
    """A server with sessions in a folder. It says its address."""
    store = Store(folder, 1 << 30)
    with serving(new_engine(sessions=4, store=store), salt=store.salt) as address:
        print(address, flush=True)
        time.sleep(600)
    return 1
