"""The page of a request: its bytes, and how many requests fit. Nothing of vLLM is imported."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from transformers import PretrainedConfig

from ..backbones.spec import BackboneSpec, spec_of
from ..cache.pages import PageShape
from ..naming import show
from ..policies import Policy
from ..settings import Resolved
from .ranks import Ranks, config_of_rank

SPARE = 1
"""Pages that vLLM keeps for itself: its block 0 belongs to nobody."""


def page_shape(spec: BackboneSpec, settings: Resolved, policies: Iterable[Policy], dtype: torch.dtype) -> PageShape:
    """The page of a request in one layer: large enough for any of these policies, and for every window."""
    policies, group = list(policies), spec.n_heads // spec.n_kv_heads
    windows = [window - 1 for window in spec.windows if window is not None]
    full = [settings.budget] if None in spec.windows else []
    statistics = max(len(p.statistics - {"count"}) * (1 + group * p.by_query_head) for p in policies)
    recent = max(p.recent(settings.chunk) for p in policies)
    rows = max(full + windows) + settings.chunk
    return PageShape(spec.n_kv_heads, spec.n_heads, spec.head_dim, rows, dtype, statistics, recent)


def pages_of(
    config: PretrainedConfig, settings: Resolved, policies: Iterable[Policy], dtype: torch.dtype, ranks: int = 1
) -> int:
    """Bytes of a request's pages on one rank, of a model whose heads are split over ``ranks``."""
    spec = spec_of(config_of_rank(config, Ranks(0, ranks)))
    return page_shape(spec, settings, policies, dtype).nbytes * spec.n_layers


@dataclass(frozen=True)
class Pages:
    """The pages of a server, those of all layers of one rank."""

    each: int
    """Bytes of a request's pages."""
    requests: int
    """Requests that run at once; more wait."""

    @classmethod
    def within(cls, each: int, memory: int) -> Pages:
        """As many as fit into so many bytes."""
        return cls(each, max(0, memory // each - SPARE))

    @property
    def bytes(self) -> int:
        """Of all pages, vLLM's own among them."""
        return (self.requests + SPARE) * self.each

    def __str__(self) -> str:
        return f"{self.requests} requests fit, each of any length in {show(self.each)}: {self.bytes} bytes"
