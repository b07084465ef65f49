"""Training samples by index: sample ``i`` is a function of the configuration and ``i`` alone, so a run resumes anywhere."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from itertools import count
from typing import cast

import lightning as L
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info
from transformers import PreTrainedTokenizerBase

from ..config.train import DataConfig
from ..naming import first_line
from ..samples.chat import Sample, encode_chat
from ..samples.records import read_records, to_messages
from ..samples.synthetic import synthetic_sample
from ..samples.text import load_text

DRAWS = 100
"""Records in a row, and synthetic samples, that cannot be used and end a run."""


class Samples:
    """The mixture that ``data`` (the configuration's section) describes; any index from 0.

    Where a record or a synthetic sample cannot be used, another is drawn, and stderr names it once with the reason. Lines
    that are no records are left out, and counted on stderr.

    Raises:
        ValueError: a source without records, or one that gave nothing usable in ``DRAWS`` draws (at once where it has none).
    """

    def __init__(self, data: DataConfig, tokenizer: PreTrainedTokenizerBase, *, seed: int) -> None:
        self.data, self.tokenizer, self.seed = data, tokenizer, seed
        self._refused: dict[tuple[str, int, int], str] = {}  # by source, record and question
        self._named: set[tuple[str, int]] = set()
        self.records = {source: self._read(source) for source in data.sources if source != "synthetic"}
        for source in self.records:
            self._draw(source, random.Random(f"{seed}:{source}"))
        self.texts = [load_text(source) for source in data.texts] if "synthetic" in data.sources else []
        if "synthetic" in data.sources:
            self._synthetic(0)

    def __getitem__(self, index: int) -> Sample:
        rng = random.Random(f"{self.seed}:{index}")
        source = rng.choices(list(self.data.sources), weights=self.data.weights or None)[0]
        return self._synthetic(index) if source == "synthetic" else self._draw(source, rng)

    def _read(self, source: str) -> list[dict]:
        broken: list[str] = []
        records = list(read_records(source, split=self.data.split, broken=broken.append))
        if broken:
            lines = "1 line is" if len(broken) == 1 else f"{len(broken)} lines are"
            print(f"data.sources: {source!r}: {lines} left out, the first since {broken[0]}", file=sys.stderr)
        if not records:
            raise ValueError(f"data.sources: {source!r} holds no records")
        return records

    def _synthetic(self, index: int) -> Sample:
        """Sample ``index``, or where its question and facts are too long for ``max_tokens`` another that ``index`` decides."""
        data, reason = self.data, ""
        for draw in range(DRAWS):
            seed = f"{self.seed}:{draw}" if draw else self.seed
            try:
                sample = synthetic_sample(self.tokenizer, self.texts, data.max_tokens, seed, index, data.repetitive)
            except ValueError as error:
                reason = reason or first_line(error)
            else:
                self._name("synthetic", {index: reason} if reason else {})
                return sample
        raise ValueError(f"data.max_tokens={data.max_tokens} is too small for synthetic samples: {reason}")

    def _draw(self, source: str, rng: random.Random) -> Sample:
        """A usable record's sample; ``rng`` alone decides which."""
        records = self.records[source]
        refused: dict[int, str] = {}
        for _ in range(DRAWS):
            number = rng.randrange(len(records))
            asked = records[number].get("instructions")
            question = rng.randrange(max(1, len(asked) if isinstance(asked, list) else 1))
            key = source, number, question
            if key not in self._refused:
                try:
                    sample = self._encode(records[number], question)
                except ValueError as error:
                    self._refused[key] = first_line(error)
                else:
                    self._name(source, refused)
                    return sample
            refused[number] = self._refused[key]
        raise ValueError(
            f"data.sources: {source!r} has no usable record among {DRAWS} drawn; the last was record {number}: {refused[number]}"
        )

    def _encode(self, record: dict, question: int) -> Sample:
        messages = to_messages(record, index=question)
        sample = encode_chat(self.tokenizer, messages, max_tokens=self.data.max_tokens)
        if not sample.prompt_len:
            raise ValueError("nothing stands in front of its answer")
        return sample

    def _name(self, source: str, refused: dict[int, str]) -> None:
        for number, reason in refused.items():
            if (source, number) not in self._named:
                self._named.add((source, number))
                print(f"data.sources: {source!r}, record {number} is left out: {reason}", file=sys.stderr)


Step = list[list[Sample]]
"""One process's samples of one optimiser step, in batches of one forward each."""


class Share(IterableDataset):
    """One process's share of one common order, an optimiser step at a time, without end.

    A step takes the next ``world * per_step`` samples whatever the number of processes is, so a run goes on with another.
    Within a share, samples of like length share a batch of ``batch``. Loader workers take whole steps in turn.

    Args:
        start: index of the first sample. per_step: samples of each process in one step, a multiple of ``batch``.
    """

    def __init__(
        self, samples: Samples, start: int, rank: int = 0, world: int = 1, per_step: int = 1, batch: int = 1
    ) -> None:
        self.samples, self.start, self.rank, self.world = samples, start, rank, world
        self.per_step, self.batch = per_step, batch

    def __iter__(self) -> Iterator[Step]:
        worker = get_worker_info()
        first, every = (worker.id, worker.num_workers) if worker else (0, 1)
        return (self.step(number) for number in count(first, every))

    def step(self, number: int) -> Step:
        """The share of step ``number``, counted from ``start``."""
        first = self.start + number * self.world * self.per_step + self.rank
        taken = [self.samples[first + i * self.world] for i in range(self.per_step)]
        if self.batch > 1:
            taken.sort(key=lambda sample: len(sample.ids))
        return [taken[i : i + self.batch] for i in range(0, self.per_step, self.batch)]


class SampleModule(L.LightningDataModule):
    """An optimiser step an item. ``done`` counts the samples of whole steps, over all processes and resumed runs: step
    ``s`` of a given global batch sees the same samples on one process or many.

    Args:
        data: the configuration's section. per_step: samples of each process in one step.
    """

    def __init__(self, data: DataConfig, tokenizer: PreTrainedTokenizerBase, *, seed: int, per_step: int = 1) -> None:
        super().__init__()
        if data.num_workers > (most := 4 * (os.cpu_count() or 1)):
            raise ValueError(f"data.num_workers={data.num_workers} must be at most {most}, four per CPU core")
        self.cfg, self.tokenizer, self.seed, self.per_step = data, tokenizer, seed, per_step
        self.done = 0

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.done = state_dict["done"]

    def train_dataloader(self) -> DataLoader:
        rank, world = (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)
        samples = Samples(self.cfg, self.tokenizer, seed=self.seed)
        share = Share(samples, self.done, rank, world, self.per_step, self.cfg.batch)
        return DataLoader(share, batch_size=None, num_workers=self.cfg.num_workers)

    def val_dataloader(self) -> DataLoader:
        samples = Samples(self.cfg, self.tokenizer, seed=self.seed + 10_000)
        held = [samples[i] for i in range(self.cfg.val_samples)]  # the same in every process
        return DataLoader(cast("Dataset[Sample]", held), batch_size=None, shuffle=False)
