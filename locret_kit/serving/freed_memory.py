"""Memory that was freed goes back to the system.

glibc keeps what is freed for later: a forward's tensors and ended sessions' caches leave holes between what is still held, and a
new cache does not fit into them. Resident memory then grows beyond what is in use (by a third in a server of eight sessions).
``malloc_trim`` gives the pages of all holes back, those of every thread's arena.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable

SECONDS = 0.5
"""Between two times that memory goes back; as long a freed cache may count beside a new one."""


def _trim() -> Callable[[int], int] | None:
    """glibc's ``malloc_trim``; None where the C library has none."""
    try:
        trim: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # another C library; Windows
        return None
    return trim


def give_back(ended: threading.Event) -> None:
    """Give freed memory back, now and every half second until ``ended``, by a thread of its own. ctypes lets other threads run
    meanwhile."""
    trim = _trim()
    if trim is None:
        return

    def again() -> None:
        while not ended.wait(SECONDS):
            trim(0)

    trim(0)
    threading.Thread(target=again, name="locret-trim", daemon=True).start()
