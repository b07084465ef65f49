"""Do every example of a run that has no row yet, in this process's share of them.

Prompts are dealt to processes by their number, so that any number of processes, and any number of interruptions, give
the same rows. A row is on the disk before the next example begins; an example that fails is a row with its error.
"""

from __future__ import annotations

import hashlib
import json
import sys
from array import array
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..cache.bounded import BoundedCache
from ..checkpoint import write_beside
from ..runtime.report import Report, peak_memory
from ..runtime.session import generate
from ..runtime.tokens import stream_ids
from . import fidelity
from .metrics import get_metric
from .progress import Progress
from .rows import KEY, Row, Shard, read_rows
from .settings import RANDOM_HEADS, Engine, Group, Run, Variant
from .tasks.base import Example, Request

Say = Callable[[str], None]
FULL = Variant("full", "-", 0)


def run(plan: Run, say: Say | None = None) -> int:
    """Answer what is missing of this process's share; how many examples ended with an error.

    Raises:
        ValueError: a budget that a policy cannot meet, or a metric that does not exist, before anything is run.
        OSError: the rows cannot be written; every row that was written before is whole.
    """
    say = say or (lambda line: print(line, file=sys.stderr, flush=True))
    check(plan)
    errors = 0
    with Shard(plan.out / f"rows.{plan.rank}.jsonl") as shard:
        done = finished(plan)
        work = [(group, todo) for group in _share(plan) if (todo := _missing(plan, group, done))]
        progress = Progress(len(work), sum(len(todo) * group.length for group, todo in work), say)
        for group, todo in work:
            for row in _answer_group(plan, group, todo, done):
                shard.append(row)
                done[row.key] = row
                errors += row.error is not None
                progress.report(row)
            progress.finish_group()
    return errors


def check(plan: Run) -> None:
    """Build every variant's cache and look up every metric, so that a wrong setting is an error now."""
    for variant in plan.variants:
        cache_for(plan.engine, variant, min(plan.lengths))
    for task in plan.tasks:
        if task.kind in ("answer", "fidelity"):
            get_metric(task.metric)


def finished(plan: Run) -> dict[tuple, Row]:
    """Rows of all processes by key; without those that shall be tried again."""
    files = sorted(plan.out.glob("rows.*.jsonl"))
    rows = read_rows(files) if files else []
    return {row.key: row for row in rows if row.error is None or not plan.retry_errors}


def is_complete(plan: Run) -> bool:
    """Whether every example of every process has a row."""
    done = finished(replace(plan, retry_errors=False))
    return not any(_missing(plan, group, done) for group in plan.groups())


def cache_for(engine: Engine, variant: Variant, prompt_length: int | None) -> BoundedCache:
    """A fresh cache of a variant.

    Raises:
        ValueError: a setting that the budget cannot meet; names both.
    """
    settings = engine.settings_for(variant.budget or None)
    policy = "locret" if variant.policy == RANDOM_HEADS else variant.policy
    heads = engine.heads.get(variant.heads)
    try:
        return BoundedCache(policy=policy, heads=heads, prompt_length=prompt_length, seed=engine.seed, **settings)
    except ValueError as error:
        raise ValueError(f"policy={variant.policy}, budget={variant.budget}: {error}") from error


def _share(plan: Run) -> list[Group]:
    return [group for i, group in enumerate(plan.groups()) if i % plan.world_size == plan.rank]


def _missing(plan: Run, group: Group, done: dict[tuple, Row]) -> list[Variant]:
    return [variant for variant in plan.variants if key_of(group, variant) not in done]


def key_of(group: Group, variant: Variant) -> tuple:
    """The row's key."""
    task = group.task
    return (
        task.name, task.haystack, group.length, variant.budget, variant.policy, variant.heads, group.sample,
    )  # fmt: skip


def _answer_group(plan: Run, group: Group, todo: list[Variant], done: dict[tuple, Row]) -> Iterator[Row]:
    """Rows of one prompt, as they are answered. Full attention comes first where it is the reference."""
    engine, task = plan.engine, group.task
    try:
        example = task.make(
            Request(engine.tokenizer, group.length, group.sample, engine.seed, engine.chat, engine.ending)
        )
        ids = stream_ids(engine.tokenizer, [example.prompt], special=example.special)
    except Exception as error:
        yield from (_failed(plan, group, variant, error) for variant in todo)
        return
    if task.kind == "fidelity":
        reference = done.get(key_of(group, FULL))
        if reference is None or reference.error is not None:
            reference = _answer(plan, group, FULL, example, ids, None)
            if key_of(group, FULL) not in done:
                yield reference
        todo = [variant for variant in todo if variant != FULL]
    else:
        reference = None
    for variant in todo:
        yield _answer(plan, group, variant, example, ids, reference)


def _answer(plan: Run, group: Group, variant: Variant, example: Example, ids: array, reference: Row | None) -> Row:
    """The row of one example; an exception becomes its error."""
    if plan.engine.model.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(plan.engine.model.device)
    try:
        if reference is not None and reference.error is not None:
            raise ValueError(f"full attention, the reference, failed: {reference.error}")
        measured = _likelihood if group.task.kind.startswith("nll") else _written
        fields = measured(plan, group, variant, example, ids, reference)
        return _row(plan, group, variant, **{**_example_fields(example, ids), **fields})
    except Exception as error:
        if isinstance(error, torch.OutOfMemoryError):
            torch.cuda.empty_cache()
        return _failed(plan, group, variant, error, **_example_fields(example, ids))


def _written(
    plan: Run, group: Group, variant: Variant, example: Example, ids: array, reference: Row | None
) -> dict[str, Any]:
    """Generate and score."""
    engine, task, key = plan.engine, group.task, key_of(group, variant)
    cache = cache_for(engine, variant, len(ids))
    kept: dict[str, str] = {}

    def at_end_of_prompt(read: int, total: int) -> None:
        if read == total and group.sample < plan.keep:
            kept["kept"] = store_kept(plan.out, key, cache, ids)

    text, report = generate(
        engine.model, engine.tokenizer, ids, cache, max_new_tokens=engine.max_new_tokens or task.max_new_tokens,
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
        "new_tokens": report.new_tokens, "prefill_s": report.prefill_s, "decode_s": report.decode_s,
        "peak_bytes": report.peak_bytes, **_cost(report), **kept,
    }  # fmt: skip


def _likelihood(
    plan: Run, group: Group, variant: Variant, example: Example, ids: array, _: Row | None
) -> dict[str, Any]:
    """Measure the likelihood of the continuation, or of the prompt's second half."""
    engine, kind = plan.engine, group.task.kind
    cache = cache_for(engine, variant, len(ids))
    if kind == "nll":
        continuation = stream_ids(engine.tokenizer, [example.continuation])
        nll, prefill_s, decode_s = fidelity.nll_decoding(engine.model, cache, ids, continuation)
        measured = len(continuation)
    else:
        (nll, prefill_s), decode_s = fidelity.nll_reading(engine.model, cache, ids, len(ids) // 2), 0.0
        measured = len(ids) - len(ids) // 2
    report = Report.of(
        engine.model, cache, prompt_tokens=len(ids), new_tokens=measured, prefill_s=prefill_s, decode_s=decode_s,
        kept_rows=cache.kept_rows,
    )  # fmt: skip
    return {
        "score": nll, "metric": kind, "scores": {kind: nll}, "new_tokens": measured, "prefill_s": prefill_s,
        "decode_s": decode_s, "peak_bytes": peak_memory(engine.model.device), **_cost(report),
    }  # fmt: skip


def _cost(report: Report) -> dict[str, Any]:
    from .. import __version__

    return {
        "cache_bytes": report.cache_bytes, "chunk": report.chunk, "stabilizers": report.stabilizers,
        "local_len": report.local_len,
        "one_shot": report.one_shot,
        "decode_every": report.decode_every, "positions": report.positions,
        "kv_bits": report.kv_bits, "device": report.device, "dtype": report.dtype,
        "versions": {**report.versions, "locret_kit": __version__},
    }  # fmt: skip


def _example_fields(example: Example, ids: array) -> dict[str, Any]:
    known = {"answer": example.answer} if example.answer != "" else {}
    if "ending" in example.extra:
        known["ending"] = example.extra["ending"]
    return {"depth": example.depth, "cut": example.cut, "tokens": len(ids), "prompt_hash": prompt_hash(ids), **known}


def _row(plan: Run, group: Group, variant: Variant, **fields: Any) -> Row:
    record: dict[str, Any] = dict(zip(KEY, key_of(group, variant), strict=True))
    record.update(seed=plan.engine.seed, model=plan.engine.name, rank=plan.rank)
    record["date"] = datetime.now(timezone.utc).isoformat(timespec="seconds")
    record.update(fields)
    for name in ("prefill_s", "decode_s"):
        record[name] = round(record.get(name, 0.0), 4)
    return Row(**record)


def _failed(plan: Run, group: Group, variant: Variant, error: Exception, **fields: Any) -> Row:
    said = (str(error).strip().splitlines() or [""])[0]
    return _row(plan, group, variant, **fields, error=f"{type(error).__name__}: {said}")


def store_kept(out: Path, key: tuple, cache: BoundedCache, ids: array) -> str:
    """Write what the cache holds now, see `rows.read_kept`; the file's stem."""
    heads, n_heads = fidelity.kept_heads(cache, len(ids))
    stem = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]

    def write(path: Path) -> None:
        with path.open("wb") as file:
            np.savez_compressed(file, ids=np.asarray(ids, dtype=np.int32), heads=heads, n_heads=n_heads)

    write_beside(out / "kept" / f"{stem}.npz", write)
    return stem


def prompt_hash(ids: array) -> str:
    """See `Row.prompt_hash`."""
    little = ids if sys.byteorder == "little" else array(ids.typecode, ids)
    if little is not ids:
        little.byteswap()
    return hashlib.sha256(little.tobytes()).hexdigest()[:16]
