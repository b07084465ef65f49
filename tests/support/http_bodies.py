"""Pieces that several tests of serving share."""

from __future__ import annotations

from read_texts import parts
from served import KEYS, SETTINGS

from locret_kit import BoundedCache
from locret_kit.runtime.session import generate
from locret_kit.settings import RunSettings
from locret_kit.text.template import render_messages


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
