"""One key, ``trainer.strategy``, to how heads and backbone lie on the devices, and how gradients become one.

=========================  ==========================================  ==================================
key                        heads, with their optimiser                 frozen backbone
=========================  ==========================================  ==================================
``auto``                   on the one device                           on the one device
``ddp``                    on every device; gradients averaged once    on every device
                           per step
``fsdp``                   sharded, layer by layer (FSDP2)             sharded, layer by layer
``deepspeed_stage_2``      on every device; optimiser sharded (ZeRO)   on every device
``deepspeed_stage_3``      sharded, weight by weight (ZeRO)            sharded, weight by weight
``deepspeed_stage_3_       the same; weights and optimiser wait in     the same; weights wait in the CPU's
offload``                  the CPU's memory                            memory
=========================  ==========================================  ==================================

Every layer's loss is back-propagated inside the forward, so ``ddp`` wraps no module: it averages the finished gradients,
which is exact, and cheap since heads are small. All strategies write one kind of state file, so a run goes on with another.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from ..backbones.spec import decoder_of
from ..heads import RetainingHeads
from ..naming import install_line
from .zero import ReplicatedStrategy, ZeroStrategy

ZERO = {"deepspeed_stage_2": (2, False), "deepspeed_stage_3": (3, False), "deepspeed_stage_3_offload": (3, True)}
"""Stage, and whether weights and optimiser wait in the CPU's memory."""


def make_strategy(name: str, devices: int, num_nodes: int) -> Strategy | str:
    """Lightning's strategy for ``trainer.strategy``.

    Raises:
        ValueError: more than one process without a strategy that joins them.
        ImportError: DeepSpeed is asked for and not installed.
    """
    world = devices * num_nodes
    if name == "ddp":
        return ReplicatedStrategy()
    if name in ZERO:
        if find_spec("deepspeed") is None:
            raise ImportError(f"trainer.strategy={name} needs DeepSpeed: {install_line('deepspeed')}")
        return ZeroStrategy(*ZERO[name])
    if name == "fsdp":
        return ModelParallelStrategy(world, 1, save_distributed_checkpoint=False)
    if world > 1:
        raise ValueError(
            f"trainer.strategy={name} runs one process, not trainer.devices={devices} on "
            f"trainer.num_nodes={num_nodes}: choose ddp, fsdp or deepspeed_stage_2"
        )
    return "auto"


def shard(heads: RetainingHeads, backbone: PreTrainedModel, mesh: DeviceMesh) -> None:
    """FSDP2: each head and each backbone layer is gathered where it runs and given back after it."""
    from torch.distributed.fsdp import fully_shard

    for head in heads.layers:
        fully_shard(head, mesh=mesh)
    decoder = decoder_of(backbone)
    for layer in decoder.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(decoder, mesh=mesh)


def finish_gradients(strategy: Strategy, parameters: list[nn.Parameter], bound: float) -> None:
    """Make the gradients of one optimiser step: the mean over processes, each element within ``[-bound, bound]``.

    A bound of 0 does not clip.
    """
    if isinstance(strategy, ZeroStrategy):
        strategy.finish_gradients(parameters, bound)
        return
    if dist.is_initialized() and not isinstance(strategy, ModelParallelStrategy):  # FSDP has averaged what is sharded
        average_gradients(parameters)
    for grad in (parameter.grad for parameter in parameters if parameter.grad is not None and bound):
        mine = grad.to_local() if hasattr(grad, "to_local") else grad  # shares memory
        mine.clamp_(-bound, bound)


def average_gradients(parameters: list[nn.Parameter]) -> None:
    """Average over processes; of one whose samples taught nothing, such as texts that are never evicted from, zeros count."""
    has_N = torch.tensor([parameter.grad is not None for parameter in parameters], device=parameters[0].device).int()
    dist.all_reduce(has_N, dist.ReduceOp.MAX)
    for parameter, some in zip(parameters, has_N.tolist(), strict=True):
        if some:
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            dist.all_reduce(grad)
            parameter.grad = grad.div_(dist.get_world_size())
