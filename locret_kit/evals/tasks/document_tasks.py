"""Tasks with their own documents: one YAML table per benchmark, one entry per task.

The files come from local folders (``data=``) or from the Hub. An entry has these fields besides those of `Task`:

- ``file``: its name without ending, by default the task's name. ``hub``: arguments of `datasets.load_dataset`.
- ``prompt``: a format string over the record's fields. ``prefix``: the answer's first words.
- ``answer``: a field, or 'option': text and letter of one of the record's ``options``.
- ``each``: lists of the record that are iterated together. ``extract``: fields made from others by a pattern.
- ``words``: the field to count words in, as ``{words}``. ``extra``: fields or plain values for the metric.
- ``truncate``: 'middle' of the prompt, the document's 'end' or 'start', or 'never'. ``document``: the field to cut.
- ``shots`` and ``shot``: few-shot examples from the training split.
- ``leave_out``: field values of records to skip.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib import resources
from itertools import chain, islice
from pathlib import Path
from typing import Any

import yaml

from ...naming import first_line, last_part, prefixed_errors
from ...samples.records import SUFFIXES, files_below, read_records, to_messages
from ...text.tokens import encode
from ...text.untrusted import Span
from ..metrics import Answer, Extra, get_metric
from .task import Example, Task, count_ids, wrap

BENCHMARKS = {"infinitebench": "infinitebench.", "leval": "leval.", "longbench": "longbench.", "short": ""}
"""Tables by name, and what their tasks' names begin with."""
Record = dict[str, Any]
"""A document with its questions and answers, as the data set has it."""
Numbered = tuple[int, Record]
"""A record with its document's number."""
PromptOf = Callable[[str], tuple[str, bool]]
"""Gives the prompt of a text, and whether the tokenizer adds its special tokens to it."""


@dataclass(frozen=True)
class TaskEntry:
    """One entry of a table."""

    name: str
    prompt: str
    metric: str
    file: str
    hub: Mapping[str, str]
    answer: str | None = None
    prefix: str = ""
    kind: str = "answer"
    max_new_tokens: int = 64
    chat: bool = True
    truncate: str = "middle"
    document: str = ""
    each: Mapping[str, str] = field(default_factory=dict)
    extract: Mapping[str, Sequence[str]] = field(default_factory=dict)
    words: str | None = None
    extra: Extra = field(default_factory=dict)
    shots: int = 0
    shot: str = ""
    leave_out: Mapping[str, Sequence[object]] = field(default_factory=dict)


def read_table(name: str) -> dict[str, Any]:
    """A YAML file of this folder."""
    return yaml.safe_load(resources.files(__package__).joinpath(f"{name}.yaml").read_text(encoding="utf-8"))


@lru_cache(maxsize=1)
def _tables() -> dict[str, dict[str, Any]]:
    return {start: read_table(name) for name, start in BENCHMARKS.items()}


@lru_cache(maxsize=1)
def entries() -> dict[str, TaskEntry]:
    """Every task of every table, by its full name."""
    by_name = {}
    for start, table in _tables().items():
        for name, values in table["tasks"].items():
            merged = {"file": name, **table["defaults"], **values}
            by_name[start + name] = TaskEntry(name=start + name, **merged)
    return by_name


def averages() -> dict[str, list[str]]:
    """Tasks over which papers give averages, by the name of the average."""
    listed = [(start, *item) for start, table in _tables().items() for item in table.get("averages", {}).items()]
    return {name: [start + task for task in tasks] for start, name, tasks in listed}


def document_task(name: str, data: Sequence[str], samples: int) -> Task:
    """The task of an entry, its first ``samples`` examples read.

    Raises:
        FileNotFoundError: the files are neither in a folder of ``data`` nor to be had from the Hub.
        ValueError: a record lacks a field that the prompt, the answer or the metric names.
    """
    entry = entries()[name]
    first = islice(_records(entry, data, split="train"), entry.shots) if entry.shots else ()
    shots = "".join(entry.shot.format(**record) for record in first)
    return task_of(entry, _examples(entry, _records(entry, data)), samples, shots)


def task_of(entry: TaskEntry, records: Iterable[Numbered], samples: int, shots: str = "") -> Task:
    """The task of an entry over its first ``samples`` records; ``shots`` precedes each prompt.

    Raises:
        ValueError: no records, or the first lacks a field of the prompt, the answer or the metric.
    """
    examples = list(islice(records, samples))
    if not examples:
        raise ValueError(f"task={entry.name}: its data set holds no example")

    def make(request: Example) -> Example:
        number, record = examples[request.sample]
        return replace(_example(entry, record, shots, request), document=0 if shots else number)

    _rendered(entry, examples[0][1], shots)  # a missing field shows before the run
    return Task(
        entry.name, make, entry.metric, entry.max_new_tokens, kind=entry.kind, size=len(examples),
        begins_alike=bool(entry.shots) or len({number for number, _ in examples}) < len(examples),
    )  # fmt: skip


def _records(entry: TaskEntry, data: Sequence[str], split: str | None = None) -> Iterator[Record]:
    """Records of a split, by default the task's own, from the first folder that has them, else from the Hub."""
    for folder in data:
        if paths := _find_files(entry, Path(folder), split):
            return chain.from_iterable(map(read_records, paths))
    return _hub_records(entry, data, split)


def _find_files(entry: TaskEntry, folder: Path, split: str | None) -> list[Path]:
    """Files of a task below a folder: its own ``file.jsonl`` (.json, .parquet) anywhere below it, or the split's file or shards,
    in order, in a folder by that name. There the folder of the data set's version (the Hub's ``name``) comes first.

    Raises:
        FileNotFoundError: no such folder.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"data={folder} is no folder")
    for path in files_below(folder, SUFFIXES) if split is None else ():
        if path.stem == entry.file:
            return [path]
    split = split or entry.hub.get("split", "test")
    named = [path for path in (folder, *sorted(folder.rglob(entry.file))) if path.is_dir() and path.name == entry.file]
    for place in (place for path in named for place in (path / entry.hub.get("name", ""), path)):
        files = files_below(place, SUFFIXES)
        of_split = [path for path in files if path.name.startswith(split) or path.parent.name == split]
        if of_split:
            return [path for path in of_split if _series(path) == _series(of_split[0])]
    return []


def _series(path: Path) -> tuple[Path, str, str]:
    """The common part of a file's shards: ``train`` of ``train-00000-of-00080.parquet``, nothing of ``0000.parquet``."""
    return path.parent, re.sub(r"(^|[-_])\d.*$", "", path.stem), path.suffix


def _hub_records(entry: TaskEntry, data: Sequence[str], split: str | None) -> Iterator[Record]:
    import datasets

    where = {key: value.format(file=entry.file) for key, value in entry.hub.items()}
    if where["path"] == "json":
        where["split"] = "train"  # the name that a single file's records get
    elif split is not None:
        where["split"] = split
    try:
        rows = datasets.load_dataset(**where, streaming=True)
        yield from (dict(row) for row in rows)
    except Exception as error:  # the client's and its transport's own kinds
        looked = f" in {', '.join(map(str, data))}" if data else ""
        raise FileNotFoundError(
            f"task={entry.name}: no {entry.file}{{{','.join(SUFFIXES)}}}{looked}, and the Hub says: {first_line(error)}; get "
            f"{where.get('data_files', where['path'])} where there is a network, and give data=[FOLDER]"
        ) from error


def _examples(entry: TaskEntry, records: Iterator[Record]) -> Iterator[Numbered]:
    """Records, or with ``each`` the n-th items of every record's lists for n = 0, 1, ..."""
    left_out = entry.leave_out.items()
    records = (one for one in records if not any(one.get(name) in values for name, values in left_out))
    if not entry.each:
        yield from enumerate(records)
        return
    everything = list(records)
    for record in everything:
        if missing := [many for many in entry.each.values() if many not in record]:
            raise ValueError(f"task={entry.name}: a record has no {missing[0]!r}; it has {', '.join(map(str, record))}")
    counts = [min(len(record[many]) for many in entry.each.values()) for record in everything]
    for n in range(max(counts, default=0)):
        for number, (record, count) in enumerate(zip(everything, counts, strict=True)):
            if n < count:
                yield number, {**record, **{one: record[many][n] for one, many in entry.each.items()}}


def _rendered(entry: TaskEntry, record: Record, shots: str) -> tuple[str, Record, Answer, Record]:
    """Text, fields, answer and the metric's extras of a record."""
    try:
        fields = _fields(entry, record)
        text = shots + entry.prompt.format(**fields)
        extra = {key: record[value] if isinstance(value, str) else value for key, value in entry.extra.items()}
        return text, fields, _answer(entry, record), extra
    except (KeyError, IndexError) as error:
        raise ValueError(f"task={entry.name}: a record has no {error}; it has {', '.join(map(str, record))}") from error


def _example(entry: TaskEntry, record: Record, shots: str, request: Example) -> Example:
    text, fields, answer, extra = _rendered(entry, record, shots)
    if entry.kind == "nll":
        return _split_for_likelihood(entry, text, request)
    chat = request.wants_chat(entry.chat)

    def prompt_of(text: str) -> tuple[str, bool]:
        return wrap(request, text, entry.prefix, chat=True) if chat else (text + entry.prefix, True)

    text, cut = _shorten(entry, text, shots, fields, prompt_of, request)
    prompt, special = prompt_of(text)
    span = _text_span(entry, fields, prompt)
    return replace(request, prompt=prompt, answer=answer, special=special, cut=cut, extra=extra, text=span)


def _text_span(entry: TaskEntry, fields: Record, prompt: str) -> Span | None:
    """Character range of the document in the prompt; None without one, or if part of the text around it was cut."""
    if not entry.document:
        return None
    before, _, after = (part.format(**fields) for part in entry.prompt.partition(f"{{{entry.document}}}"))
    span = prompt.find(before) + len(before), prompt.rfind(after)
    return span if before in prompt and 0 <= span[0] <= span[1] else None


def _fields(entry: TaskEntry, record: Record) -> Record:
    fields = dict(record)
    for name, (source, pattern) in entry.extract.items():
        match = re.search(pattern, record[source])
        if match is None:
            raise ValueError(f"task={entry.name}: {source}={record[source]!r:.80} must match {pattern!r}")
        fields[name] = match.group(1)
    if entry.words:
        fields["words"] = len(str(record[entry.words]).split())
    return fields


def _answer(entry: TaskEntry, record: Record) -> Answer:
    if entry.answer is None:
        return ""
    if entry.answer != "option":
        return record[entry.answer]
    given = record["answer"]
    text = given if isinstance(given, str) else given[0]
    return [text, "ABCD"[record["options"].index(text)]]


def _shorten(
    entry: TaskEntry, text: str, shots: str, fields: Record, prompt_of: PromptOf, request: Example
) -> tuple[str, int]:
    """The text with at most ``request.length`` tokens in its prompt, and how many tokens were cut."""
    tokenizer, cut = request.tokenizer, 0
    over = count_ids(tokenizer, *prompt_of(text)) - request.length
    if over <= 0:
        return text, 0
    if entry.truncate == "never":
        raise ValueError(f"length={request.length} must be at least {over + request.length}: {entry.name} is never cut")
    whole = text if entry.truncate == "middle" else str(fields[entry.document])
    offsets = encode(tokenizer, whole)[1]
    while over > 0:
        cut += over
        keep = len(offsets) - cut
        if keep < 2:
            raise ValueError(f"length={request.length} is too short for the task {entry.name}: no document is left")
        if entry.truncate == "middle":
            head, tail = keep // 2, keep - keep // 2
            text = whole[: offsets[head - 1][1]] + whole[offsets[len(offsets) - tail][0] :]
        else:
            part = whole[: offsets[keep - 1][1]] if entry.truncate == "end" else whole[offsets[cut][0] :]
            text = shots + entry.prompt.format(**{**fields, entry.document: part})
        over = count_ids(tokenizer, *prompt_of(text)) - request.length
    return text, cut


def _split_for_likelihood(entry: TaskEntry, text: str, request: Example) -> Example:
    """The first ``length`` tokens (at most all but the continuation's) as prompt, and the next as continuation."""
    offsets = encode(request.tokenizer, text)[1]
    behind = min(entry.max_new_tokens, max(1, len(offsets) // 4))
    before = min(request.length - count_ids(request.tokenizer, "", True), len(offsets) - behind)
    if before < 1:
        raise ValueError(f"task={entry.name}, sample={request.sample}: the text has {len(offsets)} tokens")
    at, end = offsets[before][0], offsets[min(before + behind, len(offsets)) - 1][1]
    return replace(request, prompt=text[:at], continuation=text[at:end])


def is_file_of_records(name: str) -> bool:
    """Whether a task's name is meant as a file."""
    return name.endswith(SUFFIXES)


def records_task(path: str, samples: int, metric: str = "contains") -> Task:
    """A task of a file's first ``samples`` questions, named like the file. A prompt is everything before the last
    answer, through the chat template if there is one, and is cut in the middle if too long. The metric takes the
    best of the accepted answers (a list ``answers`` has several). A record with a list ``instructions`` gives one
    question for each.

    Raises:
        FileNotFoundError: no such file.
        ValueError: unreadable, or a record of an unknown schema, which is named; or a metric that is unknown or
            needs more than accepted answers.
    """
    score = get_metric(metric)
    with prefixed_errors(f"metric={metric} needs more than a list of accepted answers", KeyError, ValueError):
        first, second = (next(iter(score("1", accepted, {}).values())) for accepted in (["1"], ["2", "1"]))
        if first < 0.99 or not second:
            raise ValueError("an answer that is in it is wrong")
    if not Path(path).is_file():
        raise FileNotFoundError(f"task={path}: there is no such file")
    name = last_part(path)
    entry = TaskEntry(name, "{prompt}", metric, file=name, hub={}, answer="answer")
    questions = [*islice(_questions(path), samples)]
    return replace(task_of(entry, questions, samples), answers=[record["answer"] for _, record in questions])


def _questions(path: str) -> Iterator[Numbered]:
    """The questions of a file; those of a record share its text."""
    for number, record in enumerate(read_records(path)):
        asked = record.get("instructions")
        lists = (one for name in ("answers", "answer") if isinstance(one := record.get(name), list))
        several: list[Any] = next(lists, [])
        for index in range(len(asked) if isinstance(asked, list) and asked else 1):
            with prefixed_errors(f"{path}: record {number}", ValueError):
                messages = to_messages(record, index=index)
                if several and asked:
                    raise ValueError("answers does not say which of the instructions it is of: one record for each")
                if not all(isinstance(one, str) for one in several):
                    raise ValueError(f"answers={several!r:.200} must be strings")
            while messages[-1]["role"] != "assistant":  # a question that the record leaves open
                messages.pop()
            *before, last = messages
            accepted = several or [last["content"]]
            yield number, {"prompt": "\n\n".join(turn["content"] for turn in before), "answer": accepted}
