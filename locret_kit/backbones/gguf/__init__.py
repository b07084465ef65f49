"""Backbones out of GGUF files: their matrices stay packed, as they lie in the file. Files are named by a path, or on the Hub
``user/name/FILE.gguf`` or, as llama.cpp has it, ``user/name:Q4_K_M``."""

import re
from pathlib import Path

from ...hub import pull

HUB = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(?:/(?P<file>.+\.gguf)|:(?P<tag>[\w.-]+))\Z", re.IGNORECASE)
PART = re.compile(r"(?P<stem>.+)-\d{5}-of-(?P<count>\d{5})(?P<suffix>\.gguf)\Z", re.IGNORECASE)
TYPES_AT_END = re.compile(r"[-._](gguf|b?f(16|32)|(ud-)?i?q\d(_\w+)?)\Z", re.IGNORECASE)


def is_gguf(name: str) -> bool:
    """Whether a model is named as a GGUF file is."""
    return name.lower().endswith(".gguf") or (HUB.match(name) is not None and not Path(name).exists())


def model_name(name: str) -> str:
    """Name of the model that a file is of: ``SmolLM2-135M-Instruct`` of ``SmolLM2-135M-Instruct.Q4_1.gguf`` and
    of ``user/SmolLM2-135M-Instruct-GGUF:Q4_K_M``, as files are named."""
    match = HUB.match(name)
    part = PART.match(name)
    stem = match["repo"] if match is not None and match["tag"] else part["stem"] if part else name[:-5]
    return TYPES_AT_END.sub("", Path(stem).name)


def part_names(name: str) -> list[str]:
    """Names of all parts of a split file, given one, ``NAME-00001-of-00002.gguf``. For a single file, its name."""
    match = PART.match(name)
    numbers = range(1, int(match["count"]) + 1) if match else ()
    return [f"{match['stem']}-{n:05}-of-{match['count']}{match['suffix']}" for n in numbers if match] or [name]


def pull_gguf(name: str, revision: str | None = None) -> Path:
    """The path, in the Hub's cache, of a file that is downloaded unless it is there: of the first of its parts, with all others.

    Raises:
        FileNotFoundError: no name of the Hub's, or no such repository. ValueError: it has no such file, several, or lacks a part.
    """
    match = HUB.match(name)
    if match is None:
        raise FileNotFoundError(f"model={name!r}: no such file")
    tag = rf"(^|.*[-._/]){re.escape(match['tag'] or '')}(-\d{{5}}-of-\d{{5}})?\.gguf\Z"

    def choose(names: list[str]) -> list[str]:
        files = [file for file in names if file.lower().endswith(".gguf")]
        fits = [match["file"]] if match["file"] else [file for file in files if re.match(tag, file, re.IGNORECASE)]
        chosen = list({part_names(file)[0]: None for file in fits if file in files})
        if len(chosen) != 1:
            there = ", ".join(files[:8]) + " and more" * (len(files) > 8) or "none"
            raise ValueError(f"model={name!r} names {len(chosen)} files of {match['repo']}; of GGUF there are: {there}")
        parts = part_names(chosen[0])
        if missing := [file for file in parts if file not in files]:
            raise ValueError(
                f"model={name!r} is in {len(parts)} parts, of which {match['repo']} lacks {', '.join(missing[:3])}"
            )
        return parts

    return pull(match["repo"], choose, field="model", revision=revision)[0]
