"""KVzip as a policy of an evaluation: the unbounded oracle beside the bounded policies.

It takes for its context what the others may evict from, all of the prompt but the last ``local_len`` tokens, reads it with
full attention, and keeps ``budget - local_len`` slots of it. Its cache holds the whole context meanwhile, and its prefill
time counts the repetition, so only its scores are to be compared.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ...samples.chat import render_prompt
from .kvzip import CHUNK, SINKS, read_context
from .prefix import Start
from .settings import ORACLES, Engine, Variant


def check(engine: Engine, variant: Variant, kinds: Sequence[str]) -> None:
    """Raise ValueError where the oracle cannot do what a run asks: names setting and bound.

    Args:
        kinds: of the run's tasks.
    """
    settings = engine.settings_for(variant, 10**6)  # any length: what is asked here does not depend on it
    if "nll_prefill" in kinds:
        raise ValueError(
            f"policy={variant.policy} chooses when all is read, so it has no likelihood while reading: "
            "take tasks=[perplexity] instead of perplexity_prefill"
        )
    for name in ("kv_bits", "one_shot"):
        if getattr(settings, name):
            raise ValueError(f"policy={variant.policy} stores what it keeps as it is, in one form: leave {name} out")
    tail = settings.local_len
    if settings.budget <= tail + SINKS:
        raise ValueError(
            f"policy={variant.policy}, budget={variant.budget}: must be above {tail + SINKS}: local_len={tail} and {SINKS} sinks"
        )


def start(engine: Engine, variant: Variant, ids: Sequence[int], *, chat: bool) -> Start:
    """A cache of the best slots of the prompt's context.

    Args:
        chat: the prompt is a rendered chat template, so the context is repeated in the assistant's turn.

    Raises:
        ValueError: a prompt without context; see also `read_context`.
    """
    settings = engine.settings_for(variant, len(ids))
    tail = settings.local_len
    if tail >= len(ids):
        raise ValueError(f"the prompt's {len(ids)} tokens must be above local_len={tail}")
    began = time.perf_counter()
    cache = read_context(
        engine.model, engine.tokenizer, ids[: len(ids) - tail], budget=settings.budget, prompt_length=len(ids),
        joint=ORACLES[variant.policy], positions=settings.positions, suffix=_suffix(engine.tokenizer, chat),
    )  # fmt: skip
    cache.settings = replace(settings, chunk=CHUNK, stabilizers=0)  # what rows then say
    cache.schedule = replace(cache.schedule, chunk=CHUNK, stabilizers=0, local_len=tail)
    return Start(cache, seconds=time.perf_counter() - began)


def _suffix(tokenizer: Any, chat: bool) -> str:
    """What stands between a request and its answer."""
    return render_prompt(tokenizer, "", "", chat=True)[1].removeprefix("\n\n") if chat else "\n"
