"""Processes with a whole copy of the heads each."""

from __future__ import annotations

import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy


class ReplicatedStrategy(DDPStrategy):
    """Lightning's processes without its wrapper around the forward; gradients become one when a step's are finished."""

    def configure_ddp(self) -> None:
        assert self.model is not None
        for weight in self.model.parameters():
            dist.broadcast(weight.data, src=0)
