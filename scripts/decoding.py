"""Tokens of an answer to a prompt that was read by itself, for measurements of decoding alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from locret_kit import BoundedCache
from locret_kit.backbones.intercept import attached
from locret_kit.runtime import sequence as texts
from locret_kit.runtime.drivers import driver_of
from locret_kit.runtime.engine import Engine
from locret_kit.runtime.sampling import Chooser, Sampling
from locret_kit.runtime.session import iter_tokens


@torch.inference_mode()
def decode(
    model: PreTrainedModel,
    cache: BoundedCache,
    logits: Tensor,
    *,
    prompt: Sequence[int],
    max_new_tokens: int,
    sampling: Sampling | None = None,
    stop: frozenset[int] = frozenset(),
    seed: int = 0,
    graph: bool | None = None,
) -> Iterator[int]:
    """Token ids one by one, the first chosen from ``logits [V]``; ends before an id of ``stop``. ``graph``: see ``driver_of``.

    Raises:
        ValueError: ``graph=True`` where it is not possible; says why.
    """
    if graph:
        driver_of(model, cache, graph)  # raises where it is not possible
    engine = Engine(model, stop, alone=True, graph=graph)
    if max_new_tokens:
        request = texts.Request(prompt, max_new_tokens, sampling or Sampling(), seed)
        choose = Chooser(request.sampling, seed, logits.device, prompt)
        sequence = texts.Sequence(request, alone=True, cache=cache, choose=choose)
        if sequence.take(logits, stop) and sequence.finish_reason is None:
            engine.running.append(sequence)
        with attached(engine.model):
            yield from iter_tokens(engine, sequence)
