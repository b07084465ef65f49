"""Answer every example of a run that has no row yet, in this process's share of them.

Prompts are dealt to processes by their number, those about one document in stretches of neighbours, so that any number of
processes, and any number of interruptions, give the same rows. A row is on the disk before the next example begins; an
example that fails is a row with its error.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timezone
from itertools import groupby

import torch
from tqdm import tqdm

from ...cache.geometry.schedule import Schedule
from ...planning.memory import OutOfMemory
from ...runtime.tokens import stream_ids
from ...samples.text import TooShort
from ..metrics.benchmarks import get_metric
from ..tasks.base import NEEDS_REFERENCE, Request, Task
from . import oracle
from .measure import Fields, NotStored, Prompt, cache_for, measure_row
from .prefix import Beginning, shared_lengths
from .rows import KEY, PROMPT_VARIANTS, Key, Row, Shard, read_rows
from .settings import Engine, Group, Run, Variant, is_oracle, key_of

Rows = dict[Key, Row]
"""By key."""
FULL = Variant("full", "-", 0)
ROOM = 8192
"""Tokens that hold the shortest prompt of every task."""


def answer(run: Run) -> int:
    """Answer the missing examples of this process's share, with a line each on stderr; the number that ended with an error.

    Raises:
        ValueError: a budget that a policy cannot meet, or a metric that does not exist, before anything is run; or a prompt
            that is not the one of the rows that are there.
        OSError: a file cannot be written; every row that was written before is whole.
    """
    check(run)
    known = check_prompts(run)
    errors = 0
    with Shard(run.out / f"rows.{run.rank}.jsonl") as shard:
        done = finished(run)
        work = list(_work(run, done))
        with tqdm(total=round(sum(missing for *_, missing in work)), unit="example", disable=not work) as bar:
            for batch, part, _ in work:
                for row in _answer_batch(run, batch, part, done, known):
                    shard.append(row)
                    done[row.key] = row
                    errors += row.error is not None
                    bar.write(_said(row), sys.stderr)
                    bar.update()
    return errors


def _said(row: Row) -> str:
    result = f"error: {row.error}" if row.error else f"{row.metric} {row.score:.3f}"
    budget = f" budget {row.budget}" if row.budget else ""
    what = f"{row.task} {row.haystack} {row.length} #{row.sample} {row.label}{budget}"
    return f"{what}: {result} ({row.prefill_s + row.decode_s:.1f} s)"


def check(run: Run) -> None:
    """Build every variant's cache and look up every metric, so that a wrong setting is an error now."""
    for variant in run.variants:
        if is_oracle(variant.policy):
            oracle.check(run.engine, variant, [task.kind for task in run.tasks])
        else:
            cache_for(run.engine, variant, min(run.lengths))
    for task in run.tasks:
        if task.kind in ("answer", "fidelity"):
            get_metric(task.metric)
        for length in run.lengths:
            check_length(run.engine, task, length)


def check_length(engine: Engine, task: Task, length: int) -> None:
    """Raise ValueError where a task's shortest prompt is longer than ``length``; names task and both lengths."""
    if length >= ROOM:
        return
    prompt = _prompt(engine, Group(task, length, 0))
    if isinstance(prompt, TooShort):
        raise ValueError(f"task={task.name}: {prompt}") from prompt


def check_prompts(run: Run) -> dict[Key, str]:
    """Hashes of the prompts of all rows that the folder has, by task, haystack, length and number. The first that it has of
    every task, haystack and length is made again and compared.

    Raises:
        ValueError: it is another now, since data or tokenizer have changed; names it.
    """
    rows = finished(replace(run, retry_errors=False)).values()
    known = {(*row.key[:3], row.sample): row.prompt_hash for row in rows if row.prompt_hash}
    seen: set[Key] = set()
    for group in run.groups():
        kind = (group.task.name, group.task.haystack, group.length)
        if kind not in seen and (*kind, group.sample) in known:
            seen.add(kind)
            _require_same(group, _prompt(run.engine, group), known)
    return known


def _require_same(group: Group, prompt: Prompt | Exception, known: dict[Key, str]) -> None:
    before = known.get((group.task.name, group.task.haystack, group.length, group.sample))
    if before and isinstance(prompt, Prompt) and prompt_hash(prompt.ids) != before:
        raise ValueError(
            f"task={group.task.name}, haystack={group.task.haystack}, length={group.length}, sample={group.sample}: the "
            "prompt differs from that of the rows, since data or tokenizer have changed: choose another out"
        )


def finished(run: Run) -> Rows:
    """Rows of all processes by key; without those that shall be tried again."""
    files = sorted(run.out.glob("rows.*.jsonl"))
    rows = read_rows(files) if files else []
    return {row.key: row for row in rows if row.error is None or not run.retry_errors}


def is_complete(run: Run) -> bool:
    """Whether every example of every process has a row."""
    done = finished(replace(run, retry_errors=False))
    return not any(_missing(run, group, done) for group in run.groups())


def failures(run: Run) -> int:
    """The number of the run's examples that have ended with an error, in whichever process."""
    done = finished(replace(run, retry_errors=False))
    keys = {key_of(group, variant) for group in run.groups() for variant in run.variants}
    return sum(done[key].error is not None for key in keys & done.keys())


def _work(run: Run, done: Rows) -> Iterator[tuple[list[Group], slice, float]]:
    """Every batch in which rows are missing, with this process's stretch of it and the rows that it lacks, on average."""
    for number, batch in enumerate(run.batches()):
        part = _slice(run, number, len(batch))
        missing = sum(len(_missing(run, group, done)) for group in batch)
        if share := missing * (part.stop - part.start) / len(batch):
            yield batch, part, share


def _slice(run: Run, number: int, prompts: int) -> slice:
    """This process's stretch of a batch; one that is left over goes to another process in every batch."""
    turn = (run.rank - number - 1) % run.world_size
    return slice(turn * prompts // run.world_size, (turn + 1) * prompts // run.world_size)


def _missing(run: Run, group: Group, done: Rows) -> list[Variant]:
    return [variant for variant in run.variants if key_of(group, variant) not in done]


def _answer_batch(run: Run, batch: list[Group], part: slice, done: Rows, known: dict[Key, str]) -> Iterator[Row]:
    """Rows of this process's stretch of a batch, as they are answered, policy by policy. Full attention comes first where
    it is the reference. ``known``: see `check_prompts`."""
    made = {group: _prompt(run.engine, group) for group in batch}
    for group, prompt in made.items():
        _require_same(group, prompt, known)
    failed = {group: error for group, error in made.items() if isinstance(error, Exception)}
    prompts = [prompt for prompt in made.values() if isinstance(prompt, Prompt)]
    mine = [*sorted(prompts, key=_place), *failed][part]
    for group in (one for one in mine if isinstance(one, Group)):
        yield from (_failed(run, group, variant, failed[group]) for variant in _missing(run, group, done))
    prompts = [one for one in mine if isinstance(one, Prompt)]
    todo = {v: [one for one in prompts if key_of(one.group, v) not in done] for v in run.variants}
    references: dict[Group, Row] = {}
    if batch[0].task.kind in NEEDS_REFERENCE:
        found = {one.group: done.get(key_of(one.group, FULL)) for one in prompts}
        references = {group: row for group, row in found.items() if row is not None and row.error is None}
        wanted = [one for one in prompts if one.group not in references and any(one in some for some in todo.values())]
        for one, row in _answers(run, FULL, wanted, {}):
            references[one.group] = row
            if row.key not in done:
                yield row
        todo.pop(FULL, None)
    for variant, some in todo.items():
        yield from (row for _, row in _answers(run, variant, some, references))


def _place(prompt: Prompt) -> tuple[int, float]:
    """Sorts prompts by document, and those that hide something in one haystack by its depth: each has then no less in common
    with the next than with the one before."""
    example = prompt.example
    return (0, example.depth or 0.0) if example.document is None else (example.document, len(prompt.ids))


def _prompt(engine: Engine, group: Group) -> Prompt | Exception:
    """The group's prompt, or the reason why it cannot be made."""
    try:
        form = {name: getattr(engine, name) for name in PROMPT_VARIANTS}
        example = group.task.make(
            Request(engine.tokenizer, group.length, group.sample, engine.seed, engine.chat, **form)
        )
        ids = stream_ids(engine.tokenizer, [example.prompt], special=example.special)
        return Prompt(group, example, ids) if ids else ValueError("the prompt holds no tokens")
    except Exception as error:
        return error


def _answers(
    run: Run, variant: Variant, prompts: list[Prompt], references: dict[Group, Row]
) -> Iterator[tuple[Prompt, Row]]:
    """Prompts with their rows, document by document."""
    engine = run.engine
    for _, group in groupby(prompts, lambda prompt: prompt.example.document):
        some = list(group)
        longest = max(len(prompt.ids) for prompt in some)
        beginning = Beginning(engine.model, lambda tokens: cache_for(engine, variant, tokens), longest)
        for prompt, shared in zip(some, _shared(engine, variant, some, longest), strict=True):
            yield prompt, _answer(run, variant, prompt, shared, beginning, references.get(prompt.group))


def _shared(engine: Engine, variant: Variant, prompts: list[Prompt], longest: int) -> list[int]:
    """See `shared_lengths`; zeros where the policy or the kind of task reads a beginning otherwise."""
    alone = is_oracle(variant.policy) or isinstance(variant.budget, float)  # whose slots differ with the prompt
    if len(prompts) < 2 or alone or prompts[0].group.task.kind == "nll_prefill":
        return [0] * len(prompts)
    schedule = Schedule.of(engine.settings_for(variant, longest), longest)
    return shared_lengths([prompt.ids for prompt in prompts], schedule)


def _answer(
    run: Run, variant: Variant, prompt: Prompt, shared: int, beginning: Beginning, reference: Row | None
) -> Row:
    """The row of one example; an exception becomes its error. Out of memory, a prompt is tried once more by itself."""
    group, known, device = prompt.group, _example_fields(prompt), run.engine.model.device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    try:
        if reference is not None and reference.error is not None:
            raise ValueError(f"full attention, the reference, failed: {reference.error}")
        return _row(run, group, variant, {**known, **measure_row(run, variant, prompt, shared, beginning, reference)})
    except NotStored:
        raise
    except Exception as error:
        beginning.drop()
        failed = _failed(run, group, variant, error, known)
        no_memory = isinstance(error, (torch.OutOfMemoryError, OutOfMemory))
    if no_memory:  # out here, where the error no longer holds what the example had allocated
        torch.cuda.empty_cache()
        if shared:
            return _answer(run, variant, prompt, 0, beginning, reference)
    return failed


def _example_fields(prompt: Prompt) -> Fields:
    example, ids = prompt.example, prompt.ids
    known = {"answer": example.answer} if example.answer != "" else {}
    known |= {name: example.extra[name] for name in PROMPT_VARIANTS if name in example.extra}
    return {"depth": example.depth, "cut": example.cut, "tokens": len(ids), "prompt_hash": prompt_hash(ids), **known}


def _row(run: Run, group: Group, variant: Variant, fields: Fields) -> Row:
    engine = run.engine
    record = Fields(zip(KEY, key_of(group, variant), strict=True))
    record.update(seed=engine.seed, model=engine.name, adapter=engine.adapter, rank=run.rank)
    record["heads_hash"] = engine.hashes.get(variant.heads, "")
    record["text_hash"] = group.task.text_hash
    record["date"] = datetime.now(timezone.utc).isoformat(timespec="seconds")
    record.update(fields)
    for name in ("prefill_s", "decode_s"):
        record[name] = round(record.get(name, 0.0), 4)
    return Row(**record).writable()


def _failed(run: Run, group: Group, variant: Variant, error: Exception, known: Fields | None = None) -> Row:
    said = (str(error).strip().splitlines() or [""])[0]
    return _row(run, group, variant, {**(known or {}), "error": f"{type(error).__name__}: {said}"})


def prompt_hash(ids: array[int]) -> str:
    """See `Row.prompt_hash`."""
    if sys.byteorder == "big":
        ids = array(ids.typecode, ids)
        ids.byteswap()
    return hashlib.sha256(ids.tobytes()).hexdigest()[:16]
