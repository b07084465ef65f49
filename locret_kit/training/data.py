"""Training samples by index. Sample ``i`` depends only on the configuration and ``i``, so a run resumes anywhere.

The validation data of each source is set aside first. The rest is trained on.
"""

import atexit
import os
import random
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from fractions import Fraction
from hashlib import sha256
from itertools import chain, count, islice
from multiprocessing import active_children
from pathlib import Path
from typing import Any, TypeVar, cast

import lightning as L
import torch
from torch.utils.data import DataLoader, Dataset
from transformers import PreTrainedTokenizerBase

from ..config.train_options import DataConfig
from ..naming import first_line, nearest
from ..policies import rounded
from ..policies.grammar import parse_source
from ..policies.registry import parts_named
from ..samples import Sample, encode_chat, overlap
from ..samples.haystack import TEXTS
from ..samples.records import SCHEMAS, WHOLE, has_splits, is_unknown, read_records, to_messages
from ..samples.study import Write
from .made import DRAWS, Code, Made, SelfStudy, nobody

BLOCK = 512
"""Records that are held at a time of a source that is not held whole."""
HELD, MIXED = "set_aside", "mixed"
"""Keys of a state: hash of what is set aside, and whether some of it may have been trained on."""
Held = tuple[list[tuple[int, Sample]], overlap.Grams]
"""Set-aside records by number with their samples, and the 13-grams that are known then."""


class Records:
    """Records in whole epochs, each epoch in a new order. A record with several questions asks the next one in each
    epoch.

    Local files of up to ``WHOLE`` bytes are held in memory. Larger files and Hub data sets are read in blocks of
    ``BLOCK`` records as needed, and shuffled within a block. Their validation records come from the first block.

    One record is set aside per validation sample. Records that share more than half of their 13-grams with the
    set-aside ones, such as other questions about the same document, are not trained on; stderr has their number. Where
    that leaves less than half of the records, all questions about a text are set aside before the next text is. An
    unusable record is replaced by another draw and named once on stderr. Invalid lines are skipped and counted on stderr.

    Args:
        name: an argument of ``read_records``. seed: seed of the orders.

    Raises:
        ValueError: no records, or ``DRAWS`` unusable records in a row in place of the first sample.
    """

    def __init__(self, name: str, data: DataConfig, tokenizer: PreTrainedTokenizerBase, seed: str) -> None:
        self.name, self.data, self.tokenizer, self.seed = name, data, tokenizer, seed
        self._refused: dict[tuple[int, int], str] = {}  # by record and question
        self._named: set[int | str] = set()
        self._broken: list[str] = []
        self._known = overlap.union([])
        self._held: list[int] = []
        """Numbers of the set-aside records."""
        self._wanted = 0
        self._spare: list[int] = []
        """A record of the first block that can be used, once there is one: no later place ends a run."""
        files = [file for file in (Path(name), *Path(name).rglob("*")) if file.is_file()]
        small = files and sum(file.stat().st_size for file in files) <= WHOLE  # what is on the Hub is not known to be
        self._size = None if small else BLOCK + data.val_samples
        """Most records of a block; None is all."""
        self._first = self._read(self._rows())
        if not self._first:
            raise ValueError(f"data.sources: {name!r} holds no records")
        if len(self._first) == self._size:
            said = f"{self._size} records are read at a time, as steps need them, and shuffled; the first {self._size} have those"
            print(f"data.sources: {name!r} is streamed: {said} to validate on", file=sys.stderr)
        self._kept = list(range(len(self._first)))
        self._enter(0, 0)
        self[0]

    def _rows(self, start: int = 0) -> Iterator[dict]:
        """The records from ``start`` on."""
        try:
            yield from islice(read_records(self.name, split=self.data.split, broken=self._broken.append), start, None)
        except (OSError, ValueError) as error:
            path, meant = Path(self.name), nearest(self.name, parts_named("source"))
            if any(file.name.endswith(TEXTS) for file in (path, *path.glob("*"))):
                meant = "; text without questions goes to data.texts"
            raise ValueError(f"data.sources: {first_line(error)}{meant}") from error

    def _read(self, rows: Iterator[dict]) -> list[dict]:
        """The next block. Lines among it that are no records are counted, once."""
        block = list(islice(rows, self._size))
        broken = [line for line in self._broken if line not in self._named]
        self._broken.clear()
        self._named.update(broken)
        if broken:
            lines = "1 line is" if len(broken) == 1 else f"{len(broken)} lines are"
            print(f"data.sources: {self.name!r}: {lines} left out, the first since {broken[0]}", file=sys.stderr)
        return block

    def _enter(self, epoch: int, place: int, block: Sequence[dict] = (), number: int = 0) -> None:
        """Hold block ``number`` of an epoch, whose first sample has this place."""
        start = number * len(self._first)
        self._epoch, self._place, self._number, self._order = epoch, place, number, list[int]()
        self.records = dict(enumerate(self._first)) | dict(enumerate(block, start))
        self.trained = self._unlike(range(start, start + len(block)), self._known) if block else self._kept
        """Numbers of the block's records that are trained on."""

    def _unlike(self, numbers: Iterable[int], known: overlap.Grams) -> list[int]:
        """The records that share at most half of their grams with ``known``."""
        return [n for n in numbers if not overlap.is_copy(text_of(self.records[n]), known)]

    def _with(self, number: int, known: overlap.Grams) -> overlap.Grams:
        """The ``known`` grams and those of a record."""
        return overlap.union([known, overlap.grams(text_of(self.records[number]))])

    def _go(self, place: int) -> None:
        """Load the block that contains a place."""
        if place < self._place:
            self._enter(0, 0)
        while place >= (end := self._place + len(self.trained)):
            if not self._number:  # not before: a loader's processes each read their own
                self._rest = self._rows(len(self._first)) if len(self._first) == self._size else iter(())
            if block := self._read(self._rest):
                self._enter(self._epoch, end, block, self._number + 1)
            else:
                self._enter(self._epoch + 1, end)

    def hold(self, wanted: int, known: overlap.Grams) -> tuple[list[Sample], overlap.Grams]:
        """Set ``wanted`` samples aside for validation. Returns them, and ``known`` with their 13-grams added.

        Raises:
            ValueError: too few samples.
        """
        self._wanted = wanted
        numbers = self._shuffled("validation")
        held, grams = self._one_of_each_text(numbers, wanted, known)
        some = numbers[:DRAWS]
        if len(held) < wanted or 2 * len(self._unlike(some, grams)) < len(some):
            held, grams = self._text_by_text(numbers, wanted, known)
        if len(held) < wanted:
            raise self._too_many(len(held))
        self._held = list(dict.fromkeys(number for number, _ in held))
        return [sample for _, sample in held], grams

    def _one_of_each_text(self, numbers: Sequence[int], wanted: int, known: overlap.Grams) -> Held:
        """Records whose texts are not known, with their samples."""
        held: list[tuple[int, Sample]] = []
        for number in numbers:
            if len(held) == wanted:
                break
            if self._unlike([number], known):
                with suppress(ValueError):
                    held.append((number, self._encode(number, 0)))
                    known = self._with(number, known)
        return held, known

    def _text_by_text(self, numbers: Sequence[int], wanted: int, known: overlap.Grams) -> Held:
        """All questions about a text, then those about the next, while a usable record about another is left."""
        held: list[tuple[int, Sample]] = []
        left, alike = [n for n in self._unlike(numbers, known) if any(True for _ in self._asked(n))], list[int]()
        while (alike or left) and len(held) < wanted:
            number = (alike or left)[0]
            grams = self._with(number, known)
            unlike = [n for n in self._unlike(left, grams) if n != number]
            if not unlike:
                break
            alike = [n for n in (*alike, *left) if n != number and n not in unlike]
            left, known = unlike, grams
            held += [(number, sample) for sample in islice(self._asked(number), wanted - len(held))]
        return held, known

    def _asked(self, number: int) -> Iterator[Sample]:
        """A record's usable samples, one for each of its questions."""
        for epoch in range(self._questions(number)):
            with suppress(ValueError):
                yield self._encode(number, epoch)

    def leave_out(self, known: overlap.Grams) -> None:
        """Train on nothing that has these 13-grams. Raises ValueError where nothing is left."""
        self._known = known
        before, self._kept = self._kept, self._unlike(self._kept, known)
        if not self._kept:
            raise self._too_many(len(self._held) - 1)
        if left_out := len({*before} - {*self._kept, *self._held}):
            said = f"{left_out} of {len(before)} records are not trained on: validation has their text"
            print(f"data.sources: {self.name!r}: {said}", file=sys.stderr)
        self._spare = self._kept[:1]
        self._enter(0, 0)
        try:
            self[0]
        except ValueError as error:
            raise self._too_many(len(self._held) - 1) from error

    def _too_many(self, most: int) -> ValueError:
        numbers, known, texts = list(self.records)[:BLOCK], overlap.union([]), 0
        for number in numbers:
            if self._unlike([number], known):
                texts, known = texts + 1, self._with(number, known)
        among = f" of its first {self._size}" if len(self._first) == self._size else ""
        repeat = f"{len(numbers) - texts} of {len(numbers)} records repeat the text of others, and "
        return ValueError(
            f"data.val_samples={self.data.val_samples} sets {self._wanted} samples of {self.name!r} aside, where at most "
            f"{max(0, most)} can be{among}: {repeat if texts < len(numbers) else ''}a text is validated or trained on, and what "
            "cannot be used does not count. Add records about other texts, or lower data.val_samples; 0 trains on all"
        )

    def __getitem__(self, place: int) -> Sample:
        self._go(place)
        block = f":{self._number}" if self._number else ""
        self._order = self._order or self._shuffled(f"epoch {self._epoch}{block}")
        rng, refused = random.Random(f"{self.seed}:{place}"), dict[int, str]()
        drawn = (rng.choice(self.trained) for _ in range(DRAWS - 1))
        rest = chain(self.trained, self._spare) if self._spare else ()
        for number in chain([self._order[place - self._place]], drawn, rest):
            try:
                sample = self._encode(number, self._epoch)
            except ValueError as error:
                refused[number] = str(error)
                continue
            for bad in refused.keys() - self._named:
                self._named.add(bad)
                print(f"data.sources: {self.name!r}, record {bad} is left out: {refused[bad]}", file=sys.stderr)
            if not place:
                self._spare = [number]
            return sample
        last, unknown = next(reversed(refused)), any(map(is_unknown, refused.values()))
        raise ValueError(
            f"data.sources: {self.name!r} has no usable record among {len(refused)} drawn; the last was record {last}: "
            f"{refused[last]}" + (f"; known schemas: {'; '.join(SCHEMAS)}" if unknown else "")
        )

    def _shuffled(self, what: str) -> list[int]:
        """The block's records for training, in the order of an epoch or of the validation split."""
        return random.Random(f"{self.seed}:{what}").sample(self.trained, len(self.trained))

    def _encode(self, number: int, epoch: int) -> Sample:
        """A record's sample with the question of an epoch. Raises ValueError where it has none, with the reason."""
        record, questions = self.records[number], self._questions(number)
        question = (random.Random(f"{self.seed}:{number}").randrange(questions) + epoch) % questions
        if (number, question) in self._refused:
            raise ValueError(self._refused[number, question])
        try:
            messages = to_messages(record, index=question)
            sample = encode_chat(self.tokenizer, messages, max_tokens=self.data.max_tokens, cut=self.data.truncate)
            if not sample.prompt_len:
                raise ValueError("there is no text before its answer")
        except ValueError as error:
            self._refused[number, question] = first_line(error)
            raise ValueError(first_line(error)) from error
        return sample

    def _questions(self, number: int) -> int:
        """The number of a record's questions."""
        asked = self.records[number].get("instructions")
        return max(1, len(asked) if isinstance(asked, list) else 1)


def text_of(value: object) -> str:
    """Every text of a record, whatever its schema, in order, a line each."""
    return "\n".join(_texts(value))


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _texts(part)


T = TypeVar("T")


class Samples:
    """The mixture of sources in the configuration's section ``data``; any index from 0.

    ``held`` is the validation set. It is set aside before any training sample is drawn, from each source by its weight,
    and no source trains on similar data. The seed decides the source of an index. Samples within a source come in
    order.

    Raises:
        ValueError: a source without usable samples, or too many validation samples to set aside.
    """

    def __init__(
        self, data: DataConfig, tokenizer: PreTrainedTokenizerBase, *, seed: int, write: Write = nobody
    ) -> None:
        self.seed, self.weights = seed, data.weights or [1.0] * len(data.sources)
        self.sources: dict[str, Records | Made] = {}
        given = data, tokenizer, seed, write
        for name in data.sources:
            drawn = f"{seed}:{data.sources.index(name)}"  # not its path, which differs from machine to machine
            made = cast(Made | None, parse_source(name))
            self.sources[name] = made.open(*given) if made else Records(name, data, tokenizer, drawn)
        kinds = {type(one) for one in self.sources.values()}
        whole = not any(isinstance(one, Records) and has_splits(one.name) for one in self.sources.values())
        idle = {"texts": kinds <= {Records, Code, SelfStudy}, "lengths": kinds <= {Records}, "split": whole}
        for setting in filter(idle.get, idle):
            if (value := getattr(data, setting)) != getattr(DataConfig(), setting):
                print(f"warning: data.{setting}={value} has no effect on {data.sources=}", file=sys.stderr)
        self.names = list(data.sources)
        self._places: list[tuple[str, int]] = []  # source of each index so far, and how many before it are from there
        self._given = dict.fromkeys(self.names, 0)
        self.held: list[Sample] = []
        known = overlap.union([])
        if data.val_samples:
            for name, wanted in divided(data.val_samples, self.names, self.weights).items():
                if wanted:
                    samples, known = self.sources[name].hold(wanted, known)
                    self.held += samples
            for source in self.sources.values():
                source.leave_out(known)
        self.held_hash = sha256(known.tobytes()).hexdigest()[:16]
        """Hash of the 13-grams that are set aside. Not of samples, into which a template may write the day."""
        for source in self.sources.values():
            source[0]  # what it needs is made now, before training

    def __getitem__(self, index: int) -> Sample:
        for i in range(len(self._places), index + 1):
            (name,) = random.Random(f"{self.seed}:{i}").choices(self.names, self.weights)
            self._places.append((name, self._given[name]))
            self._given[name] += 1
        name, place = self._places[index]
        return self.sources[name][place]


def divided(samples: int, names: Sequence[str], weights: Sequence[float]) -> dict[str, int]:
    """Samples of each source by its weight; what rounding leaves goes to the largest remainders, the first of equal ones.

    >>> divided(8, ["a", "b", "c"], [2, 1, 1.5])
    {'a': 3, 'b': 2, 'c': 3}
    """
    shares = [samples * Fraction(weight) / sum(map(Fraction, weights)) for weight in weights]
    counts = dict.fromkeys(names, 0)
    for name, n in zip(names, rounded(shares, samples), strict=True):
        counts[name] += n
    return counts


Step = list[list[Sample]]
"""Samples of one process for one optimiser step, in batches of one forward each."""


def _leave_signals(worker: int) -> None:
    """Leave Ctrl-C and SIGTERM, which reach a whole group of processes, to the training: it stops after a step, and needs the
    samples of the next one until then."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def _end_workers() -> None:
    """End the processes that prepare samples when this one exits: it would wait for them, which leave SIGTERM, forever."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # PyTorch's handler raises for one that is killed
    for process in active_children():
        if process.daemon:  # others, which the program may have started, end by themselves
            process.kill()


class Share(Dataset[Step]):
    """One process's share of one common order, by the number of the optimiser step from ``start`` on, without end.

    A step takes the next ``world * per_step`` samples whatever the number of processes is, so a run goes on with another.
    Within a share, samples of like length share a batch of ``batch``.

    Args:
        start: index of the first sample. per_step: samples of each process in one step, a multiple of ``batch``.
    """

    def __init__(
        self, samples: Samples, start: int, rank: int = 0, world: int = 1, per_step: int = 1, batch: int = 1
    ) -> None:
        self.samples, self.start, self.rank, self.world = samples, start, rank, world
        self.per_step, self.batch = per_step, batch

    def __getitem__(self, number: int) -> Step:
        first = self.start + number * self.world * self.per_step + self.rank
        taken = [self.samples[first + i * self.world] for i in range(self.per_step)]
        if self.batch > 1:
            taken.sort(key=lambda sample: len(sample.ids))
        return [taken[i : i + self.batch] for i in range(0, self.per_step, self.batch)]


class SampleModule(L.LightningDataModule):
    """An optimiser step an item. ``done`` counts the samples of whole steps, over all processes and resumed runs: step
    ``s`` of a given global batch sees the same samples on one process or many.

    Args:
        data: the configuration's section. per_step: samples of each process in one step. write: the backbone, for
            samples that it writes itself.
    """

    def __init__(
        self,
        data: DataConfig,
        tokenizer: PreTrainedTokenizerBase,
        *,
        seed: int,
        per_step: int = 1,
        write: Write = nobody,
    ) -> None:
        super().__init__()
        if data.num_workers > (max_workers := 4 * (os.cpu_count() or 1)):
            raise ValueError(f"data.num_workers={data.num_workers} must be at most {max_workers}, four per CPU core")
        self.cfg, self.tokenizer, self.per_step = data, tokenizer, per_step
        self.samples = Samples(data, tokenizer, seed=seed, write=write)
        """Samples, equal in every process."""
        self.done, self.mixed = 0, False

    def transfer_batch_to_device(self, batch: T, device: torch.device, dataloader_idx: int) -> T:
        """Samples are integers; a step makes the tensor where it is needed."""
        return batch

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done, HELD: self.samples.held_hash, MIXED: self.mixed}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.done = state_dict["done"]
        held = self.samples.held_hash
        self.mixed = state_dict.get(MIXED, False) or state_dict.get(HELD, held) != held

    @property
    def set_aside(self) -> int:
        """Validation samples that no step has trained on; 0 once a run has gone on with others."""
        return 0 if self.mixed else self.cfg.val_samples

    def train_dataloader(self) -> DataLoader:
        rank, world = (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)
        share = Share(self.samples, self.done, rank, world, self.per_step, self.cfg.batch)
        if self.cfg.num_workers:
            atexit.register(_end_workers)
        return DataLoader(
            share, batch_size=None, sampler=count(), num_workers=self.cfg.num_workers, worker_init_fn=_leave_signals
        )

    def val_dataloader(self) -> DataLoader:
        return DataLoader(cast("Dataset[Sample]", self.samples.held), batch_size=None, shuffle=False)
