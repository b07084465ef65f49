"""vLLM's layers, measured on the model that it has built: what attention is given in forwards of a few tokens, rotated and
not rotated. Nothing here depends on the name of an architecture.

vLLM hands its model to none of its parts, so modules are watched while it is built. A rotary embedding leaves queries and keys
unrotated in an engine that asks for a bounded cache.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.utils import extract_layer_index

from .worker import State, Worker

TOKENS = 12
"""Tokens that are read."""
MOVED = 3
"""Offset (positions) of the second forward."""


class Modules:
    """Parents of registered modules. They lead from a layer to the model."""

    parents: ClassVar[dict[nn.Module, nn.Module]] = {}
    watch: ClassVar[RemovableHandle | None] = None


def watch_modules() -> None:
    """Watch modules until the model is measured."""

    def registered(parent: nn.Module, name: str, child: nn.Module | None) -> None:
        if child is not None:
            Modules.parents[child] = parent

    forget_modules()
    Modules.watch = register_module_module_registration_hook(registered)


def forget_modules() -> None:
    """Watch no longer."""
    if Modules.watch is not None:
        Modules.watch.remove()
    Modules.parents, Modules.watch = {}, None


Heads = dict[str, tuple[Tensor, Tensor]]
"""Queries and keys ``[T, heads, D]`` that attention was given, by the names of layers."""


class ZeroedMemory(TorchFunctionMode):
    """Within it new memory is zeros: layers with a state leave it as they find it in a forward that has no requests."""

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        return made.zero_() if func in (torch.empty, torch.empty_like, Tensor.new_empty) else made


def traced(model: nn.Module, config: VllmConfig, first: int = 0, *, turns: bool = False) -> Heads:
    """Queries and keys of each layer in a forward of random tokens from position ``first`` on. ``turns``: rotated."""
    words, draw = min(config.model_config.get_vocab_size(), 1000), torch.Generator("cpu").manual_seed(0)
    device = next(model.parameters()).device
    ids = torch.randint(2, words, (TOKENS,), generator=draw, device="cpu").to(device)
    trace: Heads = {}
    State.trace, State.turns = trace, turns
    try:
        context = set_forward_context(None, config, num_tokens=TOKENS, skip_compiled=True)
        with torch.inference_mode(), ZeroedMemory(), context:
            model(input_ids=ids, positions=first + torch.arange(TOKENS, device=device))
    finally:
        State.trace, State.turns = None, False
    return trace


def measure(worker: Worker) -> None:
    """Tell a worker's pages how the layers of its model attend, once.

    Raises:
        ValueError: a layer that a bounded cache does not support, in one sentence.
    """
    if (config := worker.unmeasured) is None:
        return
    layers = get_layers_from_vllm_config(config, Attention)
    model: nn.Module = next(iter(layers.values()))
    while model in Modules.parents:
        model = Modules.parents[model]
    forget_modules()
    worker.unmeasured = None
    try:
        turned = traced(model, config, turns=True)
        worker.pages.model.unrotate(model)
        here, there = traced(model, config), traced(model, config, MOVED)
        if unseen := layers.keys() - here.keys():
            raise ValueError(f"{min(unseen)} was not asked for attention")
        numbers = {name: extract_layer_index(name) for name in here}
        if len({*numbers.values()}) < len(numbers):
            raise ValueError("a layer has several attentions")
        heads = {name: (here[name], there[name], turned[name]) for name in here}
        worker.pages.measure([_seen(layers[name], numbers[name], *heads[name]) for name in here])
    except ValueError as error:
        raise ValueError(f"architecture={config.model_config.architecture}: {error}") from error
    for number, name in enumerate(here):
        layers[name].impl.number = number


def _seen(layer: Attention, index: int, *heads: tuple[Tensor, Tensor]) -> tuple[object, ...]:
    """Fields of a ``SeenLayer``."""
    sizes, impl = (layer.num_heads, layer.num_kv_heads, layer.head_size, layer.head_size_v), layer.impl
    return layer.layer_name, index, sizes, layer.sliding_window, impl.plain, impl.shared, *heads
