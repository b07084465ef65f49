"""Rows in few bits, read and quantised in one call for many layers on a CPU (``cpu.cpp``). Their definition with tensors is the
cache's own (``locret_kit/cache/storage``).
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from .. import cpp

SOURCE = Path(__file__).with_name("cpu.cpp")
GROUP = cpp.Struct(SOURCE, "Group")


@cache
def load() -> cpp.Library:
    """The compiled calls.

    Raises:
        cpp.Unavailable: another system, no compiler, or one that fails.
    """
    calls = {"locret_quantise": (cpp.ADDRESS, cpp.NUMBER, cpp.INT), "locret_open": (cpp.ADDRESS, cpp.INT, cpp.INT)}
    return cpp.load(SOURCE, "-ffp-contract=off", **calls)  # it rounds as tensors do
