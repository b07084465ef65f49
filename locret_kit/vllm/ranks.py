"""Retaining heads of one rank of a tensor-parallel model, which holds some of the attention heads alone.

A head reads q, k and v of all attention heads, so its first product is split by their columns: each rank multiplies what it has,
and the sums of ``[tokens, width]`` go over all ranks once a layer. What follows is done for the rank's own key/value heads.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PretrainedConfig

from ..backbones.decoder_attention import Linear
from ..backbones.spec import spec_of
from ..heads import HeadsConfig, RetainingHead, RetainingHeads

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
