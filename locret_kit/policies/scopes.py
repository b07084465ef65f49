"""Which slots may not be evicted now. Scopes are united with ``+``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from .base import ScopePart, Slots, at_least, rank_of, resolve_count
from .scores import check_size, proxy_count


@dataclass(frozen=True)
class Sinks(ScopePart):
    """The first ``n`` tokens of the text. Source: StreamingLLM, arXiv 2309.17453."""

    n: int = 4

    def __post_init__(self) -> None:
        at_least("sinks", 0, n=self.n)

    def protects(self, slots: Slots) -> Tensor:
        return (slots.positions < self.n) & slots.valid


@dataclass(frozen=True)
class Window(ScopePart):
    """The newest slots: ``size`` of them, or a fraction of what the head keeps. Source: H2O, ScissorHands (one half)."""

    size: int | float = 0.5

    def __post_init__(self) -> None:
        check_size("window", "size", self.size, 0)

    def window(self, budget: int, chunk: int, stabilizers: int) -> int:
        return resolve_count(self.size, budget)

    def protects(self, slots: Slots) -> Tensor:
        return slots.newest(resolve_count(self.size, slots.keep))


@dataclass(frozen=True)
class Stabilizers(ScopePart):
    """The newest slots, as many as the run says (``--stabilizers``), except at the last eviction of the prompt.
    Source: Locret, section 3.4."""

    most: int | float = 1.0
    """No more than so many, or than this fraction of what the head keeps."""

    def __post_init__(self) -> None:
        check_size("stabilizers", "most", self.most, 0)

    def window(self, budget: int, chunk: int, stabilizers: int) -> int:
        return min(stabilizers, resolve_count(self.most, budget))

    def protects(self, slots: Slots) -> Tensor:
        return slots.newest(min(slots.stabilizers, resolve_count(self.most, slots.keep)))


@dataclass(frozen=True)
class Proxies(ScopePart):
    """The proxy tokens: the newest ``tokens``, or a fraction of the chunk. Source: NaCl, section 5.1."""

    tokens: int | float = 0.1

    def __post_init__(self) -> None:
        check_size("proxies", "tokens", self.tokens, 1)

    def window(self, budget: int, chunk: int, stabilizers: int) -> int:
        return min(budget, proxy_count(self.tokens, chunk))

    def protects(self, slots: Slots) -> Tensor:
        return slots.newest(min(slots.keep, proxy_count(self.tokens, slots.chunk)))


@dataclass(frozen=True)
class Deviation(ScopePart):
    """The ``size`` slots of highest standard deviation ``sqrt(sum a^2 / count - (sum a / count)^2)``. A slot that few queries
    have seen has no spread to speak of, so the newest slots and the sinks come first, whatever theirs.
    Source: RoCo, section 4; the two exceptions are its published implementation's."""

    size: int | float = 0.5
    """Slots, or a fraction of what the head keeps; the exceptions are among them."""
    newest: int = 10
    sinks: int = 4
    statistics: ClassVar[frozenset[str]] = frozenset({"sum", "square", "count"})

    def __post_init__(self) -> None:
        check_size("deviation", "size", self.size, 0)
        at_least("deviation", 0, newest=self.newest, sinks=self.sinks)

    def protects(self, slots: Slots) -> Tensor:
        mean_BHS = slots.stats["sum"] / slots.stats["count"]
        variance_BHS = slots.stats["square"] / slots.stats["count"] - mean_BHS.square()
        first_BHS = slots.newest(self.newest) | ((slots.positions < self.sinks) & slots.valid)
        place_BHS = rank_of(variance_BHS.clamp_(min=0).sqrt_(), first_BHS, slots.valid)
        return (place_BHS < resolve_count(self.size, slots.keep)) & slots.valid
