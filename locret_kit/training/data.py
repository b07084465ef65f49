"""Training samples by index: sample ``i`` is a function of the configuration and ``i`` alone, so a run resumes anywhere."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from itertools import count
from typing import TypeVar, cast

import lightning as L
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info
from transformers import PreTrainedTokenizerBase

from ..config.train_config import DataConfig
from ..samples import overlap
from ..samples.sample import Sample
from .sources import make_source

T = TypeVar("T")


class Samples:
    """The mixture that ``data`` (the configuration's section) describes; any index from 0.

    ``held`` is what is validated on. It is set aside before anything is drawn, from each source by its weight, and no source
    trains on what is like it. The seed decides which source an index is of; a source's own samples come in order of its places.

    Raises:
        ValueError: a source with nothing usable, or more samples for validation than can be set aside.
    """

    def __init__(self, data: DataConfig, tokenizer: PreTrainedTokenizerBase, *, seed: int) -> None:
        self.seed, self.weights = seed, data.weights or [1.0] * len(data.sources)
        self.sources = {name: make_source(name, data, tokenizer, seed) for name in data.sources}
        self.names = list(data.sources)
        self._places: list[tuple[str, int]] = []  # of the indexes so far
        self._given = dict.fromkeys(self.names, 0)
        self.held: list[Sample] = []
        if data.val_samples:
            known = overlap.union([])
            for name, wanted in divided(data.val_samples, self.names, self.weights).items():
                samples, known = self.sources[name].hold(wanted, known)
                self.held += samples
            for source in self.sources.values():
                source.leave_out(known)

    def __getitem__(self, index: int) -> Sample:
        name, place = self._place(index)
        return self.sources[name][place]

    def _place(self, index: int) -> tuple[str, int]:
        """The source of sample ``index``, and how many samples before it are from there."""
        for i in range(len(self._places), index + 1):
            (name,) = random.Random(f"{self.seed}:{i}").choices(self.names, self.weights)
            self._places.append((name, self._given[name]))
            self._given[name] += 1
        return self._places[index]


def divided(samples: int, names: Sequence[str], weights: Sequence[float]) -> dict[str, int]:
    """Samples of each source by its weight; what rounding leaves goes to the largest remainders, the first of equal ones.

    >>> divided(8, ["a", "b", "c"], [2, 1, 1.5])
    {'a': 3, 'b': 2, 'c': 3}
    """
    exact = [samples * weight / sum(weights) for weight in weights]
    whole = [int(share) for share in exact]
    for i in sorted(range(len(exact)), key=lambda i: whole[i] - exact[i])[: samples - sum(whole)]:
        whole[i] += 1
    counts = dict.fromkeys(names, 0)
    for name, n in zip(names, whole, strict=True):
        counts[name] += n
    return counts


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
        if data.num_workers > (max_workers := 4 * (os.cpu_count() or 1)):
            raise ValueError(f"data.num_workers={data.num_workers} must be at most {max_workers}, four per CPU core")
        self.cfg, self.tokenizer, self.per_step = data, tokenizer, per_step
        self.samples = Samples(data, tokenizer, seed=seed)
        """The same in every process."""
        self.done = 0

    def transfer_batch_to_device(self, batch: T, device: torch.device, dataloader_idx: int) -> T:
        """Samples are integers; a step makes the tensor where it is needed."""
        return batch

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.done = state_dict["done"]

    def train_dataloader(self) -> DataLoader:
        rank, world = (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)
        share = Share(self.samples, self.done, rank, world, self.per_step, self.cfg.batch)
        return DataLoader(share, batch_size=None, num_workers=self.cfg.num_workers)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(cast("Dataset[Sample]", self.samples.held), batch_size=None, shuffle=False)
