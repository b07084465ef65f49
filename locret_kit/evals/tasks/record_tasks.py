"""Questions of one's own: a file of records, as `samples.records` knows them, becomes a task."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ...naming import blaming
from ...samples.records import SUFFIXES, read_records, to_messages
from ..metrics.benchmarks import get_metric
from .document_tasks import TaskEntry, task_of
from .task import Task


def is_file_of_records(name: str) -> bool:
    """Whether a task's name is meant as a file."""
    return name.endswith(SUFFIXES)


def records_task(path: str, samples: int, metric: str = "contains") -> Task:
    """The task of a file's first ``samples`` questions, named as the file is. A prompt is all that comes before the last
    answer, through the chat template where there is one, and loses its middle where it is too long; the metric takes the best of
    the accepted answers (a list ``answers`` has several). A record's list ``instructions`` are as many questions.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it cannot be read, or a record is of no known schema; names the record. A metric that is unknown, or needs
            more than accepted answers.
    """
    score = get_metric(metric)
    with blaming(f"metric={metric} needs more than a list of accepted answers", KeyError, ValueError):
        if next(iter(score("1", ["1"], {}).values())) < 0.99:
            raise ValueError("an answer that is in it is wrong")
    if not Path(path).is_file():
        raise FileNotFoundError(f"task={path}: there is no such file")
    name = Path(path).name
    entry = TaskEntry(name, "{prompt}", metric, file=name, hub={}, answer="answer")
    return task_of(entry, enumerate(_questions(path)), samples)


def _questions(path: str) -> Iterator[dict[str, object]]:
    for number, record in enumerate(read_records(path)):
        asked = record.get("instructions")
        for index in range(len(asked) if isinstance(asked, list) and asked else 1):
            with blaming(f"{path}: record {number}", ValueError):
                *before, last = to_messages(record, index=index)
            several = record.get("answers")
            accepted = several if isinstance(several, list) and several else [last["content"]]
            yield {"prompt": "\n\n".join(turn["content"] for turn in before), "answer": accepted}
