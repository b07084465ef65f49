"""Sources of training samples that are made: facts hidden in texts, questions about code, questions that the backbone writes."""

import random
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

from annotated_types import Ge
from transformers import PreTrainedTokenizerBase

from ..config.train_options import DataConfig
from ..naming import first_line, prefixed_errors
from ..policies.registry import part
from ..samples import Sample, overlap
from ..samples.code import CodeFile, code_sample, read_code
from ..samples.haystack import load_text, next_start
from ..samples.study import Studied, Write, study, study_sample
from ..samples.synthetic import TRAINING, VALIDATION, Wording, synthetic_sample

SYNTHETIC = "synthetic"
"""The source that is made of ``data.texts``."""
DRAWS = 100
"""Records in a row, and synthetic samples, that cannot be used and end a run at its beginning."""
STRETCH = 0.1
"""Part of each real text that is set aside."""
CHARACTERS = 4
"""Characters of a token, about."""


class Made(ABC):
    """A source whose samples are made, each once, so there are no epochs.

    In the place of a sample that does not fit its length another one is made, and stderr names it.
    """

    def __init__(self, name: str, data: DataConfig, tokenizer: PreTrainedTokenizerBase, seed: int) -> None:
        self.name, self.data, self.tokenizer, self.seed = name, data, tokenizer, seed
        self._named: set[str] = set()

    @abstractmethod
    def hold(self, wanted: int, known: overlap.Grams) -> tuple[list[Sample], overlap.Grams]:
        """Set texts aside, and return ``wanted`` samples of them, and ``known`` with their 13-grams added."""

    @abstractmethod
    def leave_out(self, known: overlap.Grams) -> None:
        """Train on nothing that has these 13-grams. Raises ValueError where nothing is left."""

    @abstractmethod
    def __getitem__(self, place: int) -> Sample:
        """Training sample number ``place``."""

    def _make(self, place: int, seed: str, build: Callable[[str, int], Sample]) -> Sample:
        """The first sample that ``build`` makes of a seed and a length in tokens, which are drawn for the place."""
        reason = ""
        for draw in range(DRAWS):
            again = f"{seed}:{draw}" if draw else seed
            length = random.Random(f"{again}|length|{place}").choice(self.data.lengths or [self.data.max_tokens])
            try:
                sample = build(again, length)
            except ValueError as error:
                reason = reason or first_line(error)
                continue
            if reason and (said := f"record {place} is left out: {reason}") not in self._named:
                self._named.add(said)
                print(f"data.sources: {self.name!r}, {said}", file=sys.stderr)
            return sample
        raise ValueError(f"data.max_tokens={self.data.max_tokens} is too small for {self.name} samples: {reason}")


class Synthetic(Made):
    """Facts that are hidden in ``data.texts``.

    A stretch of each text is set aside, and the other texts lose every 13-gram that they share with it. Facts, prompts and
    repeated sentences of validation are its own.

    Raises:
        ValueError: ``max_tokens`` is too small for samples; a text has nothing to set aside.
    """

    def __init__(self, data: DataConfig, tokenizer: PreTrainedTokenizerBase, seed: int) -> None:
        super().__init__(SYNTHETIC, data, tokenizer, seed)
        with prefixed_errors("data.texts", OSError, ValueError):
            self.texts = [load_text(source) for source in data.texts]
        """Texts that are trained on."""
        self[0]

    def hold(self, wanted: int, known: overlap.Grams) -> tuple[list[Sample], overlap.Grams]:
        if not wanted:
            return [], known
        stretches = []
        for i, (source, text) in enumerate(zip(self.data.texts, self.texts, strict=True)):
            rng = random.Random(f"{self.seed}:validation:{i}")
            stretch, self.texts[i] = split_text(text, CHARACTERS * self.data.max_tokens, rng)
            if not stretch.strip():
                raise ValueError(
                    f"data.texts: {source!r} is too short for data.val_samples={self.data.val_samples} to set a stretch aside"
                )
            stretches.append(stretch)
        samples = [self._about(i, stretches, f"{self.seed}:validation", VALIDATION) for i in range(wanted)]
        return samples, overlap.union([known, *map(overlap.grams, stretches)])

    def leave_out(self, known: overlap.Grams) -> None:
        self.texts = [overlap.without(text, known) for text in self.texts]
        for source, text in zip(self.data.texts, self.texts, strict=True):
            if not text.strip():
                raise ValueError(
                    f"data.texts: {source!r} has nothing left to train on: data.val_samples={self.data.val_samples} sets a "
                    "stretch aside that the rest repeats"
                )

    def __getitem__(self, place: int) -> Sample:
        return self._about(place, self.texts, f"{self.seed}", TRAINING)

    def _about(self, place: int, texts: Sequence[str], seed: str, wording: Wording) -> Sample:
        return self._make(
            place, seed, lambda seed, length: synthetic_sample(self.tokenizer, texts, length, seed, place, wording)
        )


class Code(Made):
    """Questions about the Python files of a folder (``samples.code``). A tenth of the files is set aside.

    Raises:
        ValueError: no such folder, too few files, or ``max_tokens`` is too small for samples.
    """

    def __init__(self, folder: str, data: DataConfig, tokenizer: PreTrainedTokenizerBase, seed: int) -> None:
        super().__init__(f"code({folder})", data, tokenizer, seed)
        with prefixed_errors("data.sources", OSError, ValueError):
            self.files = read_code(folder)
        """Files that are trained on."""
        self[0]

    def hold(self, wanted: int, known: overlap.Grams) -> tuple[list[Sample], overlap.Grams]:
        if not wanted:
            return [], known
        size = max(1, round(STRETCH * len(self.files)))
        held = random.Random(f"{self.seed}:validation").sample(self.files, size)
        self.files = [file for file in self.files if file not in held]
        if not self.files:
            raise ValueError(
                f"data.sources: {self.name!r} has one file with questions; data.val_samples={self.data.val_samples} sets it aside"
            )
        samples = [self._about(i, held, f"{self.seed}:validation") for i in range(wanted)]
        return samples, overlap.union([known, *(overlap.grams("\n".join(file.lines)) for file in held)])

    def leave_out(self, known: overlap.Grams) -> None:
        self.files = [file for file in self.files if not overlap.is_copy("\n".join(file.lines), known)]
        if not self.files:
            raise ValueError(f"data.sources: {self.name!r} has nothing left to train on but copies of set-aside texts")

    def __getitem__(self, place: int) -> Sample:
        return self._about(place, self.files, f"{self.seed}")

    def _about(self, place: int, files: Sequence[CodeFile], seed: str) -> Sample:
        def build(seed: str, length: int) -> Sample:
            return code_sample(self.tokenizer, files, length, random.Random(f"{seed}|{place}"))

        return self._make(place, seed, build)


class SelfStudy(Made):
    """Questions that the backbone writes about passages of a text (``samples.study``). A stretch of the text is set aside.

    Raises:
        ValueError: no such text, nothing to set aside, or no usable question.
    """

    def __init__(
        self, text: str, passages: int, data: DataConfig, tokenizer: PreTrainedTokenizerBase, seed: int, write: Write
    ) -> None:
        super().__init__(f"self-study({text})", data, tokenizer, seed)
        self.passages, self.write = passages, write
        with prefixed_errors("data.sources", OSError, ValueError):
            self.text = load_text(text)
        """Text that is trained on."""

    def hold(self, wanted: int, known: overlap.Grams) -> tuple[list[Sample], overlap.Grams]:
        if not wanted:
            return [], known
        rng = random.Random(f"{self.seed}:validation")
        stretch, self.text = split_text(self.text, CHARACTERS * self.data.max_tokens, rng)
        if not stretch.strip():
            raise ValueError(
                f"data.sources: {self.name!r} is too short for data.val_samples={self.data.val_samples} to set a stretch aside"
            )
        studied = self._study(stretch, 2 * wanted, f"{self.seed}:validation")
        samples = [self._about(i, stretch, studied, f"{self.seed}:validation") for i in range(wanted)]
        return samples, overlap.union([known, overlap.grams(stretch)])

    def leave_out(self, known: overlap.Grams) -> None:
        self.text = overlap.without(self.text, known)
        if not self.text.strip():
            raise ValueError(f"data.sources: {self.name!r} has nothing left to train on but copies of set-aside texts")

    @cached_property
    def studied(self) -> list[Studied]:
        """What the backbone wrote about the text that is trained on."""
        return self._study(self.text, self.passages, f"{self.seed}")

    def __getitem__(self, place: int) -> Sample:
        return self._about(place, self.text, self.studied, f"{self.seed}")

    def _study(self, text: str, passages: int, seed: str) -> list[Studied]:
        found = study(text, passages, random.Random(f"{seed}:study"), self.write)
        if not found:
            raise ValueError(
                f"data.sources: {self.name!r}: the backbone wrote no usable question about any of {passages} passages"
            )
        return found

    def _about(self, place: int, text: str, studied: Sequence[Studied], seed: str) -> Sample:
        def build(seed: str, length: int) -> Sample:
            return study_sample(self.tokenizer, text, studied, length, random.Random(f"{seed}|{place}"))

        return self._make(place, seed, build)


@dataclass(frozen=True)
class Given:
    """What the sources of a run are opened with."""

    data: DataConfig
    tokenizer: PreTrainedTokenizerBase
    seed: int
    write: Write


@part("source", SYNTHETIC)
class SyntheticSource:
    """Facts that are hidden in ``data.texts``."""

    def open(self, given: Given) -> Made:
        """The samples."""
        return Synthetic(given.data, given.tokenizer, given.seed)


@part("source", "code")
class CodeSource:
    """Questions that a program makes from the syntax trees of a folder's Python files."""

    folder: str = "python"
    """The folder; 'python' is the standard library of the running Python."""

    def open(self, given: Given) -> Made:
        """The samples."""
        return Code(self.folder, given.data, given.tokenizer, given.seed)


@part("source", "self-study")
class SelfStudySource:
    """Questions that the backbone itself writes about passages of a text."""

    text: str
    """'pydoc', 'jargon', a file or a folder."""
    passages: Annotated[int, Ge(1)] = 128
    """Passages that it writes about, at most."""

    def open(self, given: Given) -> Made:
        """The samples."""
        return SelfStudy(self.text, self.passages, given.data, given.tokenizer, given.seed, given.write)


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
