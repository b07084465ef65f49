"""The loop over a run's missing examples, in this process's share of them.

Examples are assigned to processes by number, and neighbours about one document stay together. So rows do not depend on
the number of processes or interruptions. A row is written before the next example begins. A failed example becomes a
row with its error.
"""

import sys
from collections.abc import Iterator
from contextlib import suppress
from itertools import groupby

from tqdm import tqdm

from ...engine import KVzip
from ...samples.haystack import TooShort
from ...text.tokens import hash_ids
from ..metrics import as_list, get_metric, library
from ..tasks.task import NEEDS_REFERENCE, Example
from . import BM25, ORACLES, Key, Row, Run, Variant, appending, is_oracle, read_rows, reads_alone
from .measure import SharedBeginning, cache_for, error_row, measure_row, shared_lengths

Rows = dict[Key, Row]
"""Rows by key."""
FULL = Variant("full", "-", 0)
LONG_ENOUGH = 8192
"""Tokens that hold the shortest prompt of every task."""


def answer(run: Run) -> None:
    """Answer this process's missing examples, one line each on stderr, and one for a task's first text that is cut. Examples that
    failed before are repeated. `check` says before whether a run can begin.

    Raises:
        ValueError: a prompt that differs from the rows of an earlier run.
        OSError: a file cannot be written; rows written before are complete.
    """
    hashes = check_prompts(run)
    cut = set[tuple[str, int]]()
    with appending(run.out / f"rows.{run.rank}.jsonl") as append:
        done = {key: row for key, row in finished(run).items() if row.error is None}
        missing = sum(key not in done for key in run.row_keys())
        with tqdm(total=round(missing / run.world_size), unit="example", disable=not missing) as bar:
            for row in rows(run, done, hashes):
                append(row)
                done[row.key] = row
                budget = f" budget {row.budget}" if row.budget else ""
                result = f"error: {row.error}" if row.error else f"{row.metric} {row.score:.3f}"
                example = f"{row.task} {row.haystack} {row.length} #{row.sample} {row.label}{budget}"
                bar.write(f"{example}: {result} ({row.prefill_s + row.decode_s:.1f} s)", sys.stderr)
                bar.update()
                if row.cut and (row.task, row.length) not in cut:
                    cut.add((row.task, row.length))
                    lost = f"{row.cut} of the prompt's {row.tokens + row.cut} tokens were cut out"
                    bar.write(f"warning: {row.task}: {lost}, since lengths=[{row.length}]", sys.stderr)


def rows(run: Run, done: Rows, hashes: dict[Key, str]) -> Iterator[Row]:
    """Rows of this process's share that are not ``done``, one by one. Each policy reads a document once and forks the
    cache for every prompt. Full attention runs first if its answer is the reference.

    Args:
        done: must contain each row before the next one is requested.
        hashes: see `check_prompts`.
    """
    for number, batch in enumerate(run.batches()):
        part = own_part(run, number, len(batch))
        missing = {e.sample: [v for v in run.variants if v.key(e) not in done] for e in batch}
        if part.start == part.stop or not any(missing.values()):
            continue
        every = [_checked(example.made(), hashes) for example in batch]
        mine = [example for example in sorted(every, key=sort_key)[part] if missing[example.sample]]
        for example in mine:
            if example.error is not None:
                yield from (error_row(run, variant, example, example.error) for variant in missing[example.sample])
        mine = [example for example in mine if example.error is None]
        needs_full = batch[0].task.kind in NEEDS_REFERENCE
        references = {e.sample: done[FULL.key(e)] for e in mine if needs_full and FULL.key(e) in done}
        for variant in dict.fromkeys([FULL, *run.variants]) if needs_full else run.variants:
            todo = [one for one in mine if variant.key(one) not in done]
            for _, members in groupby(todo, lambda example: example.document):
                about = list(members)
                document, shared = _document(run, variant, about)
                for example, tokens in zip(about, shared, strict=True):
                    row = measure_row(run, variant, example, tokens, document, references.get(example.sample))
                    if needs_full and variant == FULL:
                        references[example.sample] = row
                    yield row


def check(run: Run) -> None:
    """Build every variant's cache and call every metric, so that wrong settings and missing libraries fail before the
    run.

    Raises:
        ValueError: a setting that cannot be met, or a length below a task's shortest prompt; has both.
    """
    kinds = [task.kind for task in run.tasks]
    for variant in run.variants:
        if reads_alone(variant.policy) and "nll_prefill" in kinds:
            advice = "take tasks=[perplexity] instead of perplexity_prefill"
            said = f"policy={variant.policy} chooses with the whole prompt, so it has no likelihood during prefill"
            raise ValueError(f"{said}: {advice}")
        if is_oracle(variant.policy):
            KVzip(run.setup.settings_for(variant, 10**6), ORACLES[variant.policy])  # no bound depends on the length
        elif variant.policy == BM25:
            library("bm25s")
        else:
            cache_for(run.setup, variant, min(run.lengths))
    for task in run.tasks:
        if task.kind in ("answer", "fidelity"):
            metric = get_metric(task.metric)
            with suppress(KeyError, ValueError):  # its references have another form
                metric("1", "1", {})
    for example in run.examples():
        if example.sample == 0 and example.length < LONG_ENOUGH and isinstance(error := example.made().error, TooShort):
            raise ValueError(f"task={example.task.name}: {error}") from error


def check_prompts(run: Run) -> dict[Key, str]:
    """Hashes of the prompts of the folder's rows, by task, haystack, length and number. One prompt of each task,
    haystack and length is rebuilt and compared, with the haystack's hash, and every prompt and expected answer of a file of
    questions.

    Raises:
        ValueError: a prompt, an answer or a haystack differs, or an example is gone, because data or tokenizer have changed;
            names it.
    """
    rows = finished(run).values()
    hashes = {(*row.key[:3], row.sample): row.prompt_hash for row in rows if row.prompt_hash}
    answers = {task.name: task.answers for task in run.tasks if task.kind == "answer"}
    sizes = {task.name: task.size for task in run.tasks if task.size is not None and task.size < run.samples}
    for row in rows:
        if row.sample >= (size := sizes.get(row.task, row.sample + 1)):
            said = f"task={row.task} has {size} examples now, and the rows have sample={row.sample}"
            raise ValueError(f"{said}: choose another out")
        wanted = answers.get(row.task, ())[row.sample : row.sample + 1]
        if wanted and row.answer and row.error is None and as_list(row.answer) != as_list(wanted[0]):
            said = f"task={row.task}, sample={row.sample}: the answer is {wanted[0]}, and was {row.answer} for the rows"
            raise ValueError(f"{said}: choose another out")
    compared: set[Key] = set()
    for example in run.examples():
        column = (example.task.name, example.task.haystack, example.length)
        if (example.task.answers or column not in compared) and (*column, example.sample) in hashes:
            compared.add(column)
            _checked(example.made(), hashes)
    texts = {(task.name, task.haystack, length): task.text_hash for task in run.tasks for length in run.lengths}
    for row in rows:
        now = texts.get((row.task, row.haystack, row.length), row.text_hash)
        if row.text_hash and row.error is None and now != row.text_hash:
            said = f"task={row.task}, haystack={row.haystack}: the text differs from that of the rows"
            raise ValueError(f"{said}: choose another out")
    return hashes


def _checked(example: Example, hashes: dict[Key, str]) -> Example:
    """The example. Raises ValueError if its prompt differs from the prompt of earlier rows."""
    task, length, sample = example.task, example.length, example.sample
    before = hashes.get((task.name, task.haystack, length, sample))
    if before and example.error is None and hash_ids(example.ids)[:16] != before:
        raise ValueError(
            f"task={task.name}, haystack={task.haystack}, length={length}, sample={sample}: the prompt differs from that of "
            "the rows, since data or tokenizer have changed: choose another out"
        )
    return example


def finished(run: Run) -> Rows:
    """Rows of all processes by key."""
    files = sorted(run.out.glob("rows.*.jsonl"))
    return {row.key: row for row in read_rows(files)}


def left(run: Run) -> tuple[int, int]:
    """Number of examples without a row, and of examples with an error, in all processes."""
    keys, done = set(run.row_keys()), finished(run)
    return len(keys - done.keys()), sum(done[key].error is not None for key in keys & done.keys())


def own_part(run: Run, number: int, prompts: int) -> slice:
    """Slice of a batch for this process. The remainder goes to a different process in each batch."""
    # The parts turn with the batch: otherwise the last process would get the remainder of every batch.
    turn = (run.rank - number - 1) % run.world_size
    return slice(turn * prompts // run.world_size, (turn + 1) * prompts // run.world_size)


def sort_key(example: Example) -> tuple[bool, int, float]:
    """Sort key of examples: by document and prompt length, or by the depth of a needle in a haystack. Examples that
    cannot be built come last."""
    if example.document is None:
        # Prompts share the haystack up to the needle, so by depth each shares more with the next one.
        return example.error is not None, 0, example.depth or 0.0
    return example.error is not None, example.document, len(example.ids)


def _document(run: Run, variant: Variant, examples: list[Example]) -> tuple[SharedBeginning, list[int]]:
    """The cache of these prompts' document, and the number of shared tokens of each prompt, see `shared_lengths`.
    Nothing is shared if the policy or the kind of task reads the prefix differently."""
    setup, longest = run.setup, max(len(example.ids) for example in examples)
    document = SharedBeginning(setup.model, lambda tokens: cache_for(setup, variant, tokens), longest)
    alone = reads_alone(variant.policy) or isinstance(variant.budget, float)  # whose slots differ with the prompt
    if len(examples) < 2 or alone or examples[0].task.kind == "nll_prefill":
        return document, [0] * len(examples)
    return document, shared_lengths([example.ids for example in examples], cache_for(setup, variant, longest))
