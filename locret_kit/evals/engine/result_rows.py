"""One row per answered example: the format that the runner writes, and that summaries, figures and the page read.

A run's folder (``out=``) holds::

    config.json              the settings that every row of the folder shares
    rows.<rank>.jsonl        one JSON line per finished example; the shards of all processes together are the run
    kept/<kept>.npz          what the cache held after prefill, for rows that name a `kept`, see `measure.store_kept`
    summary.md, summary.csv  written by `summary`

A kill leaves at most one half line, which readers leave aside and the next run of that shard cuts off.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

from ...files import locked, read_json
from ...settings import RunSettings, annotations_of, checked, made
from ..metrics import Answer
from .run_spec import ORACLES, UNTRAINED

KEY = ("task", "haystack", "length", "budget", "policy", "heads", "sample")
"""Fields that tell examples apart; no two rows of a run have the same."""
_RUN = tuple(item.name for item in fields(RunSettings) if item.name != "backend")
SETTINGS = ("model", "heads_hash", "adapter", "dtype", *_RUN, "ending", "metric")
"""Fields that must not differ among the examples of one cell of a table."""
SCHEDULED = ("chunk", "stabilizers", "local_len")
"""Those of them that say nothing of full attention, of a one-shot cache, whose chunk is its prompt, and of a budget that is a
share of the prompt, which differs from one prompt to the next."""
RECORDED = ("model", "heads_hash", "dtype", "text_hash")
"""Fields that are '' where a run has not recorded them."""
Key = tuple[str | int | float, ...]
COLUMN = KEY[:3]
"""Fields that the rows of one column of a table share; all of them are to be made of one text (`Row.text_hash`)."""


@dataclass(frozen=True, kw_only=True)
class Row(RunSettings):
    """One example under one policy, with the settings of its run (see ``RunSettings``; ``chunk``, ``stabilizers`` and
    ``local_len`` in tokens and slots)."""

    task: str
    """Name in the registry, such as 'R.PassKey', 'ruler.vt' or 'leval.coursera'."""
    haystack: str
    """Source of the text: 'repeated', 'jargon', a file's name; '-' for tasks that bring their own documents."""
    length: int
    """Prompt tokens asked for: synthetic prompts are made this long, documents are cut in the middle to it."""
    budget: int | float
    """Slots kept per key/value head and layer, or the share of the prompt (a fraction) that was asked for; 0 for `full`."""
    policy: str
    """As given on the command line, such as 'locret' or 'streaming(sinks=8)'; 'random-heads' is untrained locret."""
    heads: str
    """The heads' checkpoint by its folder's name; 'untrained'; '-' for policies without heads."""
    sample: int
    """Number of the example within its task, from 0; the same prompt for every policy and budget."""

    score: float | None = None
    """The task's main figure, see `metric`; None where the example failed (`error`)."""
    metric: str = "match"
    """Name of `score`: 'nll' and 'nll_prefill' are nats a token (lower is better), all others lie within [0, 1]."""
    scores: dict[str, float] = field(default_factory=dict)
    """Every figure of the example by metric, `metric` among them."""
    output: str = ""
    """Text that the model wrote; '' for perplexity tasks."""
    answer: Answer = ""
    """The reference: a string, a list of accepted or required ones, or for 'agreement' the ids of full attention's tokens."""
    depth: float | None = None
    """Place of the needle, as a fraction of the haystack; None where there is not one needle."""
    tokens: int = 0
    """Prompt tokens really read, special tokens included."""
    new_tokens: int = 0
    """Tokens generated, or tokens whose likelihood was measured."""
    cut: int = 0
    """Tokens removed from the document's middle so that the prompt has at most `length`."""
    prefix_shared: int = 0
    """First tokens of the prompt that were read once for several prompts (`measure.SharedBeginning`), whichever were still to be
    answered."""
    prefill_s: float = 0.0
    """Wall-clock seconds of the prefill. Those of a shared beginning were taken once and count in every row that shares it,
    the copies not at all; run with share_prefix=false to time every prompt by itself."""
    decode_s: float = 0.0
    """Wall-clock seconds of decoding (or of reading the continuation)."""
    peak_bytes: int = 0
    """CUDA: peak allocation of this example, caches of shared beginnings included. CPU: the process's peak resident size so
    far."""
    cache_bytes: int = 0
    """Bytes of the cache's buffers; those of `full` have room for the longest prompt that shares a beginning."""
    computed_share: float | None = None
    """Share of the prompt's attention that sparse prefill computed, 0 to 1; None where prefill was not sparse."""
    slots: int = 0
    """Slots that the budget came to; 0 for `full`."""
    ending: str = ""
    """End of a hidden-digits prompt, see `evals.tasks.task.ending_of`; '' for other tasks."""
    prompt_hash: str = ""
    """First 16 hexadecimal digits of the SHA-256 of the prompt's token ids (little-endian int32)."""
    text_hash: str = ""
    """First 16 hexadecimal digits of the SHA-256 of the haystack's text (UTF-8), which may change under the same name; ''
    for tasks that make or bring their own text, or where it is not known."""
    kept: str | None = None
    """Stem of the file in ``kept/``, for the first examples of a task."""
    model: str = ""
    """The backbone, as it was named; '' where it is not known."""
    adapter: str | None = None
    """PEFT adapter on the backbone."""
    heads_hash: str = ""
    """See `provenance.weights_hash`; '' for policies without heads, or where it is not known."""
    device: str = ""
    """'cpu', 'cuda:0', ..."""
    dtype: str = ""
    """The backbone's precision."""
    versions: dict[str, str] = field(default_factory=dict)
    """Versions of python, torch, transformers, locret_kit and, where it runs from a checkout, its commit."""
    rank: int = 0
    """The process that made the row."""
    date: str = ""
    """UTC, ISO 8601 to the second."""
    error: str | None = None
    """Kind and message of the exception that this example ended with; None for a whole one."""

    def __post_init__(self) -> None:
        """Rows are read as they were written."""

    @property
    def key(self) -> Key:
        """The values of `KEY`."""
        return tuple(getattr(self, name) for name in KEY)

    @property
    def label(self) -> str:
        """The policy with its heads, as a table or a legend names it."""
        return label_of(self.policy, self.heads)

    def to_json(self) -> str:
        """One line, `KEY` first, without its end.

        Raises:
            ValueError, TypeError: a field is no JSON (NaN and infinity are none), see `writable`.
        """
        record = {**dict(zip(KEY, self.key, strict=True)), **asdict(self)}
        return json.dumps(record, ensure_ascii=False, allow_nan=False)

    def writable(self) -> Row:
        """The row; where JSON has no words for a score or an answer, an error row without them."""
        try:
            self.to_json()
            return self
        except (TypeError, ValueError):
            said = (
                self.error
                or f"ValueError: no JSON: score={self.score}, scores={self.scores}, answer={self.answer}"[:300]
            )
            return replace(self, score=None, scores={}, answer=str(self.answer), error=said)

    @classmethod
    def from_dict(cls, record: object) -> Row:
        """A row of a file. Fields that it lacks have their defaults, so that files of other versions are read; unknown ones are
        left aside.

        Raises:
            ValueError: no JSON object, one of `KEY` is missing, or a field of another type (NaN included); names it.
        """
        if not isinstance(record, dict):
            raise ValueError(f"a row must be a JSON object, not {type(record).__name__}")
        missing = [name for name in KEY if name not in record]
        if missing:
            raise ValueError(f"a row needs {', '.join(KEY)}; it lacks {', '.join(missing)}")
        kinds = {name: kind for name, kind in annotations_of(Row).items() if name in record}
        return made(cls, {name: checked(name, kind, record[name]) for name, kind in kinds.items()})


def label_of(policy: str, heads: str) -> str:
    """The policy with its heads, or with what it is where it is no bounded one."""
    if policy in ORACLES:
        return f"{policy} (unbounded oracle)"
    return policy if heads in ("-", UNTRAINED) else f"{policy} ({heads})"


def read_rows(source: str | Path | Iterable[Path]) -> list[Row]:
    """The rows of a run's folder, of one file, or of several files, sorted by `KEY`. Of two alike one with a score counts
    before an error, then the one of the later `date`.

    A half line at a file's end is left aside.

    Raises:
        FileNotFoundError: no such file, or a folder without rows.
        ValueError: a broken line elsewhere, by file and line; or rows of one cell that differ in one of `SETTINGS`.
    """
    every = [row for path in row_files(source) for row in _read_file(path)]
    check_cells(every)
    rows = {row.key: row for row in sorted(every, key=lambda row: (row.error is None, row.date))}
    return [rows[key] for key in sorted(rows)]


def check_cells(rows: Iterable[Row]) -> None:
    """Raise ValueError where rows that a table would average differ in more than their number; names cell and setting."""
    first: dict[tuple[Key, str], object] = {}
    for row in rows:
        for name in (*SETTINGS, "text_hash") if row.error is None else ():
            value = getattr(row, name)
            unset = (name in RECORDED and not value) or (name in SCHEDULED and (row.one_shot or row.budget < 1))
            if unset:
                continue
            shared = row.key[: len(COLUMN)] if name == "text_hash" else row.key[:-1]
            if first.setdefault((shared, name), value) != value:
                raise ValueError(
                    f"rows of {row.task}, {row.haystack}, length={row.length}, policy={row.policy}, budget={row.budget} "
                    f"have {name}={first[shared, name]} and {name}={value}: one table cannot hold both"
                )


def row_files(source: str | Path | Iterable[Path]) -> list[Path]:
    """The files with rows of a run's folder; a file, or files, as given."""
    if not isinstance(source, (str, Path)):
        return list(source)
    path = Path(source)
    if path.is_file():
        return [path]
    files = sorted(path.glob("rows.*.jsonl"))
    if not files:
        raise FileNotFoundError(f"out={source} holds no rows (rows.*.jsonl)")
    return files


def _read_file(path: Path) -> Iterator[Row]:
    *whole, _ = path.read_bytes().split(b"\n")
    for number, line in enumerate(whole, 1):
        if line.strip():
            try:
                yield Row.from_dict(json.loads(line))
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{path}, line {number}: {error}") from error


class Shard:
    """The file one process appends to, held for it alone while the object is open.

    Raises:
        OSError: the file cannot be opened, or another process is writing to it.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        with ExitStack() as stack:
            busy = f"{path} is being written by another process"
            stack.enter_context(locked(path.with_name(f".{path.name}.lock"), busy))
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            stack.callback(os.close, self._file)
            os.ftruncate(self._file, path.read_bytes().rfind(b"\n") + 1)  # a kill leaves at most half a line
            self._open = stack.pop_all()

    def append(self, row: Row) -> None:
        """The whole line is on the disk when this returns; on an error (a full disk) none of it is in the file.

        Raises:
            OSError: names the file and the reason.
        """
        line = (row.to_json() + "\n").encode("utf-8", "backslashreplace")  # half a surrogate pair as JSON's own escape
        size = os.fstat(self._file).st_size
        try:
            done = 0
            while done < len(line):
                done += os.write(self._file, line[done:])
            os.fsync(self._file)
        except OSError as error:
            os.ftruncate(self._file, size)
            raise OSError(
                f"cannot write {self.path}: {error.strerror}; finished examples are safe, run again to go on"
            ) from error

    def __enter__(self) -> Shard:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()


def read_config(out: Path) -> dict[str, object]:
    """The settings that a folder's rows share; nothing where it says none.

    Raises:
        ValueError: ``config.json`` is no JSON object; names the file.
    """
    path = out / "config.json"
    config = read_json(path) if path.exists() else {}
    if not isinstance(config, dict):
        raise ValueError(f"{path} must hold a JSON object, not {type(config).__name__}")
    return config
