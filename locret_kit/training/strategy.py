"""Strategies of training, by ``trainer.strategy``: the placement of heads and backbone on devices, and the gradients' reduction.

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

Every layer's loss is back-propagated inside the forward, so ``ddp`` wraps no module. It averages the finished gradients,
which is exact, and cheap because heads are small. All strategies write the same state file, so a run can resume with another.

Lightning's own DeepSpeed strategy runs on CUDA only, cannot clip values, casts the heads to the backbone's precision, and
writes shards that no other strategy reads. This one keeps the heads in float32, so its curve equals that of one process.
It needs deepspeed 0.19.8, whose engines reduce the gradients of many backward passes at once. We run one pass per layer and
sample, so that only one layer's graph is in memory.

Heads and backbone are two engines. The heads' engine owns AdamW (PyTorch's, offloaded or not, so that nothing is compiled).
The backbone's engine, in stage 3, gathers each weight for its use and frees it afterwards. Every process first loads the
whole backbone into CPU memory.

``tests/training/test_deepspeed.py`` checks curves, heads and resumed runs with two CPU processes over gloo. Memory, speed,
pinned buffers and NCCL need GPUs and have not been run.
"""

import os
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from importlib.util import find_spec
from types import ModuleType

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F
from torch.optim import Optimizer
from transformers import PreTrainedModel

from ..backbones.decoder_modules import decoder_of
from ..heads import RetainingHeads
from ..naming import install_line

MOMENTS = ("exp_avg", "exp_avg_sq")


class ReplicatedStrategy(DDPStrategy):
    """Lightning's processes, each with a whole copy of the heads, without its wrapper around the forward; gradients become
    one when a step's are finished."""

    def configure_ddp(self) -> None:
        assert self.model is not None
        for weight in self.model.parameters():
            dist.broadcast(weight.data, src=0)


class ZeroStrategy(ReplicatedStrategy):
    """ZeRO stage 2 or 3 for the heads, and stage 3 for the backbone where the heads have it.

    Args:
        stage: 2 or 3. offload: keep weights, gradients and optimiser in the CPU's memory (stage 3).
    """

    def __init__(self, stage: int, offload: bool = False) -> None:
        super().__init__()
        self.stage, self.offload = stage, offload
        self._passes: ExitStack | None = None  # open between a step's first backward pass and its end

    def setup(self, trainer: L.Trainer) -> None:
        """Wrap heads and backbone once Lightning has placed the heads and loaded a checkpoint into them."""
        super().setup(trainer)
        os.environ["LOCAL_RANK"] = str(self.local_rank)  # DeepSpeed reads it, also where no launcher has set it
        deepspeed = import_deepspeed(self.root_device)
        (adamw,) = self.optimizers
        self.engine, self.zero, *_ = deepspeed.initialize(
            model=self.model, optimizer=adamw, config=self.config(), dist_init_required=False
        )
        self.model = self.engine
        if self.stage == 3:
            decoder = decoder_of(self.lightning_module.backbone)  # type: ignore[arg-type, union-attr]
            # Shards weight by weight, where `initialize` alone would first put the whole backbone on each device.
            deepspeed.zero.Init(module=decoder, config_dict_or_path=self.config())
            deepspeed.initialize(model=decoder, config=self.config(), dist_init_required=False)

    def config(self) -> dict[str, object]:
        """DeepSpeed's configuration: this file's arguments, and a plain PyTorch optimiser."""
        zero: dict[str, object] = {"stage": self.stage}
        if self.offload:
            place = {"device": "cpu", "pin_memory": self.root_device.type == "cuda"}
            zero |= {"offload_param": place, "offload_optimizer": place}
        # PyTorch's own AdamW, which DeepSpeed calls untested: its state can be read by every other strategy, and the CPU's
        # variant would be compiled here.
        plain = {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
        return {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero, **plain}

    def backward(self, closure_loss: Tensor, optimizer: object, *args: object, **kwargs: object) -> Tensor:
        """Add the gradients of the scalar loss to this process's; ``finish_gradients`` reduces them."""
        if self._passes is None:
            self._passes = ExitStack()
            self._passes.enter_context(self.engine.coalesce_grad_reduction())
        self.engine.backward(closure_loss)
        return closure_loss

    def finish_gradients(self, parameters: list[nn.Parameter], bound: float) -> None:
        """Each process's part of the mean gradients, each element clipped to ``[-bound, bound]`` (0: not clipped)."""
        from deepspeed.utils import safe_get_full_grad, safe_get_local_grad, safe_set_full_grad, safe_set_local_grad

        assert self._passes is not None
        self._passes.close()
        self._passes = None
        # Element by element, so clipping a part of a gradient (stage 3) is exact. Stage 2 gives whole gradients only.
        read, write = (safe_get_local_grad, safe_set_local_grad)
        if self.stage == 2:
            read, write = (safe_get_full_grad, safe_set_full_grad)
        for parameter in parameters if bound else ():
            write(parameter, read(parameter).clamp(-bound, bound))

    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], object], model: object = None, **kwargs: object
    ) -> object:
        result = closure()
        self.engine.step()
        return result

    def lightning_module_state_dict(self) -> dict[str, object]:
        """Whole weights, on the CPU, in every process; all of them must call it."""
        from deepspeed.utils import safe_get_full_fp32_param

        return {name: safe_get_full_fp32_param(weight).cpu() for name, weight in self._weights()}

    def optimizer_state(self, optimizer: Optimizer) -> dict:
        """AdamW's state as one process has it, on the CPU; all processes must call it."""
        from deepspeed.utils import safe_get_full_optimizer_state

        weights = [weight for _, weight in self._weights()]
        group = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
        state: dict[int, dict[str, Tensor]] = {}
        if optimizer.state:
            step = next(iter(optimizer.state.values()))["step"].cpu()
            state = {
                i: {"step": step.clone(), **{key: safe_get_full_optimizer_state(w, key).cpu() for key in MOMENTS}}
                for i, w in enumerate(weights)
            }
        return {"state": state, "param_groups": [{**group, "params": list(range(len(weights)))}]}

    def load_optimizer_state_dict(self, checkpoint: Mapping) -> None:
        """Give each process its part of a whole state."""
        from deepspeed.utils import (
            lazy_init_hp_params_optimizer_state,
            safe_set_full_optimizer_state,
            safe_set_local_optimizer_state,
        )

        (adamw,), (saved,) = self.optimizers, checkpoint["optimizer_states"]
        step = next(iter(saved["state"].values()))["step"]
        weights = [weight for _, weight in self._weights()]
        adamw.param_groups[0] |= {key: value for key, value in saved["param_groups"][0].items() if key != "params"}
        flat = self.zero.fp32_partitioned_groups_flat if self.stage == 3 else self.zero.single_partition_of_fp32_groups
        # DeepSpeed steps over flat parts of all weights together. Their moments would first exist after a step, so they are
        # made here as zeros, and then filled weight by weight.
        for part in flat:
            adamw.state[part] = {"step": step.clone(), **{key: torch.zeros_like(part) for key in MOMENTS}}
        if self.stage == 2:
            lazy_init_hp_params_optimizer_state(weights, flat[0], adamw.state)
        for i, moments in saved["state"].items():  # heads of layers with a window may have none
            weight = weights[i]
            for key in MOMENTS:
                value = moments[key]
                if self.stage == 3:
                    safe_set_local_optimizer_state(weight, own_part(value, weight.ds_tensor.numel()), key)
                else:
                    safe_set_full_optimizer_state(weight, value, key)

    def _weights(self) -> list[tuple[str, nn.Parameter]]:
        return list(self.lightning_module.named_parameters())  # type: ignore[union-attr]


def own_part(value: Tensor, size: int) -> Tensor:
    """Part ``[size]`` of a tensor of any shape for this process: flattened, divided among the processes, and zeros after
    its end."""
    start = dist.get_rank() * size
    part = value.flatten()[start : start + size]
    return F.pad(part, (0, size - len(part)))


def import_deepspeed(device: torch.device) -> ModuleType:
    """Import DeepSpeed for ``device``.

    On a CPU it would first compile a reduction over shared memory for minutes; gloo, which is installed, does the same.

    Raises:
        ImportError: older than the functions that ``ZeroStrategy`` calls.
    """
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed

    if not hasattr(deepspeed.DeepSpeedEngine, "coalesce_grad_reduction"):
        raise ImportError(f"deepspeed {deepspeed.__version__} is too old: {install_line('deepspeed')}")
    if device.type == "cpu":
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    warnings.filterwarnings("ignore", r"`torch\.distributed\..*` is deprecated", FutureWarning)
    return deepspeed


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
        # Of a process whose samples taught nothing, such as texts that are never evicted from, zeros count.
        has_N = torch.tensor([one.grad is not None for one in parameters], device=parameters[0].device).int()
        dist.all_reduce(has_N, dist.ReduceOp.MAX)
        for parameter, some in zip(parameters, has_N.tolist(), strict=True):
            if some:
                grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                dist.all_reduce(grad)
                parameter.grad = grad.div_(dist.get_world_size())
    for grad in (parameter.grad for parameter in parameters if parameter.grad is not None and bound):
        mine = grad.to_local() if hasattr(grad, "to_local") else grad  # shares memory
        mine.clamp_(-bound, bound)
