"""The error of a run whose device ran out of memory."""

import re
from dataclasses import dataclass

import torch

from ..cache.bounded import BoundedCache


class OutOfMemory(RuntimeError, MemoryError):
    """The device ran out of memory. The message has the bytes that were asked for, the budget and the chunk."""


@dataclass(frozen=True)
class explain_oom:
    """A block that turns an out-of-memory error of a run into an ``OutOfMemory``. It is a class, because a generator's context
    that raises leaves a cycle from Python 3.12 on. That cycle would keep the run's memory alive."""

    cache: BoundedCache

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        asked = re.search(r"ried to allocate ([\d.]+ ?(?:bytes|[KMGT]iB))", str(error))  # a card's words, or a CPU's
        if not isinstance(error, RuntimeError) or not (asked or isinstance(error, torch.OutOfMemoryError)):
            return
        needed, schedule = f"{asked[1]} were asked for, " if asked else "", self.cache.schedule
        raise OutOfMemory(
            f"out of memory: {needed}with budget={schedule.budget} and chunk={schedule.chunk}; "
            "locret-plan prints the largest that fit"
        ) from error
