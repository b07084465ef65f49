"""The registry: every task by name, and names to tasks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path

from ...naming import nearest
from ...samples.haystack import load_text
from .document_tasks import BENCHMARKS, averages, document_task, entries, is_file_of_records, read_table, records_task
from .needle_tasks import needle_task, questions_task
from .retrieval import kv_task, math_find_task
from .ruler import NIAHS, common_words_task, frequent_words_task, niah_task, variable_tracking_task
from .task import Example, Task
from .texts import QUESTIONS, agreement_of, fidelity_of, fidelity_task, perplexity_task, reconstruction_task

__all__ = ["Example", "Task", "find_tasks", "groups", "haystack_name", "known_tasks", "row_names"]

ALIASES = {"passkey": "R.PassKey", "number": "R.Number", "kv": "R.KV", "math_find": "Math.Find"}
HaystackTask = Callable[[str, "str | None"], Task]
"""Makes the task for a haystack: its name and its text (None: repeated sentences)."""

HAYSTACK_TASKS: dict[str, HaystackTask] = {
    "R.PassKey": partial(needle_task, "R.PassKey", "R.PassKey"),
    "R.Number": partial(needle_task, "R.Number", "R.Number"),
    "grid": partial(needle_task, "grid", "R.PassKey"),
    "paraphrase": partial(needle_task, "paraphrase", "paraphrase"),
    **{niah.name: partial(niah_task, niah) for niah in NIAHS if not niah.own_haystack},
    "ruler.vt": variable_tracking_task,
    "questions": questions_task,
}
"""Synthetic tasks over repeated sentences or real text."""
REAL_TEXT_TASKS: dict[str, Callable[[str, str], Task]] = {
    **{name: partial(fidelity_task, name) for name in QUESTIONS},
    **{name: partial(perplexity_task, name) for name in ("perplexity", "perplexity_prefill")},
    "reconstruction": partial(reconstruction_task, "reconstruction"),
}
"""Tasks that make no sense over repeated sentences."""
DEFAULT_REAL_TEXT = "pydoc"
"""The text that these read where no real text is named: the one that is always there."""
STANDALONE_TASKS: dict[str, Callable[[], Task]] = {
    "R.KV": kv_task,
    "Math.Find": math_find_task,
    **{niah.name: partial(niah_task, niah, "-", None) for niah in NIAHS if niah.own_haystack},
    "ruler.cwe": common_words_task,
    "ruler.fwe": frequent_words_task,
}
"""Synthetic tasks that make all of their text."""
DESCRIPTIONS: dict[str, str] = read_table("synthetic")
"""The question of each synthetic task, in a few words."""
AGAINST_FULL: dict[str, Callable[[Task], Task]] = {"fidelity": fidelity_of, "agreement": agreement_of}
"""Makers of the task 'PREFIX:NAME'."""


def known_tasks() -> list[str]:
    """Every name that `find_tasks` takes, groups and prefixes aside."""
    return [*ALIASES, *HAYSTACK_TASKS, *STANDALONE_TASKS, *REAL_TEXT_TASKS, *entries()]


@lru_cache(maxsize=1)
def groups() -> dict[str, list[str]]:
    """Tasks of the names that stand for all tasks of a benchmark, or for those of a paper's average."""
    names = [*HAYSTACK_TASKS, *STANDALONE_TASKS]
    documents = {table: [n for n in entries() if n.startswith(start)] for table, start in BENCHMARKS.items() if start}
    return {"ruler": [name for name in names if name.startswith("ruler.")], **documents, **averages()}


def row_names(name: str) -> list[str]:
    """The names that rows give to a task, or to those of a group: aliases resolved, the prefix kept.

    >>> row_names("fidelity:passkey")
    ['fidelity:R.PassKey']
    """
    prefix, colon, plain = name.rpartition(":")
    if is_file_of_records(plain):
        return [prefix + colon + haystack_name(plain)]
    return [prefix + colon + ALIASES.get(member, member) for member in groups().get(plain, [plain])]


def haystack_name(haystack: str) -> str:
    """The name that rows give and pieces are drawn by: of a file or folder its name alone, so that its place on a machine
    matters to neither.

    >>> haystack_name("/data/leval/quality.jsonl"), haystack_name("jargon")
    ('quality.jsonl', 'jargon')
    """
    return Path(haystack).name


def find_tasks(
    names: Sequence[str],
    *,
    haystacks: Sequence[str] = ("repeated",),
    data: Sequence[str] = (),
    samples: int = 20,
    metric: str = "contains",
) -> list[Task]:
    """The tasks of the names, one for each haystack where a task has one, each once.

    Args:
        names: tasks, groups ('ruler', 'leval', ...), files of records ('mine.jsonl'), or 'fidelity:NAME' and 'agreement:NAME' for
            a task scored against what full attention answers.
        haystacks: 'repeated', or what `samples.haystack.load_text` takes.
        data: folders that hold the benchmarks' files; the Hub is asked for what they lack.
        samples: how many records to read of each data set.
        metric: of files of records.

    Raises:
        ValueError: an unknown task; suggests the nearest; or two haystacks or files of one name. FileNotFoundError: a
            haystack, a file or a data set is missing.
    """
    files = [plain for name in names if is_file_of_records(plain := name.rpartition(":")[2])]
    if metric != "contains" and not files:
        raise ValueError(f"metric={metric} is for files of questions, and tasks={','.join(names)} has none")
    for what, places in (("haystacks", haystacks), ("tasks", files)):
        known: dict[str, str] = {}
        for place in places:
            if (other := known.setdefault(haystack_name(place), place)) != place:
                raise ValueError(
                    f"{what}={other} and {place} have one name, which rows could not tell apart: rename one"
                )
    tasks: dict[tuple[str, str], Task] = {}
    for name in names:
        prefix, colon, _ = name.rpartition(":")
        if colon and prefix not in AGAINST_FULL:
            raise ValueError(
                f"task={name!r}: {prefix!r} is unknown.{nearest(prefix, AGAINST_FULL)} Known: {', '.join(AGAINST_FULL)}"
            )
        for full in [name] if is_file_of_records(name) else row_names(name):
            for task in _tasks_of(full.rpartition(":")[2], haystacks, data, samples, metric):
                task = AGAINST_FULL[prefix](task) if colon else task
                tasks[task.name, task.haystack] = task
    return list(tasks.values())


def _tasks_of(name: str, haystacks: Sequence[str], data: Sequence[str], samples: int, metric: str) -> list[Task]:
    if name in STANDALONE_TASKS:
        return [STANDALONE_TASKS[name]()]
    if name in entries():
        return [document_task(name, data, samples)]
    real = [haystack for haystack in haystacks if haystack != "repeated"]
    if name in HAYSTACK_TASKS:
        return [_over(HAYSTACK_TASKS[name], h) if h in real else HAYSTACK_TASKS[name](h, None) for h in haystacks]
    if name in REAL_TEXT_TASKS:
        return [_over(REAL_TEXT_TASKS[name], haystack) for haystack in real or [DEFAULT_REAL_TEXT]]
    if is_file_of_records(name):
        return [records_task(name, samples, metric)]
    known = [*known_tasks(), *groups()]
    raise ValueError(f"task={name!r} is unknown.{nearest(name, known)} Known: {', '.join(known)}")


def _over(make: Callable[[str, str], Task], haystack: str) -> Task:
    """The task over a real text, with its hash."""
    text = _text(haystack)
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
    return replace(make(haystack_name(haystack), text), text_hash=digest[:16])


_text = lru_cache(maxsize=8)(load_text)
