"""Read one prompt through one variant's cache, and measure what came of it: the fields of a row."""

from __future__ import annotations

import hashlib
import json
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...cache.bounded import BoundedCache
from ...files import write_beside
from ...runtime.report import Report
from ...runtime.session import generate, stop_ids
from ...runtime.tokens import stream_ids
from ..metrics.benchmarks import get_metric
from ..tasks.base import Example
from . import fidelity, oracle
from .prefix import Beginnings, Start, Turn
from .rows import Row
from .settings import RANDOM_HEADS, Engine, Group, Run, Variant, is_oracle, key_of


@dataclass(frozen=True)
class Prompt:
    """A group's example and its token ids."""

    group: Group
    example: Example
    ids: array


def cache_for(engine: Engine, variant: Variant, prompt_length: int | None) -> BoundedCache:
    """A fresh cache of a variant.

    Raises:
        ValueError: a setting that the budget cannot meet; names both.
    """
    if is_oracle(variant.policy):
        raise ValueError(f"policy={variant.policy} reads a prompt before it chooses: it answers tasks of a run alone")
    policy = "locret" if variant.policy == RANDOM_HEADS else variant.policy
    try:
        settings = engine.settings_for(variant, prompt_length)
        return BoundedCache(settings, policy, engine.heads.get(variant.heads), prompt_length=prompt_length)
    except ValueError as error:
        raise ValueError(f"policy={variant.policy}, budget={variant.budget}: {error}") from error


def measured(
    plan: Run, variant: Variant, prompt: Prompt, turn: Turn, beginnings: Beginnings, reference: Row | None
) -> dict[str, Any]:
    """Fields of one example's row."""
    if reference is not None and reference.error is not None:
        raise ValueError(f"full attention, the reference, failed: {reference.error}")
    if is_oracle(variant.policy):
        start = oracle.start(plan.engine, variant, prompt.ids, chat=not prompt.example.special)
    else:
        start = beginnings.start(turn, prompt.ids)
    kind = prompt.group.task.kind
    if kind.startswith("nll"):
        return _likelihood(plan, variant, prompt, start)
    measure = _agreed if kind == "agreement" else _written
    return measure(plan, variant, prompt, start, reference)


def _written(plan: Run, variant: Variant, prompt: Prompt, start: Start, reference: Row | None) -> dict[str, Any]:
    """Generate and score."""
    engine, task, example, ids = plan.engine, prompt.group.task, prompt.example, prompt.ids
    kept: dict[str, str] = {}

    def at_end_of_prompt(read: int, total: int) -> None:
        if read == total and prompt.group.sample < plan.keep:
            kept["kept"] = store_kept(plan.out, key_of(prompt.group, variant), start.cache, ids)

    text, report = generate(
        engine.model, engine.tokenizer, ids, start.cache, max_new_tokens=engine.max_new_tokens or task.max_new_tokens,
        seed=engine.seed, progress=at_end_of_prompt,
    )  # fmt: skip
    answer = example.answer
    if task.kind == "fidelity":
        answer = text if reference is None else reference.output
    scores = get_metric(task.metric)(text, answer, example.extra)
    metric = next(iter(scores))
    if "source" in example.extra:
        scores |= {
            f"source_{name}": value for name, value in get_metric("rouge")(text, example.extra["source"], {}).items()
        }
    return {
        "score": scores[metric], "metric": metric, "scores": scores, "output": text, "answer": answer,
        **_cost(report, start), **kept,
    }  # fmt: skip


def _agreed(plan: Run, variant: Variant, prompt: Prompt, start: Start, reference: Row | None) -> dict[str, Any]:
    """Give it what full attention chooses, token by token, and count what it would have chosen too. Without a reference this
    is full attention, which chooses first and is then given its own."""
    engine, made = plan.engine, {}
    if reference is None:
        limit = engine.max_new_tokens or prompt.group.task.max_new_tokens
        stop = stop_ids(engine.model, engine.tokenizer)
        wanted = fidelity.choose(engine.model, start.cache, prompt.ids, limit, stop)
        made["output"] = engine.tokenizer.decode(wanted, skip_special_tokens=True)
        start = Start(cache_for(engine, variant, len(prompt.ids)))
    else:
        wanted = reference.answer
    followed = fidelity.follow(engine.model, start.cache, prompt.ids, wanted)
    scores = {"agreement": followed.agreement, "nll": followed.nll}
    made |= {"score": followed.agreement, "metric": "agreement", "scores": scores, "answer": wanted}
    return made | _read(engine, prompt, start, len(wanted), followed.prefill_s, followed.decode_s)


def _likelihood(plan: Run, variant: Variant, prompt: Prompt, start: Start) -> dict[str, Any]:
    """Measure the likelihood of the continuation, or of the prompt's second half."""
    engine, kind, ids, cache = plan.engine, prompt.group.task.kind, prompt.ids, start.cache
    if kind == "nll":
        continuation = stream_ids(engine.tokenizer, [prompt.example.continuation])
        followed = fidelity.follow(engine.model, cache, ids, continuation)
        nll, prefill_s, decode_s, tokens = followed.nll, followed.prefill_s, followed.decode_s, len(continuation)
    else:
        (nll, prefill_s), decode_s = fidelity.nll_reading(engine.model, cache, ids, len(ids) // 2), 0.0
        tokens = len(ids) - len(ids) // 2
    scores = {"score": nll, "metric": kind, "scores": {kind: nll}}
    return scores | _read(engine, prompt, start, tokens, prefill_s, decode_s)


def _read(
    engine: Engine, prompt: Prompt, start: Start, tokens: int, prefill_s: float, decode_s: float
) -> dict[str, Any]:
    """Fields of a row whose text was given: nothing was written, and so many ``tokens`` were read after or of the prompt."""
    report = Report.of(
        engine.model, start.cache, prompt_tokens=len(prompt.ids), new_tokens=tokens, prefill_s=prefill_s,
        decode_s=decode_s, kept_rows=start.cache.kept_rows,
    )  # fmt: skip
    return _cost(report, start)


def _cost(report: Report, start: Start) -> dict[str, Any]:
    """What a row says of its run; the prefill with the seconds in which its start was read."""
    return {
        "new_tokens": report.new_tokens, "prefix_shared": start.shared, "prefill_s": start.seconds + report.prefill_s,
        "decode_s": report.decode_s, "peak_bytes": report.peak_bytes,
        "cache_bytes": report.cache_bytes, "device": report.device, "dtype": report.dtype, "versions": report.versions,
        "slots": 0 if start.cache.policy.keeps_everything else report.settings.budget,
        **{name: value for name, value in vars(report.settings.run).items() if name != "budget"},
    }  # fmt: skip


def store_kept(out: Path, key: tuple, cache: BoundedCache, ids: array) -> str:
    """Write what the cache holds now, see `rows.read_kept`; the file's stem."""
    heads, n_heads = fidelity.kept_heads(cache, len(ids))
    stem = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]

    def write(path: Path) -> None:
        with path.open("wb") as file:
            np.savez_compressed(file, ids=np.asarray(ids, dtype=np.int32), heads=heads, n_heads=n_heads)

    write_beside(out / "kept" / f"{stem}.npz", write)
    return stem
