"""Retaining heads of a model whose heads are split over several processes, as by tensor parallelism."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..engine import RetainingHeads


@dataclass(frozen=True)
class Ranks:
    """Place of a process among the ranks that share a layer, and the sum over all of them."""

    rank: int = 0
    size: int = 1
    total: Callable[[Tensor], Tensor] = torch.clone
    """Sum over all ranks of a tensor, which keeps its shape."""

    def own(self, heads: int) -> slice:
        """This rank's part of as many heads of the whole model."""
        return slice(self.rank * heads // self.size, (self.rank + 1) * heads // self.size)

    def heads(self, heads: RetainingHeads) -> RetainingHeads:
        """The part of retaining heads that this rank has; the heads themselves where it is alone."""
        if self.size == 1:
            return heads
        config = heads.config
        with torch.device("meta"):
            split = RetainingHeads(config)
        split.config = replace(config, n_heads=config.n_heads // self.size, n_kv_heads=config.n_kv_heads // self.size)
        split.layers = nn.ModuleList(SplitHead(heads, layer, self) for layer in range(len(heads.layers)))
        return split


class SplitHead(nn.Module):
    """A rank's part of a layer's retaining head: its q, k, v ``[B, heads, T, D]`` to scores of its heads ``[B, H, T]``."""

    def __init__(self, heads: RetainingHeads, layer: int, ranks: Ranks) -> None:
        super().__init__()
        config, name = heads.config, f"layers.{layer}"
        fc1, fc2 = (heads.get_parameter(f"{name}.{linear}.weight").detach() for linear in ("fc1", "fc2"))
        self.total, self.act = ranks.total, heads.get_submodule(f"{name}.act")
        # fc1 reads [q; k; v] of all heads: of each of the three the columns of this rank.
        kinds = fc1.split([n * config.head_dim for n in (config.n_heads, config.n_kv_heads, config.n_kv_heads)], 1)
        self.fc1 = nn.Parameter(torch.cat([x[:, ranks.own(x.shape[1])] for x in kinds], 1), requires_grad=False)
        self.fc2 = nn.Parameter(fc2[ranks.own(config.n_kv_heads)].contiguous(), requires_grad=False)

    def forward(
        self, q_BQTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, linear: Callable[..., Tensor] = F.linear
    ) -> Tensor:
        x_BTE = torch.cat([x.transpose(1, 2).flatten(2) for x in (q_BQTD, k_BHTD, v_BHTD)], dim=-1)
        hidden = self.act(self.total(linear(x_BTE.to(self.fc1.dtype), self.fc1).contiguous()))
        return F.linear(hidden, self.fc2).transpose(1, 2).float()
