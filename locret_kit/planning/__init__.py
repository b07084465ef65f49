"""Memory of a run before it is run: sizes, plans, and the largest setting that fits.

Here, without torch: how long the reading of a text takes, judged before it begins.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel

    from ..cache.bounded import BoundedCache
    from ..heads import RetainingHeads
    from ..policies import Policy
    from ..settings import Resolved

LONG = 8192
"""Tokens of a text whose reading is worth a measurement."""
MEASURED, WARM = 512, 16
"""Tokens of a measurement, at most, and those of them that prepare memory and kernels."""


def reading_time(
    model: PreTrainedModel, ids: Sequence[int], settings: Resolved, policy: Policy, heads: RetainingHeads | None
) -> str | None:
    """Words for the time that the reading of a long text will take, from a piece that is read beside as many rows as there are
    on average, with what an eviction takes.

    Args:
        model: the backbone, not attached. settings: resolved for the text.
    """
    if len(ids) < max(LONG, 2 * settings.chunk) or settings.chunk <= WARM or settings.one_shot:
        return None
    from ..cache.bounded import BoundedCache

    most = min(settings.budget, len(ids))
    budget = most - most**2 // (2 * len(ids))  # rows grow up to it, then stay
    stabilizers, local_len = min(settings.stabilizers, budget - 1), min(settings.local_len, budget - 1)
    run = replace(settings.run, budget=budget, stabilizers=stabilizers, local_len=local_len)
    seconds = seconds_per_token(model, ids, BoundedCache(run, policy, heads, prompt_length=len(ids)))
    return f"{len(ids):,} tokens take about {duration(len(ids) * seconds)}, {1 / seconds:.0f} tok/s beside a full cache"


def seconds_per_token(model: PreTrainedModel, ids: Sequence[int], cache: BoundedCache) -> float:
    """Seconds for a token of a piece that ends with an eviction, read into an empty cache that is filled up before."""
    import torch

    from ..runtime.session import prefill

    cache.bind(model)
    ctx, chunk = cache.context, cache.schedule.chunk
    end = len(ids) // 2 // chunk * chunk
    piece = min(chunk, MEASURED)
    layers = zip(ctx.spec.layers, cache.bounded, ctx.description.devices(model), ctx.budgets, strict=True)
    with torch.inference_mode():
        for layer, rows, device, budget in layers:
            rows.update(*layer.empty(model.dtype, device))
            left = end if rows.grows else min(budget or rows.capacity, rows.capacity - piece)
            while left > 0:
                step = min(left, chunk)
                k, v = (x.new_zeros(*x.shape[:2], step, x.shape[3]) for x in layer.empty(model.dtype, device))
                rows.append(k, v, torch.linspace(0, 1, step, device=device).expand(k.shape[:3]))
                rows.codec.finish_block()
                left -= step
            rows.seen = end - piece
    prefill(model, ids[: end - piece + WARM], cache, graph=False)
    began = time.perf_counter()
    prefill(model, ids[:end], cache, graph=False)
    return (time.perf_counter() - began) / (piece - WARM)


def duration(seconds: float) -> str:
    """A time in its largest fitting unit: "40 s", "12 min", "3.5 h"."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
