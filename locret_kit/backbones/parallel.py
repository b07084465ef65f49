"""Backbones whose layers are spread over ranks by ``tp_plan``: each rank's attention has some of the heads.

A cache works with the heads of all ranks: they are gathered before it and taken apart after it. Retaining heads read every
head's q, k and v, a layer's heads may share their slots, and policies compare heads, so each of them then decides as on one
rank, and every rank alike. A bounded cache is small. What is divided is the weights and the matrix products.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from .handler import Handler, LayerOperations, Softmax

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from transformers import PreTrainedModel


def group_of(model: PreTrainedModel) -> ProcessGroup | None:
    """The ranks among which a model's heads are spread; None where each has all.

    Raises:
        ValueError: a number of heads that the ranks do not divide.
    """
    size, mesh = getattr(model, "_tp_size", None) or 1, getattr(model, "_device_mesh", None)
    if size == 1 or mesh is None:
        return None
    config = model.config.get_text_config(decoder=True)
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, name, None) or config.num_attention_heads
        if heads % size:
            raise ValueError(f"{name}={heads} must be a multiple of the {size} ranks of tensor parallelism")
    found: ProcessGroup = mesh.get_group() if mesh.ndim == 1 else mesh.get_group("tp")
    return found


class AllHeads(Handler):
    """A handler that meets the heads of all ranks; the rest of it is as it was."""

    def __init__(self, handler: Handler, group: ProcessGroup) -> None:
        self.of, self._group = handler, group
        self.wants_unrotated, self.in_blocks = handler.wants_unrotated, handler.in_blocks

    def operations(self, x: Tensor) -> LayerOperations | None:
        return self.of.operations(x)

    def blocks(self, tokens: int) -> list[int]:
        return self.of.blocks(tokens)

    def read(self, hidden_BTE: Tensor, ids_BT: Tensor | None) -> None:
        self.of.read(hidden_BTE, ids_BT)

    def attend(self, layer: int, q_BQTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, softmax: Softmax) -> Tensor:
        """Attention output of this rank's query heads."""
        return self._mine(self.of.attend, layer, q_BQTD, k_BHTD, v_BHTD, softmax)

    def attend_shared(self, layer: int, q_BQTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, softmax: Softmax) -> Tensor:
        """As ``attend``."""
        return self._mine(self.of.attend_shared, layer, q_BQTD, k_BHTD, v_BHTD, softmax)

    def _mine(
        self, attend: Callable[..., Tensor], layer: int, q: Tensor, k: Tensor, v: Tensor, softmax: Softmax
    ) -> Tensor:
        group = self._group
        if softmax.sinks_Q is not None:
            (sinks,) = gathered((softmax.sinks_Q.view(1, -1, 1, 1),), group)
            softmax = softmax._replace(sinks_Q=sinks.flatten())
        q, k, v = (
            gathered((q, k, v), group) if k.shape[-1] == v.shape[-1] else (gathered((x,), group)[0] for x in (q, k, v))
        )
        out: Tensor = attend(layer, q, k, v, softmax)
        return out.chunk(dist.get_world_size(group), dim=1)[dist.get_rank(group)]


def gathered(parts: tuple[Tensor, ...], group: ProcessGroup) -> list[Tensor]:
    """Of tensors ``[B, heads, T, D]`` of this rank those of all ranks, in their order; one message for all of them."""
    counts = [part.shape[1] for part in parts]
    mine = torch.cat(parts, dim=1)
    all_ranks = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(all_ranks, mine, group=group)
    return [torch.cat(of_one, dim=1) for of_one in zip(*(one.split(counts, dim=1) for one in all_ranks), strict=True)]
