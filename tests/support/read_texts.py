"""Pieces that several tests of documents share."""

from functools import cache
from pathlib import Path

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


def heads_for(policy: str, family: str = "llama"):
    """The heads, where the policy needs some."""
    return parts(family)[2] if parse_policy(policy).needs_heads else None


def read(family: str, policy: str, text: str, **settings) -> Document:
    model, tokenizer, _ = parts(family)
    budget = settings.pop("budget", 24)
    return Document.read(model, tokenizer, text, budget, policy, heads_for(policy, family), **settings)


def told(document: Document) -> list:
    """Answers, what is kept then, and every number of it in full."""
    found, names = [], ("keys", "values", "scores")
    for question in QUESTIONS:
        answer = document.ask(question, max_new_tokens=6)
        words, layers = str(answer), answer.cache.bounded
        rows = [layer.slots(name).flatten().tolist() for layer in layers for name in names]
        found.append([words, kept(answer.cache), [[number.hex() for number in row] for row in rows]])
    return found


def load(path: Path, policy: str, family: str = "llama") -> Document:
    """A document that was saved."""
    return Document.load(path, *parts(family)[:2], heads_for(policy, family))


SETTINGS = dict(chunk=64, stabilizers=4, local_len=5, budget=48)
