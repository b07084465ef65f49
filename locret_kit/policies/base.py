"""The seam: what a policy's parts are given, and how a policy chooses the slots that stay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Entry:
    """New tokens of one layer as they enter the cache."""

    layer: int
    position: int
    """Position in the text of the first new token."""
    q: Tensor
    """``[B, Q, T, D]``, before RoPE when the policy needs heads."""
    k: Tensor
    """``[B, H, T, D]``"""
    v: Tensor
    """``[B, H, T, D]``"""
    head: nn.Module | None
    """The layer's retaining head, for scores that need one."""
    seed: int


@dataclass(frozen=True)
class Context:
    """The slots of one layer when it must be cut to ``keep`` slots a head."""

    layer: int
    keep: int
    stabilizers: int
    """Newest slots protected now; 0 at the last eviction before the tail."""
    scores: Tensor
    """``[B, H, S]`` float32, larger is kept."""
    positions: Tensor
    """``[B, H, S]`` int32, ascending."""


class Score(Protocol):
    """How much a slot is worth."""

    needs_heads: ClassVar[bool]

    def enter(self, entry: Entry) -> Tensor:
        """Scores ``[B, H, T]`` (float32) of tokens that enter; larger is kept."""
        ...


class Scope(Protocol):
    """Which slots may not be evicted now."""

    def protects(self, context: Context) -> Tensor:
        """Boolean ``[B, H, S]``; True stays while there is room."""
        ...


class Selection(Protocol):
    """Which slots stay, given scores and scope."""

    def select(self, scores_BHS: Tensor, protected_BHS: Tensor, keep: int) -> Tensor:
        """Row indices ``[B, H, keep]`` (int64, ascending)."""
        ...


@dataclass(frozen=True)
class Policy:
    """Score, scopes, allocation and selection under one name. Only the uniform allocation exists in this version."""

    name: str
    score: Any
    scopes: tuple[Any, ...]
    selection: Any
    source: str = ""
    keeps_everything: bool = False

    @property
    def needs_heads(self) -> bool:
        return self.score.needs_heads

    def choose(self, context: Context) -> Tensor:
        """Row indices ``[B, H, keep]`` of the slots that stay, ascending."""
        protected_BHS = torch.zeros_like(context.scores, dtype=torch.bool)
        for scope in self.scopes:
            protected_BHS |= scope.protects(context)
        return self.selection.select(context.scores, protected_BHS, context.keep)
