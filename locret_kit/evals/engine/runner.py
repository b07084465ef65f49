"""Do every example of a run that has no row yet, in this process's share of them.

Prompts are dealt to processes by their number, those that begin alike in stretches of neighbours, so that any number of
processes, and any number of interruptions, give the same rows. A row is on the disk before the next example begins; an
example that fails is a row with its error.
"""

from __future__ import annotations

import hashlib
import math
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any

import torch

from ...planning.memory import OutOfMemory
from ...runtime.tokens import stream_ids
from ..metrics.benchmarks import get_metric
from ..tasks.base import REFERRED, Request
from . import oracle
from .measure import Prompt, cache_for, measured
from .prefix import Beginnings, Turn, limit, together, turns
from .progress import Progress
from .rows import KEY, Row, Shard, read_rows
from .settings import Engine, Group, Run, Variant, is_oracle, key_of

Say = Callable[[str], None]
FULL = Variant("full", "-", 0)


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
    alone = is_oracle(variant.policy) or isinstance(variant.budget, float)  # whose slots differ with the prompt
    if len(prompts) < 2 or alone or prompts[0].group.task.kind == "nll_prefill":
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
        return _row(plan, group, variant, **{**known, **measured(plan, variant, prompt, turn, beginnings, reference)})
    except Exception as error:
        beginnings.drop()
        failed = _failed(plan, group, variant, error, **known)
        no_memory = isinstance(error, (torch.OutOfMemoryError, OutOfMemory))
    if no_memory:  # out here, where the error no longer holds what the example had allocated
        torch.cuda.empty_cache()
        if turn.held:
            return _answer(plan, variant, prompt, Turn(turn.prompt), beginnings, reference)
    return failed


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


def prompt_hash(ids: array) -> str:
    """See `Row.prompt_hash`."""
    little = ids if sys.byteorder == "little" else array(ids.typecode, ids)
    if little is not ids:
        little.byteswap()
    return hashlib.sha256(little.tobytes()).hexdigest()[:16]
