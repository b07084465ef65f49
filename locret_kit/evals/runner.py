"""Do every example of a run that has no row yet, in this process's share of them.

Prompts are dealt to processes by their number, those that begin alike in stretches of neighbours, so that any number of
processes, and any number of interruptions, give the same rows. A row is on the disk before the next example begins; an
example that fails is a row with its error.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..cache.bounded import BoundedCache
from ..checkpoint import write_beside
from ..runtime.memory import OutOfMemory
from ..runtime.report import Report, peak_memory
from ..runtime.session import generate, stop_ids
from ..runtime.tokens import stream_ids
from . import fidelity, oracle
from .metrics import get_metric
from .prefix import Beginnings, Start, Turn, limit, together, turns
from .progress import Progress
from .rows import KEY, Row, Shard, read_rows
from .settings import RANDOM_HEADS, Engine, Group, Run, Variant, is_oracle
from .tasks.base import REFERRED, Example, Request

Say = Callable[[str], None]
FULL = Variant("full", "-", 0)


@dataclass(frozen=True)
class Prompt:
    """A group's example and its token ids."""

    group: Group
    example: Example
    ids: array


def run(plan: Run, say: Say | None = None) -> int:
    """Answer what is missing of this process's share; how many examples ended with an error.

    Raises:
        ValueError: a budget that a policy cannot meet, or a metric that does not exist, before anything is run; or a prompt
            that is not the one of the rows that are there.
        OSError: the rows cannot be written; every row that was written before is whole.
    """
    say = say or (lambda line: print(line, file=sys.stderr, flush=True))
    check(plan)
    known = check_prompts(plan)
    errors = 0
    with Shard(plan.out / f"rows.{plan.rank}.jsonl") as shard:
        done = finished(plan)
        work = [(number, batch, share) for number, batch, share in _work(plan, done) if share]
        progress = Progress(sum(share for *_, share in work), sum(share * b[0].length for _, b, share in work), say)
        for number, batch, _ in work:
            for row in _answer_batch(plan, number, batch, done, known):
                shard.append(row)
                done[row.key] = row
                errors += row.error is not None
                progress.report(row)
    return errors


def check(plan: Run) -> None:
    """Build every variant's cache and look up every metric, so that a wrong setting is an error now."""
    for variant in plan.variants:
        if is_oracle(variant.policy):
            oracle.check(plan.engine, variant, [task.kind for task in plan.tasks])
        else:
            cache_for(plan.engine, variant, min(plan.lengths))
    for task in plan.tasks:
        if task.kind in ("answer", "fidelity"):
            get_metric(task.metric)


def check_prompts(plan: Run) -> dict[tuple, str]:
    """Hashes of the prompts of all rows that the folder has, by task, haystack, length and number. The first that it has of
    every task, haystack and length is made again and compared.

    Raises:
        ValueError: it is another now, since data or tokenizer have changed; names it.
    """
    rows = finished(replace(plan, retry_errors=False)).values()
    known = {(*row.key[:3], row.sample): row.prompt_hash for row in rows if row.prompt_hash}
    seen: set[tuple] = set()
    for group in plan.groups():
        kind = (group.task.name, group.task.haystack, group.length)
        if kind not in seen and (*kind, group.sample) in known:
            seen.add(kind)
            _require_same(group, _prompt(plan.engine, group), known)
    return known


def _require_same(group: Group, prompt: Prompt | Exception, known: dict[tuple, str]) -> None:
    before = known.get((group.task.name, group.task.haystack, group.length, group.sample))
    if before and isinstance(prompt, Prompt) and prompt_hash(prompt.ids) != before:
        raise ValueError(
            f"task={group.task.name}, haystack={group.task.haystack}, length={group.length}, sample={group.sample}: the "
            "prompt differs from that of the rows, since data or tokenizer have changed: choose another out"
        )


def finished(plan: Run) -> dict[tuple, Row]:
    """Rows of all processes by key; without those that shall be tried again."""
    files = sorted(plan.out.glob("rows.*.jsonl"))
    rows = read_rows(files) if files else []
    return {row.key: row for row in rows if row.error is None or not plan.retry_errors}


def is_complete(plan: Run) -> bool:
    """Whether every example of every process has a row."""
    done = finished(replace(plan, retry_errors=False))
    return not any(_missing(plan, group, done) for group in plan.groups())


def failures(plan: Run) -> int:
    """How many of the run's examples have ended with an error, in whichever process."""
    done = finished(replace(plan, retry_errors=False))
    keys = {key_of(group, variant) for group in plan.groups() for variant in plan.variants}
    return sum(done[key].error is not None for key in keys & done.keys())


def cache_for(engine: Engine, variant: Variant, prompt_length: int | None) -> BoundedCache:
    """A fresh cache of a variant.

    Raises:
        ValueError: a setting that the budget cannot meet; names both.
    """
    if is_oracle(variant.policy):
        raise ValueError(f"policy={variant.policy} reads a prompt before it chooses: it answers tasks of a run alone")
    settings = engine.settings_for(variant)
    policy = "locret" if variant.policy == RANDOM_HEADS else variant.policy
    heads = engine.heads.get(variant.heads)
    try:
        return BoundedCache(policy=policy, heads=heads, prompt_length=prompt_length, seed=engine.seed, **settings)
    except ValueError as error:
        raise ValueError(f"policy={variant.policy}, budget={variant.budget}: {error}") from error


def _work(plan: Run, done: dict[tuple, Row]) -> Iterator[tuple[int, list[Group], int]]:
    """Every batch with its number and how many rows are missing in this process's share of it, on average."""
    for number, batch in enumerate(plan.batches()):
        missing = sum(len(_missing(plan, group, done)) for group in batch)
        part = _slice(plan, number, len(batch))
        yield number, batch, math.ceil(missing * (part.stop - part.start) / len(batch))


def _slice(plan: Run, number: int, prompts: int) -> slice:
    """This process's stretch of a batch; one that is left over goes to another process in every batch."""
    turn = (plan.rank - number - 1) % plan.world_size
    return slice(turn * prompts // plan.world_size, (turn + 1) * prompts // plan.world_size)


def _missing(plan: Run, group: Group, done: dict[tuple, Row]) -> list[Variant]:
    return [variant for variant in plan.variants if key_of(group, variant) not in done]


def key_of(group: Group, variant: Variant) -> tuple:
    """The row's key."""
    task = group.task
    return (
        task.name, task.haystack, group.length, variant.budget, variant.policy, variant.heads, group.sample,
    )  # fmt: skip


def _answer_batch(
    plan: Run, number: int, batch: list[Group], done: dict[tuple, Row], known: dict[tuple, str]
) -> Iterator[Row]:
    """Rows of this process's share of a batch, as they are answered, policy by policy. Full attention comes first where
    it is the reference. ``known``: see `check_prompts`."""
    made = {group: _prompt(plan.engine, group) for group in batch}
    for group, prompt in made.items():
        _require_same(group, prompt, known)
    failed = {group: error for group, error in made.items() if isinstance(error, Exception)}
    prompts = [prompt for prompt in made.values() if isinstance(prompt, Prompt)]
    ordered = [prompts[i] for i in together([prompt.ids for prompt in prompts])]
    mine = [*ordered, *failed][_slice(plan, number, len(batch))]
    for group in (one for one in mine if isinstance(one, Group)):
        yield from (_failed(plan, group, variant, failed[group]) for variant in _missing(plan, group, done))
    prompts = [one for one in mine if isinstance(one, Prompt)]
    todo = {v: [one for one in prompts if key_of(one.group, v) not in done] for v in plan.variants}
    references: dict[Group, Row] = {}
    if batch[0].task.kind in REFERRED:
        found = {one.group: done.get(key_of(one.group, FULL)) for one in prompts}
        references = {group: row for group, row in found.items() if row is not None and row.error is None}
        wanted = [one for one in prompts if one.group not in references and any(one in some for some in todo.values())]
        for one, row in _answers(plan, FULL, wanted, {}):
            references[one.group] = row
            if row.key not in done:
                yield row
        todo.pop(FULL, None)
    for variant, some in todo.items():
        yield from (row for _, row in _answers(plan, variant, some, references))


def _prompt(engine: Engine, group: Group) -> Prompt | Exception:
    """The group's prompt, or why it cannot be made."""
    try:
        example = group.task.make(
            Request(engine.tokenizer, group.length, group.sample, engine.seed, engine.chat, engine.ending)
        )
        ids = stream_ids(engine.tokenizer, [example.prompt], special=example.special)
        return Prompt(group, example, ids) if ids else ValueError("the prompt holds no tokens")
    except Exception as error:
        return error


def _answers(
    plan: Run, variant: Variant, prompts: list[Prompt], references: dict[Group, Row]
) -> Iterator[tuple[Prompt, Row]]:
    """Prompts with their rows, in the order in which what they have in common is read once."""
    engine = plan.engine
    longest = max((len(prompt.ids) for prompt in prompts), default=0)
    beginnings = Beginnings(engine.model, lambda tokens: cache_for(engine, variant, tokens), longest)
    for turn in _turns(engine, variant, prompts):
        prompt = prompts[turn.prompt]
        yield prompt, _answer(plan, variant, prompt, turn, beginnings, references.get(prompt.group))


def _turns(engine: Engine, variant: Variant, prompts: list[Prompt]) -> Iterable[Turn]:
    """The order of the prompts, each by itself where the policy or the kind of task reads it otherwise."""
    if len(prompts) < 2 or is_oracle(variant.policy) or prompts[0].group.task.kind == "nll_prefill":
        return [Turn(i) for i in range(len(prompts))]
    schedule = cache_for(engine, variant, max(len(prompt.ids) for prompt in prompts)).schedule
    limits = [limit(schedule, len(prompt.ids)) for prompt in prompts]
    return turns([prompt.ids for prompt in prompts], schedule.chunk, limits)


def _answer(
    plan: Run, variant: Variant, prompt: Prompt, turn: Turn, beginnings: Beginnings, reference: Row | None
) -> Row:
    """The row of one example; an exception becomes its error. Out of memory, a prompt is tried once more by itself."""
    group, known, device = prompt.group, _example_fields(prompt), plan.engine.model.device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    try:
        return _row(plan, group, variant, **{**known, **_measured(plan, variant, prompt, turn, beginnings, reference)})
    except Exception as error:
        beginnings.drop()
        failed = _failed(plan, group, variant, error, **known)
        no_memory = isinstance(error, (torch.OutOfMemoryError, OutOfMemory))
    if no_memory:  # out here, where the error no longer holds what the example had allocated
        torch.cuda.empty_cache()
        if turn.held:
            return _answer(plan, variant, prompt, Turn(turn.prompt), beginnings, reference)
    return failed


def _measured(
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
        "new_tokens": report.new_tokens, "prefix_shared": start.shared, "prefill_s": start.seconds + report.prefill_s,
        "decode_s": report.decode_s, "peak_bytes": report.peak_bytes, **_cost(report), **kept,
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
        nll, prefill_s, decode_s, measured = followed.nll, followed.prefill_s, followed.decode_s, len(continuation)
    else:
        (nll, prefill_s), decode_s = fidelity.nll_reading(engine.model, cache, ids, len(ids) // 2), 0.0
        measured = len(ids) - len(ids) // 2
    scores = {"score": nll, "metric": kind, "scores": {kind: nll}}
    return scores | _read(engine, prompt, start, measured, prefill_s, decode_s)


def _read(
    engine: Engine, prompt: Prompt, start: Start, measured: int, prefill_s: float, decode_s: float
) -> dict[str, Any]:
    """Fields of a row whose text was given: nothing was written, and ``measured`` tokens were read after or of the prompt."""
    cache, prefill_s = start.cache, prefill_s + start.seconds
    report = Report.of(
        engine.model, cache, prompt_tokens=len(prompt.ids), new_tokens=measured, prefill_s=prefill_s, decode_s=decode_s,
        kept_rows=cache.kept_rows,
    )  # fmt: skip
    return {
        "new_tokens": measured, "prefix_shared": start.shared, "prefill_s": prefill_s, "decode_s": decode_s,
        "peak_bytes": peak_memory(engine.model.device), **_cost(report),
    }  # fmt: skip


def _cost(report: Report) -> dict[str, Any]:
    return {
        "cache_bytes": report.cache_bytes, "chunk": report.chunk, "stabilizers": report.stabilizers,
        "local_len": report.local_len,
        "one_shot": report.one_shot,
        "decode_every": report.decode_every, "positions": report.positions,
        "kv_bits": report.kv_bits, "device": report.device, "dtype": report.dtype,
        "backend": report.backend, "versions": report.versions,
    }  # fmt: skip


def _example_fields(prompt: Prompt) -> dict[str, Any]:
    example, ids = prompt.example, prompt.ids
    known = {"answer": example.answer} if example.answer != "" else {}
    if "ending" in example.extra:
        known["ending"] = example.extra["ending"]
    return {"depth": example.depth, "cut": example.cut, "tokens": len(ids), "prompt_hash": prompt_hash(ids), **known}


def _row(plan: Run, group: Group, variant: Variant, **fields: Any) -> Row:
    record: dict[str, Any] = dict(zip(KEY, key_of(group, variant), strict=True))
    engine = plan.engine
    record.update(seed=engine.seed, model=engine.name, adapter=engine.adapter, rank=plan.rank)
    record["heads_hash"] = engine.hashes.get(variant.heads, "")
    record["text_hash"] = group.task.text_hash
    record["date"] = datetime.now(timezone.utc).isoformat(timespec="seconds")
    record.update(fields)
    for name in ("prefill_s", "decode_s"):
        record[name] = round(record.get(name, 0.0), 4)
    return Row(**record).writable()


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
