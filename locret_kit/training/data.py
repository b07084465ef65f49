"""Training samples by index: sample ``i`` is a function of the configuration and ``i`` alone, so a run resumes anywhere."""

from __future__ import annotations

import random
from typing import Any

import lightning as L
from torch.utils.data import DataLoader, Dataset

from ..samples.chat import Sample, encode_chat
from ..samples.records import read_records, to_messages
from ..samples.synthetic import synthetic_sample
from ..samples.text import load_text


class SampleStream(Dataset):
    """Samples ``start .. start + length`` of the mixture that ``data`` (the configuration's section) describes."""

    def __init__(self, data: Any, tokenizer: Any, *, seed: int, start: int, length: int) -> None:
        self.data, self.tokenizer, self.seed, self.start, self.length = data, tokenizer, seed, start, length
        self.texts = [load_text(source) for source in data.texts] if "synthetic" in data.sources else []
        self.records = {s: list(read_records(s, split=data.split)) for s in data.sources if s != "synthetic"}
        if empty := [source for source, records in self.records.items() if not records]:
            raise ValueError(f"data.sources: {empty[0]!r} holds no records")

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, offset: int) -> Sample:
        index = self.start + offset
        rng = random.Random(f"{self.seed}:{index}")
        source = rng.choices(list(self.data.sources), weights=self.data.weights or None)[0]
        if source == "synthetic":
            return synthetic_sample(
                self.tokenizer, self.texts, self.data.max_tokens, self.seed, index, self.data.repetitive
            )
        record = rng.choice(self.records[source])
        questions = len(record["instructions"]) if isinstance(record.get("instructions"), list) else 1
        messages = to_messages(record, index=rng.randrange(questions))
        return encode_chat(self.tokenizer, messages, max_tokens=self.data.max_tokens)


class SampleModule(L.LightningDataModule):
    """One sample a batch; training resumes at the sample after the last optimiser step."""

    def __init__(self, data: Any, tokenizer: Any, *, seed: int, steps: int, accumulate: int) -> None:
        super().__init__()
        self.cfg, self.tokenizer, self.seed = data, tokenizer, seed
        self.total, self.accumulate = steps * accumulate, accumulate

    def train_dataloader(self) -> DataLoader:
        done = self.trainer.global_step * self.accumulate if self.trainer else 0
        stream = SampleStream(self.cfg, self.tokenizer, seed=self.seed, start=done, length=max(1, self.total - done))
        return DataLoader(stream, batch_size=None, shuffle=False)

    def val_dataloader(self) -> DataLoader:
        stream = SampleStream(self.cfg, self.tokenizer, seed=self.seed + 10_000, start=0, length=self.cfg.val_samples)
        return DataLoader(stream, batch_size=None, shuffle=False)
