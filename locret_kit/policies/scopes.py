"""Scopes that several methods share. Scopes are united with ``+``."""

from __future__ import annotations

from torch import Tensor

from .base import Scope, Size, Slots, resolve_count, wanted_count
from .registry import part


@part("scope", "sinks")
class Sinks(Scope):
    """The first ``n`` tokens of the text, or a fraction of what the head keeps. Source: StreamingLLM, arXiv 2309.17453."""

    n: Size = 4

    def reserved(self, budget: int, chunk: int, stabilizers: int) -> int:
        return wanted_count(self.n, budget)

    @property
    def idle(self) -> bool:
        return not self.n

    def protects(self, slots: Slots) -> Tensor:
        return (slots.positions < wanted_count(self.n, slots.keep)) & slots.valid


@part("scope", "window")
class Window(Scope):
    """The newest slots: ``size`` of them, or a fraction of what the head keeps. Source: H2O, ScissorHands (one half)."""

    size: Size = 0.5

    def window(self, budget: int, chunk: int, stabilizers: int) -> int:
        return wanted_count(self.size, budget)

    def protects(self, slots: Slots) -> Tensor:
        return slots.newest(resolve_count(self.size, slots.keep))


@part("scope", "stabilizers")
class Stabilizers(Scope):
    """The newest slots, as many as the run says (``--stabilizers``), except at the last eviction of the prompt.
    Source: Locret, section 3.4."""

    most: Size = 1.0
    """At most this number of slots, or this fraction of what the head keeps."""

    def window(self, budget: int, chunk: int, stabilizers: int) -> int:
        return min(stabilizers, resolve_count(self.most, budget))

    def protects(self, slots: Slots) -> Tensor:
        return slots.newest(min(slots.stabilizers, resolve_count(self.most, slots.keep)))
