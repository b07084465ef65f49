"""Parts of a model whose heads are split over several processes, as another engine's tensor parallelism does."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PretrainedConfig

from ..backbones.decoder_attention import Linear
from ..backbones.spec import AttentionLayer, spec_of
from ..heads import HeadsConfig, RetainingHead, RetainingHeads
from .storage.rows import STATE


@dataclass(frozen=True)
class Ranks:
    """Place of a process among the ranks that share a layer, and the sum over all of them."""

    rank: int = 0
    size: int = 1
    total: Callable[[Tensor], Tensor] = torch.clone
    """Sum over all ranks of a tensor, which keeps its shape."""

    def check(self, n_kv_heads: int) -> None:
        """Raise ValueError where key/value heads cannot be shared out evenly."""
        if n_kv_heads % self.size:
            raise ValueError(f"tensor_parallel_size={self.size} must divide the {n_kv_heads} key/value heads")

    def config(self, config: PretrainedConfig) -> PretrainedConfig:
        """A model's configuration with the heads of this rank; itself where the rank is alone."""
        if self.size == 1:
            return config
        own, spec = deepcopy(config), spec_of(config)
        self.check(spec.n_kv_heads)
        own.head_dim = spec.head_dim
        own.num_attention_heads, own.num_key_value_heads = spec.n_heads // self.size, spec.n_kv_heads // self.size
        return own

    def heads(self, heads: RetainingHeads) -> RetainingHeads:
        """The part of retaining heads that this rank has; the heads themselves where it is alone."""
        if self.size == 1:
            return heads
        config = heads.config
        self.check(config.n_kv_heads)
        with torch.device("meta"):
            split = RetainingHeads(config)
        split.config = replace(config, n_heads=config.n_heads // self.size, n_kv_heads=config.n_kv_heads // self.size)
        split.layers = nn.ModuleList(SplitHead(head, config, self) for head in heads.layers)  # type: ignore[arg-type]
        return split

    def rows(self, name: str, x: Tensor, layer: AttentionLayer) -> Tensor:
        """Heads of this rank in an exported tensor ``[H, ...]``, or ``[N, H, ...]`` for statistics and states: the same
        shape but for the heads. ``layer`` is the rank's."""
        heads = layer.n_heads if name == "queries" else layer.n_kv_heads
        return x.narrow(int(name == "stats" or name.startswith(STATE)), self.rank * heads, heads)

    def columns(self, config: HeadsConfig) -> Tensor:
        """Columns ``[C]`` of this rank in the concatenation [q; k; v] of all heads."""
        D, start, columns = config.head_dim, 0, []
        for heads in (config.n_heads, config.n_kv_heads, config.n_kv_heads):
            own = heads // self.size
            columns.append(torch.arange(start + self.rank * own * D, start + (self.rank + 1) * own * D, device="cpu"))
            start += heads * D
        return torch.cat(columns)


class SplitHead(nn.Module):
    """A rank's part of a ``RetainingHead``: local q, k, v ``[B, heads, T, D]`` to the scores of its own heads ``[B, H, T]``."""

    def __init__(self, whole: RetainingHead, config: HeadsConfig, ranks: Ranks) -> None:
        super().__init__()
        self.total, self.act = ranks.total, whole.act
        columns, own = ranks.columns(config), config.n_kv_heads // ranks.size
        self.fc1 = nn.Parameter(whole.fc1.weight.detach()[:, columns].contiguous(), requires_grad=False)
        rows = slice(ranks.rank * own, (ranks.rank + 1) * own)
        self.fc2 = nn.Parameter(whole.fc2.weight.detach()[rows].contiguous(), requires_grad=False)

    def forward(self, q_BQTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, linear: Linear = F.linear) -> Tensor:
        x_BTE = torch.cat([x.transpose(1, 2).flatten(2) for x in (q_BQTD, k_BHTD, v_BHTD)], dim=-1)
        hidden = self.act(self.total(linear(x_BTE.to(self.fc1.dtype), self.fc1).contiguous()))
        return F.linear(hidden, self.fc2).transpose(1, 2).float()
