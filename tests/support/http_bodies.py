"""Pieces that several tests of serving share."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import TypeVar

import httpx
from read_texts import parts
from served import KEYS, SETTINGS

from locret_kit import BoundedCache
from locret_kit.runtime.session import Answer
from locret_kit.settings import RunSettings
from locret_kit.text.template import render_messages

T = TypeVar("T")
PARAMETERS = {
    "type": "object", "properties": {"name": {"enum": ["north", "south"]}, "tide": {"type": "boolean"}},
    "required": ["name", "tide"], "additionalProperties": False,
}  # fmt: skip
WORDS = {"name": "depth", "description": "How deep a harbour is"}
CHAT_TOOL = {"type": "function", "function": {**WORDS, "parameters": PARAMETERS}}
NOW = {"type": "function", "function": {"name": "now"}}
"""A tool without parameters."""


def expected(messages, *given, **more) -> str:
    """The answer of a run of its own."""
    tokenizer = parts("llama")[1]
    return alone(tokenizer(render_messages(tokenizer, messages)[1], add_special_tokens=False).input_ids, *given, **more)


def alone(ids, policy="locret", budget=96, max_new_tokens=8, **lengths) -> str:
    """The same of token ids."""
    model, tokenizer, heads = parts("llama")
    settings = RunSettings(**{**vars(SETTINGS), "budget": budget, **lengths})
    needed = heads if policy == "locret" else None
    cache = BoundedCache(settings, policy, needed, prompt_length=len(ids))
    return str(Answer(model, tokenizer, ids, cache, max_new_tokens=max_new_tokens))


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def bearer(key: str = KEYS[0]) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def chat(url: str, messages: list, **fields: object) -> httpx.Response:
    """The answer of chat completions, greedy and of eight tokens where nothing else is asked for."""
    body = {"messages": messages, "temperature": 0, "max_tokens": 8, **fields}
    return httpx.post(f"{url}/v1/chat/completions", json=body, headers=bearer(), timeout=300)


def sent(url: str, path: str, body: bytes, length: int | None = None) -> socket.socket:
    """A connection over which a request was sent, or the beginning of one of so many bytes."""
    line = socket.create_connection(httpx.URL(url).netloc.decode().split(":"))
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEYS[0]}\r\nContent-Type: application/json\r\n"
    line.sendall(f"{head}Content-Length: {length or len(body)}\r\n\r\n".encode() + body)
    return line


def until(call: Callable[[], T], seconds: float = 300) -> T:
    """What a call gives, once that is true."""
    end = time.monotonic() + seconds
    while not (value := call()):
        assert time.monotonic() < end
        time.sleep(0.02)
    return value


def upload(url: str, name: str, data: bytes, key: str = KEYS[0]) -> httpx.Response:
    return httpx.post(f"{url}/v1/documents", files={"file": (name, data)}, headers=bearer(key), timeout=300)


def uploaded(url: str, name: str, data: bytes) -> dict:
    """A document that has been read, or has failed."""
    where = f"{url}/v1/documents/{upload(url, name, data).json()['id']}"
    return until(lambda: (shown := httpx.get(where, headers=bearer()).json())["status"] != "reading" and shown)


def deleted(url: str, document: dict) -> bool:
    """Whether a document was there to be deleted."""
    return httpx.delete(f"{url}/v1/documents/{document['id']}", headers=bearer()).status_code == 200
