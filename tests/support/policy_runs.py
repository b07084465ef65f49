"""Small runs of every policy on a tiny backbone."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from scripts_loaded import load_script
from tiny_heads import tiny_heads
from tiny_models import tiny_model

from locret_kit import BoundedCache, RetainingHeads
from locret_kit.backbones.intercept import attached
from locret_kit.backbones.libraries import CACHE
from locret_kit.policies.base import Selection
from locret_kit.policies.grammar import parse_policy
from locret_kit.policies.registry import policies
from locret_kit.runtime.session import prefill

decode = load_script("scripts/decoding.py").decode

LENGTH = 83
SMALL = dict(chunk=13, stabilizers=4, local_len=5)
# Every named policy, with windows that fit a budget of 24, and combinations of parts that no paper has.
FITTED = {
    "snapkv": "snapkv(6,3)", "dropkv": "dropkv(6)", "defensivekv": "defensivekv(6)", "rkv": "rkv(6,3)",
    "pyramidkv": "pyramidkv(6,3,beta=3)", "ada-snapkv": "ada-snapkv(6,3)",
    "ada-pyramid": "ada-pyramid(6,3,beta=3)", "nacl": "nacl(proxies=5)", "lagkv": "lagkv(lag=7)",
    "expected-attention": "expected-attention(future=9)", "compactor": "compactor(block=8)",
    "windowed-locret": "windowed-locret(6,2)",
}  # fmt: skip
# Those that read the prompt's end twice, which model.generate does not, are in test_answering.py, sparse prefill is in
# test_sparse_prefill.py, recall in test_recall.py.
APART = ("reread", "sparse", "recall")
ALIKE = [name for name in policies() if all(getattr(parse_policy(name), part) is None for part in APART)]
POLICIES = [FITTED.get(name, name) for name in ALIKE]
POLICIES += ["kvcrush(base=ada-snapkv(6,3),level=chunk)", "score=entropy allocation=adaptive selection=sampled"]
POLICIES += ["score=lagkv(lag=7) allocation=adaptive", "score=compactor(block=8) allocation=pyramid(3)+adaptive(1)"]
EVICTING = [policy for policy in POLICIES if policy != "full"]
KINDS = (
    "streaming", "roco", "scissorhands", "snapkv(6,3)", "knorm", "expected-attention(future=9)", "lookahead-locret",
    "merge-locret", "nacl(proxies=5)", "pyramid-locret", "windowed-locret(6,2)",
    "kvcrush(base=ada-snapkv(6,3),level=chunk)", "score=entropy allocation=adaptive selection=sampled",
    "score=compactor(block=8) allocation=pyramid(3)+adaptive(1)",
)  # fmt: skip
"""Policies with every kind of score, allocation, selection, merging and reading that a cache tells apart."""
assert {*KINDS} <= {*POLICIES}


@cache
def backbone(family: str = "llama"):
    return tiny_model(family).double()


@cache
def heads_of(family: str = "llama", target: str = "logit") -> RetainingHeads:
    return tiny_heads(backbone(family), 32, seed=3, target=target)


def tokens(length: int = LENGTH, seed: int = 0) -> list[int]:
    return torch.randint(2, 97, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def distinct_tokens(length: int, seed: int = 0) -> list[int]:
    """No token twice in a text of up to 95: the first layer scores the same token alike but for rounding, and a tie of those
    falls as the processor rounds."""
    generator = torch.Generator().manual_seed(seed)
    rounds = [2 + torch.randperm(95, generator=generator) for _ in range(0, length, 95)]
    return torch.cat(rounds)[:length].tolist()


def distinct_texts(length: int, seed: int = 0, batch: int = 1) -> torch.Tensor:
    """A batch of such texts."""
    return torch.tensor([distinct_tokens(length, 100 * seed + text) for text in range(batch)])


def make(policy, budget: int = 24, *, length: int | None = LENGTH, family: str = "llama", **rest) -> BoundedCache:
    policy = parse_policy(policy) if isinstance(policy, str) else policy
    heads = heads_of(family) if policy.needs_heads else None
    form = {} if rest.get("one_shot") else SMALL
    return BoundedCache(budget, policy, heads, prompt_length=length, **{**form, **rest})


@torch.no_grad()
def logits_of(cache: BoundedCache, ids: Sequence[int], then: Sequence[int] = (), model=None) -> torch.Tensor:
    """Logits ``[1 + then, V]`` after a prompt and after each token that follows."""
    model = model or backbone()
    with attached(model):
        out = [prefill(model, ids, cache)]
        for token in then:
            out.append(model(input_ids=torch.tensor([[token]]), **{CACHE: cache}).logits[0, -1].float())
    return torch.stack(out)


def answer(cache: BoundedCache, ids: Sequence[int], new: int, model=None, **rest) -> list[int]:
    """The answer of ``new`` tokens to a prompt."""
    model = model or backbone()
    with attached(model):
        return [*decode(model, cache, prefill(model, ids, cache), prompt=ids, max_new_tokens=new, **rest)]


class Recorder(Selection):
    """A selection that remembers layer, scores, protected slots, positions, valid slots and choice of every eviction."""

    def __init__(self, selection: Selection) -> None:
        self.selection, self.seen = selection, []

    @property
    def by_query_head(self) -> bool:
        return self.selection.by_query_head

    def select(self, scores, protected, valid, budgets, slots):
        stay = self.selection.select(scores, protected, valid, budgets, slots)
        self.seen.append([slots.layer, *(x.clone() for x in (scores, protected, slots.positions, valid, stay))])
        return stay


def recorded(policy: str, ids: list[int], **rest):
    """A run of a prompt and, token by token, the ids after it: the cache, what entered (layer -> keys and values before RoPE
    ``[H, tokens, D]``), and every eviction as a ``Recorder`` has it."""
    parsed = parse_policy(policy)
    recorder = Recorder(parsed.selection)
    cache = make(replace(parsed, selection=recorder), decode_every=3, **rest)
    entered: dict[int, list] = {}
    attend = cache.handler.attend

    def listening(layer, q, k, v, *rest):
        entered.setdefault(layer, []).append((k[0].numpy().copy(), v[0].numpy().copy()))
        return attend(layer, q, k, v, *rest)

    cache.handler.attend = listening
    logits_of(cache, ids[:LENGTH], ids[LENGTH:])
    texts = {i: [np.concatenate(x, 1) for x in zip(*pairs, strict=True)] for i, pairs in entered.items()}
    return cache, texts, recorder.seen


def by_kind(policies: Iterable[str]) -> list:
    """Parameters of a test, of which those that only repeat a kind are left to ``--all``. Golden runs and the oracle have every
    policy."""
    left = {*POLICIES} - {*KINDS}
    return [pytest.param(policy, marks=[pytest.mark.left] * (policy in left)) for policy in policies]


def turn(policy: str, *choices):
    """One of the choices for each policy, all of them over the policies."""
    return choices[POLICIES.index(policy) % len(choices)]


def held(cache: BoundedCache) -> list[list[list[int]]]:
    return [[head.tolist() for head in cache.kept_positions(i)[0]] for i in range(len(cache.layers))]


def run(policy, ids=None, family: str = "llama", **rest) -> BoundedCache:
    """A cache that has read a prompt and four more tokens."""
    cache = make(policy, family=family, **rest)
    logits_of(cache, ids or tokens(), range(5, 9), backbone(family))
    return cache
