"""Pieces that several tests of serving share."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import httpx
from read_texts import parts
from served import KEYS, SETTINGS

from locret_kit import BoundedCache
from locret_kit.runtime.session import generate
from locret_kit.settings import RunSettings
from locret_kit.text.template import render_messages

T = TypeVar("T")


def expected(messages, policy="locret", budget=96, max_new_tokens=8) -> str:
    """The answer of a run of its own."""
    model, tokenizer, heads = parts("llama")
    ids = tokenizer(render_messages(tokenizer, messages)[1], add_special_tokens=False).input_ids
    settings = RunSettings(**{**vars(SETTINGS), "budget": budget})
    needed = heads if policy == "locret" else None
    cache = BoundedCache(settings, policy, needed, prompt_length=len(ids))
    return generate(model, tokenizer, ids, cache, max_new_tokens=max_new_tokens)[0]


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def bearer(key: str = KEYS[0]) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def chat(url: str, messages: list, **fields: object) -> httpx.Response:
    """The answer of chat completions, greedy and of eight tokens where nothing else is asked for."""
    body = {"messages": messages, "temperature": 0, "max_tokens": 8, **fields}
    return httpx.post(f"{url}/v1/chat/completions", json=body, headers=bearer(), timeout=100)


def until(call: Callable[[], T]) -> T:
    """What a call gives, once that is true."""
    end = time.monotonic() + 60
    while not (value := call()):
        assert time.monotonic() < end
        time.sleep(0.02)
    return value


def uploaded(url: str, name: str, data: bytes) -> dict:
    """A document that has been read, or has failed."""
    made = httpx.post(f"{url}/v1/documents", files={"file": (name, data)}, headers=bearer(), timeout=60).json()
    where = f"{url}/v1/documents/{made['id']}"
    return until(lambda: (shown := httpx.get(where, headers=bearer()).json())["status"] != "reading" and shown)


def deleted(url: str, document: dict) -> bool:
    """Whether a document was there to be deleted."""
    return httpx.delete(f"{url}/v1/documents/{document['id']}", headers=bearer()).status_code == 200
