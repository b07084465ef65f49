"""An evaluation run: its backbone, tasks and variants, and one row per answered example.

The command line builds a run, or you build it in Python. The runner writes rows; summaries, figures and the HTML page
read them. A run's folder (``out=``) holds::

    config.json              settings shared by all rows of the folder
    rows.<rank>.jsonl        one JSON line per finished example; the run is the union of all processes' files
    kept/<kept>.npz          kept slots after prefill, for rows with a `kept`, see `measure.store_kept`
    summary.md, summary.csv  written by `report`

If a run is killed, a file may end with half a line. Readers skip it, and the next run of that process cuts it off.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ...files import as_object, locked
from ...naming import prefixed_errors
from ...settings import Resolved, RunSettings
from ...validation import annotations_of, build, validate
from ..metrics import Answer
from ..tasks.task import Example, Task

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ...engine import RetainingHeads

T = TypeVar("T")
RANDOM_HEADS = "random-heads"
"""The policy `locret` with untrained heads."""
UNTRAINED = "untrained"
"""Name of untrained heads in rows."""
ORACLES = {"kvzip": False, "kvzip(joint=true)": True}
"""Unbounded oracles, see `oracle`: whether heads and layers share the slots among them."""


@dataclass
class Setup:
    """The backbone, the heads and the cache settings of a run."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    name: str
    """The backbone, as it was named."""
    settings_for: Callable[[Variant, int | None], Resolved]
    """Settings of a variant's cache for a prompt of n tokens (None if unknown). The heads' settings are scaled to the
    variant's budget; `full` keeps their own budget."""
    heads: dict[str, RetainingHeads] = field(default_factory=dict)
    """Heads by the name that rows give them: a checkpoint's, or 'untrained'."""
    hashes: dict[str, str] = field(default_factory=dict)
    """Hashes of the heads' weights, see `provenance.weights_hash`."""
    adapter: str | None = None
    """PEFT adapter on the backbone, as it was named."""
    chat: str = "auto"
    ending: str = "infinitebench"
    seed: int = 0
    max_new_tokens: int | None = None
    """Answer tokens of every task; None takes each task's own."""
    max_thought_tokens: int = 2048


@dataclass(frozen=True)
class Variant:
    """One column of the comparison."""

    policy: str
    heads: str
    budget: int | float
    """Slots, or a share of the prompt; 0 for `full`."""

    def key(self, example: Example) -> tuple[str | int | float, ...]:
        """The key of an example's row, see `KEY`."""
        task = example.task
        return task.name, task.haystack, example.length, self.budget, self.policy, self.heads, example.sample


def grouped(items: Iterable[T], key: Callable[[T], tuple]) -> dict[tuple, list[T]]:
    """The items by what ``key`` says of them, in their order."""
    groups: dict[tuple, list[T]] = defaultdict(list)
    for item in items:
        groups[key(item)].append(item)
    return groups


@dataclass
class Run:
    """Everything that `runner.answer` does."""

    setup: Setup
    tasks: list[Task]
    variants: list[Variant]
    lengths: list[int]
    samples: int
    out: Path
    keep: int = 0
    """Store the kept tokens after the prompt for the first n examples of each task."""
    share_prefix: bool = True
    """Read what prompts about one document have in common once, see `measure.SharedBeginning`."""
    rank: int = 0
    world_size: int = 1

    def batches(self) -> list[list[Example]]:
        """All examples, in the same order in every process: those of a task that begin alike together, the others one by
        one, first numbers of every task and length first."""

        def beginning(example: Example) -> tuple[str, str, int, int]:
            task, alike = example.task, self.share_prefix and example.task.begins_alike
            return task.name, task.haystack, example.length, -1 if alike else example.sample

        return list(grouped(self.examples(), beginning).values())

    def row_keys(self) -> Iterator[tuple[str | int | float, ...]]:
        """Keys of all rows."""
        return (variant.key(example) for example in self.examples() for variant in self.variants)

    def examples(self) -> Iterator[Example]:
        """All examples, before they are made: first numbers of every task and length first."""
        setup = self.setup
        for sample in range(self.samples):
            for length in dict.fromkeys(self.lengths):
                for task in self.tasks:
                    if task.size is None or sample < task.size:
                        yield Example(task, setup.tokenizer, length, sample, setup.seed, setup.chat, setup.ending)


BM25 = "bm25"
"""The policy that reads the best passages of a prompt with full attention, see `bm25`."""


def reads_alone(policy: str) -> bool:
    """Whether a policy exists only in evaluations, as an oracle or `BM25`: it reads the whole prompt first."""
    return policy == BM25 or is_oracle(policy)


def is_oracle(policy: str) -> bool:
    """Whether a policy is one of `ORACLES`.

    Raises:
        ValueError: an oracle with other parameters.
    """
    if policy not in ORACLES and policy.split("(")[0].strip() == "kvzip":
        raise ValueError(f"policy={policy} must be one of: {', '.join(ORACLES)}")
    return policy in ORACLES


def variants(
    policies: list[str], budgets: Sequence[int | float], heads: list[str], kv_bits: int | str | None = None
) -> list[Variant]:
    """Policies by budgets, in the order given; policies that need heads once for each checkpoint.

    Raises:
        ValueError: an unknown policy, one that needs heads where there are none, or whose slots cannot be stored in ``kv_bits``
            bits.
    """
    from ...engine import BoundedCache
    from ...policies.grammar import parse_policy

    columns = []
    for policy in policies:
        if policy == RANDOM_HEADS:
            names = [UNTRAINED]
        elif reads_alone(policy):
            names = ["-"]
        else:
            BoundedCache.check_storage(kv_bits, parsed := parse_policy(policy))
            names = parsed.heads_for(heads or None, "give ckpt=PATH_OR_REPO") or ["-"]
            if parsed.keeps_everything:
                columns += [Variant(policy, name, 0) for name in names]
                continue
        columns += [Variant(policy, name, budget) for name in names for budget in budgets]
    return list(dict.fromkeys(columns))


KEY = ("task", "haystack", "length", "budget", "policy", "heads", "sample")
"""Fields that tell examples apart; no two rows of a run have the same."""
_RUN = tuple(item.name for item in fields(RunSettings) if item.name != "backend")
SETTINGS = ("model", "heads_hash", "adapter", "dtype", *_RUN, "ending", "metric")
"""Fields that must not differ among the examples of one cell of a table."""
SCHEDULED = ("chunk", "stabilizers", "local_len")
"""Schedule settings without a meaning for some rows: full attention has none, the chunk of a one-shot cache is its
prompt, and a budget given as a share differs between prompts."""
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
    """Policy as given on the command line, such as 'locret' or 'streaming(sinks=8)'; 'random-heads' is untrained locret."""
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
    """Text that the model wrote, without its thought; '' for perplexity tasks."""
    thought: str = ""
    """The thought before it."""
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
            said = f"ValueError: no JSON: score={self.score}, scores={self.scores}, answer={self.answer}"[:300]
            return replace(self, score=None, scores={}, answer=str(self.answer), error=self.error or said)

    @classmethod
    def from_dict(cls, record: object) -> Row:
        """A row of a file. Fields that it lacks have their defaults, so that files of other versions are read; unknown ones are
        left aside.

        Raises:
            ValueError: no JSON object, one of `KEY` is missing, or a field of another type (NaN included); names it.
        """
        record = as_object(record, "a row")
        missing = [name for name in KEY if name not in record]
        if missing:
            raise ValueError(f"a row needs {', '.join(KEY)}; it lacks {', '.join(missing)}")
        kinds = {name: kind for name, kind in annotations_of(Row).items() if name in record}
        return build(cls, {name: validate(name, kind, record[name]) for name, kind in kinds.items()})


def label_of(policy: str, heads: str) -> str:
    """The policy with its heads, or the kind of an unbounded baseline."""
    if policy in ORACLES:
        return f"{policy} (unbounded oracle)"
    return policy if heads in ("-", UNTRAINED) else f"{policy} ({heads})"


def read_rows(source: str | Path | Iterable[Path]) -> list[Row]:
    """Rows of a run's folder, or of files, sorted by `KEY`. Of duplicates the one with a score wins, then the one
    with the later `date`. Half a line at the end of a file is skipped.

    Raises:
        FileNotFoundError: no such file, or a folder without rows.
        ValueError: a broken line elsewhere, by file and line; or rows of one cell that differ in one of `SETTINGS`.
    """
    paths = list(source) if not isinstance(source, str | Path) else [Path(source)]
    if isinstance(source, str | Path) and not paths[0].is_file():
        paths = sorted(paths[0].glob("rows.*.jsonl"))
        if not paths:
            raise FileNotFoundError(f"out={source} holds no rows (rows.*.jsonl)")
    return distinct([row for path in paths for row in _read_file(path)])


def distinct(every: Sequence[Row]) -> list[Row]:
    """The rows sorted by `KEY`; of duplicates the one with a score, then the one with the later `date`.

    Raises:
        ValueError: rows of one cell differ in one of `SETTINGS`.
    """
    check_cells(every)
    rows = {row.key: row for row in sorted(every, key=lambda row: (row.error is None, row.date))}
    return [rows[key] for key in sorted(rows)]


def check_cells(rows: Iterable[Row]) -> None:
    """Raise ValueError where rows that a table would average differ in more than their number; names cell and setting."""
    first: dict[tuple[Key, str], object] = {}
    for row in rows:
        for name in (*SETTINGS, "text_hash") if row.error is None else ():
            value = getattr(row, name)
            by_prompt = row.one_shot or not row.budget or isinstance(row.budget, float)
            unset = not value if name in RECORDED else name in SCHEDULED and by_prompt
            if unset:
                continue
            shared = row.key[: len(COLUMN)] if name == "text_hash" else row.key[:-1]
            if first.setdefault((shared, name), value) != value:
                raise ValueError(
                    f"rows of {row.task}, {row.haystack}, length={row.length}, policy={row.policy}, budget={row.budget} "
                    f"have {name}={first[shared, name]} and {name}={value}: one table cannot hold both"
                )


def _read_file(path: Path) -> Iterator[Row]:
    *whole, _ = path.read_bytes().split(b"\n")
    for number, line in enumerate(whole, 1):
        if line.strip():
            with prefixed_errors(f"{path}, line {number}", ValueError, RecursionError):
                yield Row.from_dict(json.loads(line))


@contextmanager
def appending(path: Path) -> Iterator[Callable[[Row], None]]:
    """A function that appends a row to a file, which is held for this process alone.

    The whole line is on the disk when it returns; on an error (a full disk) none of it is in the file.

    Raises:
        OSError: the file cannot be opened or written, or another process is writing to it; names the file and the reason.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    busy = f"{path} is being written by another process"
    with locked(path.with_name(f".{path.name}.lock"), busy), path.open("ab", buffering=0) as file:
        file.truncate(path.read_bytes().rfind(b"\n") + 1)  # a kill leaves at most half a line

        def append(row: Row) -> None:
            # Half a surrogate pair as JSON's own escape.
            line = (row.to_json() + "\n").encode("utf-8", "backslashreplace")
            size = os.fstat(file.fileno()).st_size
            try:
                while line:
                    line = line[file.write(line) :]
                os.fsync(file.fileno())
            except OSError as error:
                file.truncate(size)
                reason = f"{error.strerror}; finished examples are safe, run again to go on"
                raise OSError(f"cannot write {path}: {reason}") from error

        yield append
