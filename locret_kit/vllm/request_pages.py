"""The page of a request and the heads of a rank: bytes, and how many requests fit. Nothing of vLLM is imported."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PretrainedConfig

from ..backbones.decoder_attention import Linear
from ..backbones.spec import BackboneSpec, spec_of
from ..cache.pages import PageShape
from ..heads import HeadsConfig, RetainingHead, RetainingHeads
from ..naming import show
from ..policies import Policy
from ..settings import Resolved

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


# ---- heads of one rank of a tensor-parallel model ------------------------------------------------------------------


Reduce = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Ranks:
    """This rank among those that share a layer, and the sum over all of them."""

    rank: int = 0
    size: int = 1
    total: Reduce = torch.clone
    """Of tensors that every rank has a part of."""

    def check(self, n_kv_heads: int) -> None:
        """Raise ValueError where key/value heads cannot be shared out evenly."""
        if n_kv_heads % self.size:
            raise ValueError(f"tensor_parallel_size={self.size} must divide the {n_kv_heads} key/value heads")


def config_of_rank(config: PretrainedConfig, ranks: Ranks) -> PretrainedConfig:
    """A model's configuration with the heads of one rank."""
    own, spec = deepcopy(config), spec_of(config)
    ranks.check(spec.n_kv_heads)
    own.head_dim = spec.head_dim
    own.num_attention_heads, own.num_key_value_heads = spec.n_heads // ranks.size, spec.n_kv_heads // ranks.size
    return own


def heads_of_rank(heads: RetainingHeads, ranks: Ranks) -> RetainingHeads:
    """The part of retaining heads that one rank has; the heads themselves where it is alone."""
    if ranks.size == 1:
        return heads
    config = heads.config
    ranks.check(config.n_kv_heads)
    with torch.device("meta"):
        split = RetainingHeads(config)
    split.config = replace(config, n_heads=config.n_heads // ranks.size, n_kv_heads=config.n_kv_heads // ranks.size)
    split.layers = nn.ModuleList(SplitHead(head, config, ranks) for head in heads.layers)  # type: ignore[arg-type]
    return split


class SplitHead(nn.Module):
    """A rank's part of a ``RetainingHead``: local q, k, v ``[B, heads, T, D]`` to the scores of its own heads ``[B, H, T]``."""

    def __init__(self, whole: RetainingHead, config: HeadsConfig, ranks: Ranks) -> None:
        super().__init__()
        self.total, self.act = ranks.total, whole.act
        columns, own = columns_of_rank(config, ranks), config.n_kv_heads // ranks.size
        self.fc1 = nn.Parameter(whole.fc1.weight.detach()[:, columns].contiguous(), requires_grad=False)
        rows = slice(ranks.rank * own, (ranks.rank + 1) * own)
        self.fc2 = nn.Parameter(whole.fc2.weight.detach()[rows].contiguous(), requires_grad=False)

    def forward(self, q_BQTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, linear: Linear = F.linear) -> Tensor:
        x_BTE = torch.cat([x.transpose(1, 2).flatten(2) for x in (q_BQTD, k_BHTD, v_BHTD)], dim=-1)
        hidden = self.act(self.total(linear(x_BTE.to(self.fc1.dtype), self.fc1).contiguous()))
        return F.linear(hidden, self.fc2).transpose(1, 2).float()


def columns_of_rank(config: HeadsConfig, ranks: Ranks) -> Tensor:
    """Columns of the concatenation [q; k; v] of all heads that a rank's own make up."""
    D, start, columns = config.head_dim, 0, []
    for heads in (config.n_heads, config.n_kv_heads, config.n_kv_heads):
        own = heads // ranks.size
        columns.append(torch.arange(start + ranks.rank * own * D, start + (ranks.rank + 1) * own * D, device="cpu"))
        start += heads * D
    return torch.cat(columns)
