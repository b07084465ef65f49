"""Backbones out of GGUF files: their matrices stay packed, as they lie in the file. Files are named by a path, or on the Hub
``user/name/FILE.gguf`` or, as llama.cpp has it, ``user/name:Q4_K_M``."""

import re
from pathlib import Path

from ...naming import last_part

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
    return (model_name(name) if is_gguf(name) else last_part(name)).casefold().removesuffix("-gguf")
