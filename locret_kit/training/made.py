"""Sources of training samples that are made: facts hidden in texts, questions about code, questions that the backbone writes."""

import random
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Generic, Self, TypeVar

from annotated_types import Ge
from transformers import PreTrainedTokenizerBase

from ..config.train_options import DataConfig
from ..naming import first_line, prefixed_errors
from ..policies.registry import part
from ..samples import Sample, overlap
from ..samples.code import WORDINGS, CodeFile, code_sample, read_code
from ..samples.haystack import load_text, next_start
from ..samples.study import Studied, Write, study, study_sample
from ..samples.synthetic import TRAINING, VALIDATION, Wording, synthetic_sample

DRAWS = 100
"""Records in a row, and synthetic samples, that cannot be used and end a run at its beginning."""
STRETCH = 0.1
"""Part of each real text that is set aside."""
CHARACTERS = 4
"""Characters of a token, about."""


M = TypeVar("M")


class Made(ABC, Generic[M]):
    """A source whose samples are made, each once, so there are no epochs.

    In the place of a sample that does not fit its length another one is made, and stderr names it.

    Attributes:
        name: the source in messages. trained: what training samples are made of.
    """

    name: str
    trained: M

    def open(self, data: DataConfig, tokenizer: PreTrainedTokenizerBase, seed: int, write: Write) -> Self:
        """The source with a run's settings. Raises ValueError where what it reads is not there."""
        self.data, self.tokenizer, self.seed, self.write = data, tokenizer, seed, write
        self._named = set[str]()
        self.load()
        return self

    @abstractmethod
    def load(self) -> None:
        """Read what is trained on, and set the name."""

    @abstractmethod
    def set_aside(self, wanted: int, seed: str) -> tuple[M, Sequence[str]]:
        """Take a part away from what is trained on, for ``wanted`` samples; and its texts."""

    @abstractmethod
    def build(self, material: M, place: int, seed: str, length: int) -> Sample:
        """A sample of a part, of a length in tokens. Raises ValueError where it does not fit."""

    @abstractmethod
    def leave_out(self, known: overlap.Grams) -> None:
        """Train on nothing that has these 13-grams. Raises ValueError where nothing is left."""

    def hold(self, wanted: int, known: overlap.Grams) -> tuple[list[Sample], overlap.Grams]:
        """Set texts aside, and return ``wanted`` samples of them, and ``known`` with their 13-grams added."""
        seed = f"{self.seed}:validation"
        held, texts = self.set_aside(wanted, seed)
        return [self._make(i, seed, held) for i in range(wanted)], overlap.union([known, *map(overlap.grams, texts)])

    def __getitem__(self, place: int) -> Sample:
        """Training sample number ``place``."""
        return self._make(place, f"{self.seed}", self.trained)

    def _make(self, place: int, seed: str, material: M) -> Sample:
        """The first sample that can be built with a seed and a length in tokens, which are drawn for the place."""
        reason = ""
        for draw in range(DRAWS):
            again = f"{seed}:{draw}" if draw else seed
            length = random.Random(f"{again}|length|{place}").choice(self.data.lengths or [self.data.max_tokens])
            try:
                sample = self.build(material, place, again, length)
            except ValueError as error:
                reason = reason or first_line(error)
                continue
            if reason and (said := f"record {place} is left out: {reason}") not in self._named:
                self._named.add(said)
                print(f"{self.where}, {said}", file=sys.stderr)
            return sample
        data = self.data
        sizes = f"{data.lengths=}" if data.lengths else f"{data.max_tokens=}"
        raise ValueError(f"{sizes} is too small for {self.name} samples: {reason}")

    def _split(self, text: str, where: str, seed: str) -> tuple[str, str]:
        """A stretch to set aside, and the rest. Raises ValueError where one of them would be empty."""
        stretch, rest = split_text(text, CHARACTERS * self.data.max_tokens, random.Random(seed))
        if not (stretch.strip() and rest.strip()):
            setting = f"data.val_samples={self.data.val_samples}"
            raise ValueError(f"{where} is too short, or one line, for {setting} to set some aside")
        return stretch, rest

    @property
    def where(self) -> str:
        """The source in an error's first words."""
        return f"data.sources: {self.name!r}"

    def _nothing_left(self) -> ValueError:
        return ValueError(f"{self.where} has nothing left to train on but copies of set-aside texts")


@part("source", "synthetic")
@dataclass
class Synthetic(Made[tuple[list[str], Wording]]):
    """Facts that are hidden in ``data.texts``.

    A stretch of each text is set aside, and the other texts lose every 13-gram that they share with it. Facts, prompts and
    repeated sentences of validation are its own.
    """

    def load(self) -> None:
        self.name = "synthetic"
        with prefixed_errors("data.texts", OSError, ValueError):
            self.texts = [load_text(source) for source in self.data.texts]
        """Texts that are trained on."""
        self.trained = self.texts, TRAINING

    def set_aside(self, wanted: int, seed: str) -> tuple[tuple[list[str], Wording], Sequence[str]]:
        stretches = []
        for i, source in enumerate(self.data.texts):
            stretch, self.texts[i] = self._split(self.texts[i], f"data.texts: {source!r}", f"{seed}:{i}")
            stretches.append(stretch)
        return (stretches, VALIDATION), stretches

    def build(self, material: tuple[list[str], Wording], place: int, seed: str, length: int) -> Sample:
        texts, wording = material
        return synthetic_sample(self.tokenizer, texts, length, seed, place, wording)

    def leave_out(self, known: overlap.Grams) -> None:
        self.texts[:] = (overlap.without(text, known) for text in self.texts)
        for source, text in zip(self.data.texts, self.texts, strict=True):
            if not text.strip():
                raise ValueError(
                    f"data.texts: {source!r} has nothing left to train on: data.val_samples={self.data.val_samples} sets a "
                    "stretch aside that the rest repeats"
                )


@part("source", "code")
@dataclass
class Code(Made[list[CodeFile]]):
    """Questions about the Python files of a folder (``samples.code``). A tenth of the files is set aside."""

    folder: str = "python"
    """The folder; 'python' is the standard library of the running Python."""

    def load(self) -> None:
        self.name = f"code({self.folder})"
        with prefixed_errors("data.sources", OSError, ValueError):
            self.trained = read_code(self.folder, WORDINGS)

    def set_aside(self, wanted: int, seed: str) -> tuple[list[CodeFile], Sequence[str]]:
        held = random.Random(seed).sample(self.trained, max(1, round(STRETCH * len(self.trained))))
        self.trained = [file for file in self.trained if file not in held]
        if not self.trained:
            setting = f"data.val_samples={self.data.val_samples}"
            raise ValueError(f"{self.where} has one file with questions; {setting} sets it aside")
        return held, ["\n".join(file.lines) for file in held]

    def build(self, material: list[CodeFile], place: int, seed: str, length: int) -> Sample:
        return code_sample(self.tokenizer, material, length, random.Random(f"{seed}|{place}"))

    def leave_out(self, known: overlap.Grams) -> None:
        self.trained = [file for file in self.trained if not overlap.is_copy("\n".join(file.lines), known)]
        if not self.trained:
            raise self._nothing_left()


@part("source", "self-study")
@dataclass
class SelfStudy(Made[tuple[str, list[Studied]]]):
    """Questions that the backbone itself writes about passages of a text (``samples.study``). A stretch of it is set aside."""

    text: str
    """'pydoc', 'jargon', a file or a folder."""
    passages: Annotated[int, Ge(1)] = 128
    """Passages that it writes about, at most."""

    def load(self) -> None:
        self.name = f"self-study({self.text})"
        with prefixed_errors("data.sources", OSError, ValueError):
            self.left = load_text(self.text)
        """Text that is trained on."""

    def set_aside(self, wanted: int, seed: str) -> tuple[tuple[str, list[Studied]], Sequence[str]]:
        stretch, self.left = self._split(self.left, self.where, seed)
        return self._studied(stretch, 2 * wanted, seed), [stretch]

    @cached_property
    def trained(self) -> tuple[str, list[Studied]]:  # type: ignore[override]
        return self._studied(self.left, self.passages, f"{self.seed}")

    def _studied(self, text: str, passages: int, seed: str) -> tuple[str, list[Studied]]:
        """The text, and what the backbone wrote about it. Raises ValueError where nothing of it can be used."""
        if found := study(text, passages, random.Random(f"{seed}:study"), self.write):
            return text, found
        raise ValueError(f"{self.where}: the backbone wrote no usable question about any of {passages} passages")

    def build(self, material: tuple[str, list[Studied]], place: int, seed: str, length: int) -> Sample:
        return study_sample(self.tokenizer, *material, length, random.Random(f"{seed}|{place}"))

    def leave_out(self, known: overlap.Grams) -> None:
        self.left = overlap.without(self.left, known)
        if not self.left.strip():
            raise self._nothing_left()


def nobody(asked: Sequence[tuple[str, str]]) -> list[str]:
    """Raise ValueError: these samples are made without a backbone."""
    raise ValueError("data.sources: self-study needs a backbone that writes")


def split_text(text: str, least: int, rng: random.Random) -> tuple[str, str]:
    """Split a text into ``(stretch, rest)``. The stretch is a tenth of the text, or ``least`` characters if that is
    more, but at most half. It begins and ends at the start of a line or sentence; without such a start, one part is
    empty."""
    size = min(len(text) // 2, max(int(STRETCH * len(text)), least))
    start = next_start(text, rng.randrange(len(text) - size))
    end = next_start(text, start + size) if start + size < len(text) else 0
    before, after = text[:start].rstrip(), text[end:] if end else ""
    return text[start : end or None], "\n".join(part for part in (before, after) if part)
