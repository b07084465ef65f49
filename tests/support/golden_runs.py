"""Runs whose kept positions and tokens are pinned as hashes, in float64 on weights that every machine draws alike.

``python tests/support/golden_runs.py`` writes ``tests/runtime/golden.json`` anew: after a change that means to change them.
"""

import hashlib
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch
from policy_runs import POLICIES, distinct_tokens, held
from tiny_heads import tiny_heads
from tiny_models import tiny_model

from locret_kit import BoundedCache, RetainingHeads, attach
from locret_kit.backbones.libraries import CACHE
from locret_kit.policies.grammar import parse_policy
from locret_kit.runtime.engine import Engine
from locret_kit.runtime.sequence import Request
from locret_kit.runtime.session import prefill

FILE = Path(__file__).parents[1] / "runtime" / "golden.json"
LENGTH, NEW, TEXTS = 83, 12, 8
SMALL = dict(chunk=13, stabilizers=4, local_len=5)
MODES: dict[str, dict[str, object]] = {
    "alone": {},
    "texts": {},
    "one-shot": {"one_shot": True},
    "every": {"decode_every": 3},
    "windows": {"family": "gemma3"},
    "bits": {"kv_bits": 4},
    "pins": {"pins": [(7, 11), (40, 42)]},
}
APART = (
    "rereading-locret(12)", "recall(base=h2o,size=4,take=2)", "infllm(init=4,size=4,take=2,local=8)",
    "minference(8,20)",
)  # fmt: skip


def fill(module: torch.nn.Module, scale: float, seed: int) -> None:
    """Weights of whole numbers: those of a normal distribution differ in their last bits between processors."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randint(-1000, 1001, parameter.shape, generator=generator) * (scale / 1000))


@cache
def backbone(family: str) -> torch.nn.Module:
    model = tiny_model(family).double()
    fill(model, 0.25, 1)
    return model


@cache
def heads_of(family: str) -> RetainingHeads:
    heads = tiny_heads(backbone(family), 32)
    fill(heads, 0.3, 2)
    return heads


def new_cache(policy: str, length: int, **given: object) -> BoundedCache:
    given = {**SMALL, **given}
    family, pins = given.pop("family", "llama"), given.pop("pins", ())
    if given.get("one_shot"):
        given = {"one_shot": True}
    heads = heads_of(family) if parse_policy(policy).needs_heads else None
    made = BoundedCache(24, policy, heads, prompt_length=length, backend="reference", **given)
    made.pin_all(pins)
    return made


def alone(policy: str, **given: object) -> list[object]:
    """What is kept after a prompt, the greedy tokens after it, and what is kept then."""
    model, ids = backbone(given.get("family", "llama")), distinct_tokens(LENGTH)
    made, tokens = new_cache(policy, LENGTH, **given), []
    with attach(model), torch.no_grad():
        logits = prefill(model, ids, made)
        after_prompt = held(made)
        for _ in range(NEW):
            tokens.append(int(logits.argmax()))
            logits = model(input_ids=torch.tensor([tokens[-1:]]), **{CACHE: made}).logits[0, -1]
    return [after_prompt, tokens, held(made)]


def together(policy: str) -> list[object]:
    """The same of texts of several lengths in one batch."""
    model = backbone("llama")
    batch, caches, sequences = Engine(model, frozenset(), piece=40, pages=TEXTS), [], []
    for text in range(TEXTS):
        ids = distinct_tokens(50 + 7 * text, text)
        made = new_cache(policy, len(ids))
        caches.append(made)
        sequences.append(batch.add(Request(ids, NEW), lambda made=made: made))
    while batch.running:
        batch.step()
    assert all(sequence.error is None for sequence in sequences)
    return [[sequence.tokens for sequence in sequences], [held(made) for made in caches]]


def outcome(policy: str, mode: str) -> str:
    """A short hash, or the words of the refusal."""
    try:
        found = together(policy) if mode == "texts" else alone(policy, **MODES[mode])
    except ValueError as error:
        return f"refused: {error}"
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()[:12]


def cases() -> Iterator[tuple[str, str]]:
    for policy in (*POLICIES, *APART):
        for mode in MODES:
            yield policy, mode


if __name__ == "__main__":
    rows = {f"{policy} {mode}": outcome(policy, mode) for policy, mode in cases()}
    FILE.write_text(json.dumps(rows, indent=0) + "\n")
