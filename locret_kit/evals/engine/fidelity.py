"""Distance of a policy from full attention, with no labels: likelihood and agreement under eviction.

Distances of texts are in `metrics.distance`; the runner makes full attention's output their reference (RoCo, section 5).
Two greedy answers that differ in one token may have nothing in common after it, so such distances need many examples;
agreement asks for every token of the reference after the reference's own tokens, and needs few.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from ...backbones.intercept import attach
from ...cache.bounded import BoundedCache
from ...runtime.session import decode, prefill

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def nll_of(logits_TV: Tensor, ids: Sequence[int]) -> Tensor:
    """Negative log-likelihood ``[T]`` (float32, nats) of each token under the logits before it."""
    target = torch.tensor(list(ids), device=logits_TV.device, dtype=torch.long)
    return F.cross_entropy(logits_TV.float(), target, reduction="none")


@dataclass(frozen=True)
class TeacherForced:
    """A continuation that a policy was given, and how likely it was to it."""

    nll: float
    """Mean negative log-likelihood of its tokens, nats."""
    agreement: float
    """Share of its tokens that greedy decoding would have chosen."""
    prefill_s: float
    decode_s: float


@torch.inference_mode()
def greedy_reference(
    model: PreTrainedModel, cache: BoundedCache, ids: Sequence[int], limit: int, stop: frozenset[int]
) -> list[int]:
    """At most ``limit`` tokens that greedy decoding writes after the prompt; the last may be one of ``stop``."""
    written = []
    with attach(model):
        logits = prefill(model, ids, cache)
        for token in decode(model, cache, logits, prompt=ids, max_new_tokens=limit):
            written.append(token)
            if token in stop:
                break
    return written


@torch.inference_mode()
def teacher_force(
    model: PreTrainedModel, cache: BoundedCache, ids: Sequence[int], continuation: Sequence[int]
) -> TeacherForced:
    """Read the prompt and `score_continuation`, timed.

    Raises:
        ValueError: an empty continuation.
    """
    if not continuation:
        raise ValueError("the continuation holds no tokens")
    with attach(model):
        began = time.perf_counter()
        logits = prefill(model, ids, cache)
        prefilled = time.perf_counter()
        nll, hits = score_continuation(model, cache, logits, continuation)
    n = len(continuation)
    return TeacherForced(nll / n, hits / n, prefilled - began, time.perf_counter() - prefilled)


@torch.inference_mode()
def score_continuation(
    model: PreTrainedModel, cache: BoundedCache, logits_V: Tensor, continuation: Sequence[int]
) -> tuple[float, int]:
    """``(summed NLL, tokens that greedy decoding would have chosen)``, fed one token at a time, so that the cache evicts as
    it does while it decodes. ``logits_V``: those of the first token; the model is attached."""
    total, hits, forced = 0.0, 0, iter(continuation)

    def choose(logits_V: Tensor) -> int:
        nonlocal total, hits
        token = next(forced)
        total += float(nll_of(logits_V[None], [token]))
        hits += int(logits_V.argmax()) == token
        return token

    n = len(continuation)
    for _ in decode(model, cache, logits_V, prompt=continuation, max_new_tokens=n, choose=choose):
        pass
    return total, hits


@torch.inference_mode()
def nll_reading(model: PreTrainedModel, cache: BoundedCache, ids: Sequence[int], skip: int) -> tuple[float, float]:
    """``(nll, seconds)``: mean NLL per token of the prompt's tokens from ``skip`` on, measured while the prompt is read
    chunk by chunk: a token sees its own chunk and what the cache has kept of the chunks before.

    Raises:
        ValueError: nothing lies after ``skip``.
    """
    if not 0 < skip < len(ids):
        raise ValueError(f"skip={skip} must be above 0 and below the prompt's {len(ids)} tokens")
    total = 0.0

    def judge(logits_TV: Tensor, end: int) -> None:
        nonlocal total
        start = end - len(logits_TV)
        first, last = max(skip - 1, start), min(end, len(ids) - 1)  # logits at i are for token i + 1
        if first < last:
            total += float(nll_of(logits_TV[first - start : last - start], ids[first + 1 : last + 1]).sum())

    with attach(model):
        began = time.perf_counter()
        prefill(model, ids, cache, on_prompt=judge)
    return total / (len(ids) - skip), time.perf_counter() - began
