"""Architectures: dimensions, windows and RoPE of a model, and where its attention is met. Here, without torch: the versions of
PyTorch and transformers that were tested; newer ones are allowed, and named."""

import logging
import re
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version

LOG = logging.getLogger("locret_kit")
TESTED = {"transformers": "5.24", "torch": "2.15"}
"""The newest releases tested; the oldest are in ``pyproject.toml``."""


def newer() -> list[str]:
    """A line for each library whose release is newer than the tested one, with the one that works."""
    lines = []
    for name, tested in TESTED.items():
        try:
            installed = version(name)
        except PackageNotFoundError:
            continue
        if _numbers(installed)[:2] > _numbers(tested):
            newest = f"{tested}, which was tested: pip install '{name}=={tested}.*'"
            lines.append(f"{name} {installed} is newer than {newest}")
    return lines


def _numbers(release: str) -> tuple[int, ...]:
    """The numbers at the beginning of a version: (5, 24, 0) of 5.24.0.dev1."""
    return tuple(int(number) for number in re.findall(r"\d+", re.split(r"[^\d.]", release)[0]))


@lru_cache(maxsize=1)
def warn_of_newer() -> None:
    """Log a line for each, once in a process."""
    for line in newer():
        LOG.warning("warning: %s if something fails", line)
