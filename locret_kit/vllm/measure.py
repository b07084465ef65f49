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
from vllm.model_executor.custom_op import CustomOp, op_registry_oot
from vllm.model_executor.layers import rotary_embedding as known
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.rotary_embedding import Phi3LongRoPEScaledRotaryEmbedding as LongRope
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase
from vllm.model_executor.models.utils import extract_layer_index

from .worker import State, Worker, is_bounded

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


# ---- rotary embeddings that leave queries and keys as they are -------------------------------------------------------


class Unrotated:
    """The forward of a rotary embedding, for engines that ask for a bounded cache."""

    unrotated = False

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self.unrotated = is_bounded()
        if self.unrotated:  # not a table of every position that there may be, which nobody reads
            table = self.cos_sin_cache[:TOKENS].clone()  # type: ignore[attr-defined, has-type]
            self.register_buffer("cos_sin_cache", table, persistent=False)  # type: ignore[attr-defined]

    def forward(
        self, positions: Tensor, query: Tensor, key: Tensor | None = None, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor | None]:
        """Rotated queries and keys, or unchanged ones for a bounded cache.

        Args:
            positions: [T]. query: [T, Q * D]. key: [T, H * D], or None for a layer that reads another's keys.
        """
        if self.unrotated:  # vLLM's definition is asked: of heads along an axis (LFM2) its call for CPUs turns others
            return self.forward_native(positions, query, key) if State.turns else (query, key)  # type: ignore[attr-defined, no-any-return]
        return super().forward(positions, query, key, *args, **kwargs)  # type: ignore[misc]


def register_rotary() -> None:
    """Let vLLM make embeddings that may leave queries and keys as they are."""
    for kind in known.__dict__.values():
        if isinstance(kind, type) and issubclass(kind, RotaryEmbeddingBase) and kind.__name__ not in op_registry_oot:
            CustomOp.register_oot(type(f"Unrotated{kind.__name__}", (Unrotated, kind), {}), name=kind.__name__)
    if not hasattr(LongRope, "unrotated"):
        _register_long_rope()


def _register_long_rope() -> None:
    """LongRoPE is no custom operation, so its class itself is told."""
    begin, turn = LongRope.__init__, LongRope.forward

    def init(self: LongRope, *args: object, **kwargs: object) -> None:
        begin(self, *args, **kwargs)
        self.unrotated = is_bounded()

    def forward(
        self: LongRope, positions: Tensor, query: Tensor, key: Tensor | None = None, *rest: object
    ) -> tuple[Tensor, Tensor | None]:
        """Rotated queries [T, Q * D] and keys [T, H * D], or unchanged ones for a bounded cache."""
        as_it_is = self.unrotated and not State.turns
        return (query, key) if as_it_is else turn(self, positions, query, key, *rest)

    LongRope.unrotated, LongRope.__init__, LongRope.forward = False, init, forward
