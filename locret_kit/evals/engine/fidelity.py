"""How far a policy is from full attention, with no labels: likelihood and agreement under eviction, and what of a text was
kept.

Distances of texts are in `metrics.distance`; the runner makes full attention's output their reference (RoCo, section 5).
Two greedy answers that differ in one token may have nothing in common behind it, so such distances need many examples;
agreement asks for every token of the reference behind the reference's own tokens, and needs few.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ...backbones.intercept import attach
from ...cache.bounded import BoundedCache
from ...runtime.session import Sampling, decode, prefill

BLOCK = 256
"""Tokens whose logits over the vocabulary are held at once."""


def nll_of(logits_TV: Tensor, ids: Sequence[int]) -> Tensor:
    """Negative log-likelihood ``[T]`` (float32, nats) of each token under the logits in front of it."""
    target = torch.tensor(list(ids), device=logits_TV.device, dtype=torch.long)
    return F.cross_entropy(logits_TV.float(), target, reduction="none")


@dataclass(frozen=True)
class Followed:
    """What a policy made of a continuation that it was given."""

    nll: float
    """Mean negative log-likelihood of its tokens, nats."""
    agreement: float
    """Share of its tokens that greedy decoding would have chosen."""
    prefill_s: float
    decode_s: float


@torch.inference_mode()
def choose(model: Any, cache: BoundedCache, ids: Sequence[int], limit: int, stop: frozenset[int]) -> list[int]:
    """At most ``limit`` tokens that greedy decoding writes behind the prompt; the last may be one of ``stop``."""
    chosen = []
    with attach(model):
        logits = prefill(model, ids, cache)
        for token in decode(
            model, cache, logits, prompt=ids, max_new_tokens=limit, sampling=Sampling(), stop=frozenset()
        ):
            chosen.append(token)
            if token in stop:
                break
    return chosen


@torch.inference_mode()
def follow(model: Any, cache: BoundedCache, ids: Sequence[int], continuation: Sequence[int]) -> Followed:
    """Feed a continuation one token at a time behind the prompt, so that the cache evicts as it does while it decodes.

    Raises:
        ValueError: an empty continuation.
    """
    if not continuation:
        raise ValueError("the continuation holds no tokens")
    with attach(model):
        began = time.perf_counter()
        logits = prefill(model, ids, cache)
        prefilled = time.perf_counter()
        total = float(nll_of(logits[None], continuation[:1]))
        hits = int(logits.argmax() == continuation[0])
        for given, wanted in itertools.pairwise(continuation):
            piece = torch.tensor([[given]], device=model.device)
            logits = model(input_ids=piece, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[0]
            total += float(nll_of(logits, [wanted]))
            hits += int(logits[0].argmax()) == wanted
    n = len(continuation)
    return Followed(total / n, hits / n, prefilled - began, time.perf_counter() - prefilled)


@torch.inference_mode()
def nll_reading(model: Any, cache: BoundedCache, ids: Sequence[int], skip: int) -> tuple[float, float]:
    """``(nll, seconds)``: mean NLL a token of the prompt's tokens from ``skip`` on, measured while the prompt is read
    chunk by chunk: a token sees its own chunk and what the cache has kept of the chunks before.

    Raises:
        ValueError: nothing lies behind ``skip``.
    """
    if not 0 < skip < len(ids):
        raise ValueError(f"skip={skip} must be above 0 and below the prompt's {len(ids)} tokens")
    total, done = 0.0, 0
    with attach(model):
        began = time.perf_counter()
        while done < len(ids):
            step = min(cache.schedule.piece(done), len(ids) - done, BLOCK)
            piece = torch.tensor([list(ids[done : done + step])], device=model.device, dtype=torch.long)
            logits = model(input_ids=piece, past_key_values=cache, use_cache=True).logits[0]
            first = max(skip - 1, done)  # logits at i are for token i + 1
            last = min(done + step, len(ids) - 1)
            if first < last:
                total += float(nll_of(logits[first - done : last - done], ids[first + 1 : last + 1]).sum())
            done += step
    return total / (len(ids) - skip), time.perf_counter() - began


def kept_heads(cache: BoundedCache, tokens: int) -> tuple[np.ndarray, int]:
    """``(heads [L, T] uint8, H)``: how many of a layer's H key/value heads hold each of the first ``tokens`` tokens."""
    heads = np.zeros((len(cache.layers), tokens), dtype=np.uint8)
    n_heads = 0
    for layer in range(len(cache.layers)):
        positions_H = cache.kept_positions(layer)[0]
        n_heads = len(positions_H)
        for positions in positions_H:
            held = positions[(positions >= 0) & (positions < tokens)].cpu().numpy()
            heads[layer] += np.bincount(held, minlength=tokens).astype(np.uint8)
    return heads, n_heads
