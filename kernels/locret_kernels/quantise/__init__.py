"""Rows in few bits, read and quantised in one call for many layers on a CPU (``cpu.cpp``). Their definition with tensors is the
cache's own (``locret_kit/cache/storage``).
"""

from __future__ import annotations

from pathlib import Path

from .. import cpp

SOURCE = Path(__file__).with_name("cpu.cpp")
OPTIONS = ("-ffp-contract=off",)
"""It rounds as tensors do."""
GROUP = cpp.Struct(SOURCE, "Group")


def load() -> cpp.Library:
    """The compiled calls.

    Raises:
        cpp.Unavailable: another system, no compiler, or one that fails.
    """
    return cpp.load(SOURCE, *OPTIONS)


def runs() -> bool:
    """Whether ``load`` gives the calls here, see ``cpp.runs``."""
    return cpp.runs(SOURCE, *OPTIONS)
