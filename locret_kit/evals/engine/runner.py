"""Answer every example of a run that has no row yet, in this process's share of them.

Prompts are dealt to processes by their number, those about one document in stretches of neighbours, so that any number of
processes, and any number of interruptions, give the same rows. A row is on the disk before the next example begins; an
example that fails is a row with its error.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timezone
from itertools import groupby

import torch
from tqdm import tqdm

from ...cache.geometry.schedule import Schedule
from ...documents.text_record import hash_ids
from ...planning.memory import OutOfMemory
from ...runtime.tokens import stream_ids
from ...samples.haystack import TooShort
from ...validation import made
from ..metrics.benchmarks import get_metric
from ..tasks.task import NEEDS_REFERENCE, ExampleRequest, Task
from . import bm25, oracle
from .measure import Fields, NotStored, cache_for, measure_row
from .result_rows import KEY, Key, Row, Shard, read_rows
from .run_spec import BM25, EvalPrompt, Run, Setup, Variant, is_oracle, reads_alone
from .shared_beginning import SharedBeginning, shared_lengths

Rows = dict[Key, Row]
"""Rows by key."""
FULL = Variant("full", "-", 0)
LONG_ENOUGH = 8192
"""Tokens that hold the shortest prompt of every task."""


def answer(run: Run) -> int:
    """Answer the missing examples of this process's share, with a line each on stderr; the number that ended with an error.

    Raises:
        ValueError: a budget that a policy cannot meet, or a metric that does not exist, before anything is run; or a prompt
            that is not the one of the rows that are there.
        OSError: a file cannot be written; every row that was written before is whole.
    """
    check(run)
    hashes = check_prompts(run)
    errors = 0
    with Shard(run.out / f"rows.{run.rank}.jsonl") as shard:
        done = {key: row for key, row in finished(run).items() if row.error is None}
        missing = sum(len(_missing(run, prompt, done)) for prompt in run.prompts())
        with tqdm(total=round(missing / run.world_size), unit="example", disable=not missing) as bar:
            for row in rows(run, done, hashes):
                shard.append(row)
                done[row.key] = row
                errors += row.error is not None
                bar.write(_line(row), sys.stderr)
                bar.update()
    return errors


def rows(run: Run, done: Rows, hashes: dict[Key, str]) -> Iterator[Row]:
    """The loop: every row of this process's share that is not ``done``, as it is answered. Each policy reads a document once
    and goes on from a fork of it for every prompt; full attention comes first where its answer is the reference.

    Args:
        done: grows by every row before the next one is asked for.
        hashes: see `check_prompts`.
    """
    for number, batch in enumerate(run.batches()):
        part = _slice(run, number, len(batch))
        if part.start == part.stop or not any(_missing(run, prompt, done) for prompt in batch):
            continue
        every = [make(run.setup, prompt) for prompt in batch]
        for prompt in every:
            _require_same(prompt, hashes)
        mine = [prompt for prompt in sorted(every, key=place)[part] if _missing(run, prompt, done)]
        for prompt in mine:
            if prompt.error is not None:
                yield from (_failed(run, prompt, variant, prompt.error) for variant in _missing(run, prompt, done))
        prompts = [prompt for prompt in mine if prompt.error is None]
        needs_full = batch[0].task.kind in NEEDS_REFERENCE
        references = _references(prompts, done) if needs_full else {}
        for variant in dict.fromkeys([FULL, *run.variants]) if needs_full else run.variants:
            first = needs_full and variant == FULL
            todo = [one for one in prompts if (one.sample not in references if first else one.key(variant) not in done)]
            for _, members in groupby(todo, lambda prompt: prompt.example.document):
                neighbours = list(members)
                document, shared = _document(run.setup, variant, neighbours)
                for prompt, tokens in zip(neighbours, shared, strict=True):
                    row = _answer(run, variant, prompt, tokens, document, references.get(prompt.sample))
                    if first:
                        references[prompt.sample] = row
                    if row.key not in done:
                        yield row


def _line(row: Row) -> str:
    result = f"error: {row.error}" if row.error else f"{row.metric} {row.score:.3f}"
    budget = f" budget {row.budget}" if row.budget else ""
    example = f"{row.task} {row.haystack} {row.length} #{row.sample} {row.label}{budget}"
    return f"{example}: {result} ({row.prefill_s + row.decode_s:.1f} s)"


def check(run: Run) -> None:
    """Build every variant's cache and try every metric, so that a wrong setting or a missing library is an error now."""
    for variant in run.variants:
        kinds = [task.kind for task in run.tasks]
        if is_oracle(variant.policy):
            oracle.check(run.setup, variant, kinds)
        elif variant.policy == BM25:
            bm25.check(kinds)
        else:
            cache_for(run.setup, variant, min(run.lengths))
    for task in run.tasks:
        if task.kind in ("answer", "fidelity"):
            metric = get_metric(task.metric)
            with suppress(KeyError, ValueError):  # its references have another form
                metric("1", "1", {})
        for length in run.lengths:
            check_length(run.setup, task, length)


def check_length(setup: Setup, task: Task, length: int) -> None:
    """Raise ValueError where a task's shortest prompt is longer than ``length``; names task and both lengths."""
    if length >= LONG_ENOUGH:
        return
    error = make(setup, EvalPrompt(task, length, 0)).error
    if isinstance(error, TooShort):
        raise ValueError(f"task={task.name}: {error}") from error


def check_prompts(run: Run) -> dict[Key, str]:
    """Hashes of the prompts of all rows that the folder has, by task, haystack, length and number. The first that it has of
    every task, haystack and length is made again and compared.

    Raises:
        ValueError: it is another now, since data or tokenizer have changed; names it.
    """
    hashes = {(*row.key[:3], row.sample): row.prompt_hash for row in finished(run).values() if row.prompt_hash}
    compared: set[Key] = set()
    for prompt in run.prompts():
        column = (prompt.task.name, prompt.task.haystack, prompt.length)
        if column not in compared and (*column, prompt.sample) in hashes:
            compared.add(column)
            _require_same(make(run.setup, prompt), hashes)
    return hashes


def _require_same(prompt: EvalPrompt, hashes: dict[Key, str]) -> None:
    task, length, sample = prompt.task, prompt.length, prompt.sample
    before = hashes.get((task.name, task.haystack, length, sample))
    if before and prompt.error is None and hash_ids(prompt.ids)[:16] != before:
        raise ValueError(
            f"task={task.name}, haystack={task.haystack}, length={length}, sample={sample}: the prompt differs from that of "
            "the rows, since data or tokenizer have changed: choose another out"
        )


def finished(run: Run) -> Rows:
    """Rows of all processes by key."""
    files = sorted(run.out.glob("rows.*.jsonl"))
    return {row.key: row for row in read_rows(files)}


def is_complete(run: Run) -> bool:
    """Whether every example of every process has a row."""
    done = finished(run)
    return not any(_missing(run, prompt, done) for prompt in run.prompts())


def failures(run: Run) -> int:
    """The number of the run's examples that have ended with an error, in whichever process."""
    done = finished(run)
    keys = {prompt.key(variant) for prompt in run.prompts() for variant in run.variants}
    return sum(done[key].error is not None for key in keys & done.keys())


def _slice(run: Run, number: int, prompts: int) -> slice:
    """This process's stretch of a batch; one that is left over goes to another process in every batch."""
    turn = (run.rank - number - 1) % run.world_size
    return slice(turn * prompts // run.world_size, (turn + 1) * prompts // run.world_size)


def _missing(run: Run, prompt: EvalPrompt, done: Rows) -> list[Variant]:
    return [variant for variant in run.variants if prompt.key(variant) not in done]


def place(prompt: EvalPrompt) -> tuple[bool, int, float]:
    """Sorts prompts by document, and those that hide something in one haystack by its depth: each has then no less in common
    with the next than with the one before. Those that cannot be made come last."""
    failed, example = prompt.error is not None, prompt.example
    if example.document is None:
        return failed, 0, example.depth or 0.0
    return failed, example.document, len(prompt.ids)


def make(setup: Setup, prompt: EvalPrompt) -> EvalPrompt:
    """The prompt with its example and tokens, or with the reason why it cannot be made."""
    try:
        example = prompt.task.make(
            ExampleRequest(setup.tokenizer, prompt.length, prompt.sample, setup.seed, setup.chat, setup.ending)
        )
        ids = stream_ids(setup.tokenizer, [example.prompt], special=example.special)
        if not ids:
            raise ValueError("the prompt holds no tokens")
        return replace(prompt, example=example, ids=ids)
    except Exception as error:
        return replace(prompt, error=error)


def _references(prompts: list[EvalPrompt], done: Rows) -> dict[int, Row]:
    """Rows of full attention by the prompt's number, where they ended without an error."""
    answers = {prompt.sample: done.get(prompt.key(FULL)) for prompt in prompts}
    return {sample: row for sample, row in answers.items() if row is not None and row.error is None}


def _document(setup: Setup, variant: Variant, prompts: list[EvalPrompt]) -> tuple[SharedBeginning, list[int]]:
    """The document of these prompts, and for each of them how many tokens of it are shared, see `shared_lengths`: none where
    the policy or the kind of task reads a beginning otherwise."""
    longest = max(len(prompt.ids) for prompt in prompts)
    document = SharedBeginning(setup.model, lambda tokens: cache_for(setup, variant, tokens), longest)
    alone = reads_alone(variant.policy) or isinstance(variant.budget, float)  # whose slots differ with the prompt
    if len(prompts) < 2 or alone or prompts[0].task.kind == "nll_prefill":
        return document, [0] * len(prompts)
    schedule = Schedule.of(setup.settings_for(variant, longest), longest)
    return document, shared_lengths([prompt.ids for prompt in prompts], schedule)


def _answer(
    run: Run, variant: Variant, prompt: EvalPrompt, shared: int, document: SharedBeginning, reference: Row | None
) -> Row:
    """The row of one example; an exception becomes its error. Out of memory, a prompt is tried once more by itself."""
    device = run.setup.model.device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    try:
        if reference is not None and reference.error is not None:
            raise ValueError(f"full attention, the reference, failed: {reference.error}")
        return _row(run, prompt, variant, measure_row(run, variant, prompt, shared, document, reference))
    except NotStored:
        raise
    except Exception as error:
        document.drop()
        failed = _failed(run, prompt, variant, error)
        no_memory = isinstance(error, (torch.OutOfMemoryError, OutOfMemory))
    if no_memory:  # out here, where the error no longer holds what the example had allocated
        torch.cuda.empty_cache()
        if shared:
            return _answer(run, variant, prompt, 0, document, reference)
    return failed


def _row(run: Run, prompt: EvalPrompt, variant: Variant, fields: Fields) -> Row:
    setup = run.setup
    record = Fields(zip(KEY, prompt.key(variant), strict=True))
    record.update(seed=setup.seed, model=setup.name, adapter=setup.adapter, rank=run.rank)
    record["heads_hash"] = setup.hashes.get(variant.heads, "")
    record["text_hash"] = prompt.task.text_hash
    record["date"] = datetime.now(timezone.utc).isoformat(timespec="seconds")
    record |= _prompt_fields(prompt) | fields
    return made(Row, record).writable()


def _prompt_fields(prompt: EvalPrompt) -> Fields:
    """Nothing where it cannot be made."""
    if prompt.error is not None:
        return {}
    example, ids = prompt.example, prompt.ids
    known = {"answer": example.answer} if example.answer != "" else {}
    known |= {"ending": example.extra["ending"]} if "ending" in example.extra else {}
    return {"depth": example.depth, "cut": example.cut, "tokens": len(ids), "prompt_hash": hash_ids(ids)[:16], **known}


def _failed(run: Run, prompt: EvalPrompt, variant: Variant, error: Exception) -> Row:
    message = (str(error).strip().splitlines() or [""])[0]
    return _row(run, prompt, variant, {"error": f"{type(error).__name__}: {message}"})
