"""Pieces that several tests of documents share."""

from __future__ import annotations

from functools import cache

import torch
from tiny_heads import tiny_heads
from tiny_models import tiny_model
from tiny_tokenizer import tiny_tokenizer

from locret_kit import BoundedCache, Document
from locret_kit.policies.grammar import parse_policy

WORDS = "The harbour was quiet when the boats came in with nets and ropes of every colour and nobody spoke".split()  # noqa: SIM905


QUESTIONS = ("What is it?", "Who came in, and when did the boats with nets come? " * 3)


REREADING = "rereading-locret(tokens=12,window=4,kernel=3,first=2)"


def text_of(words: int = 420, seed: int = 0) -> str:
    picks = torch.randint(len(WORDS), (words,), generator=torch.Generator().manual_seed(seed)).tolist()
    return " ".join(WORDS[i] for i in picks) + "."


@cache
def parts(family: str = "llama"):
    """A tiny backbone in float64, its tokenizer, and heads."""
    model = tiny_model(family, vocab_size=400).double()
    return model, tiny_tokenizer(), tiny_heads(model, 32, seed=3)


def kept(cache: BoundedCache) -> list:
    return [[head.tolist() for item in cache.kept_positions(i) for head in item] for i in range(len(cache.bounded))]


def read(family: str, policy: str, text: str, **settings) -> Document:
    model, tokenizer, heads = parts(family)
    needed = heads if parse_policy(policy).needs_heads else None
    return Document.read(model, tokenizer, text, settings.pop("budget", 24), policy, needed, **settings)


SETTINGS = dict(chunk=64, stabilizers=4, local_len=5, budget=48)
