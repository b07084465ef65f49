"""Other libraries: changes of a model that can be taken back, models that a library wraps, and the releases of transformers."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, cast

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, LinearAttentionCacheLayerMixin
from transformers.masking_utils import create_causal_mask

# ---- changes of a model that can be taken back, whatever interrupts them --------------------------------------------


class Undo:
    """Steps that restore a model. Each is added *before* the change that it takes back, and may run more than once: so an
    interrupt (Ctrl-C) between any two instructions loses none."""

    def __init__(self) -> None:
        self._steps: list[Callable[[], None]] = []

    def __bool__(self) -> bool:
        """Whether anything is left to restore."""
        return bool(self._steps)

    def add(self, step: Callable[[], None]) -> None:
        """Run ``step`` before the steps that are here already."""
        self._steps.append(step)

    def run(self) -> None:
        """Run every step, the newest first. An interrupted step runs again. Exceptions are raised after the last
        step."""
        raised: BaseException | None = None
        while self._steps:
            try:
                self._steps[-1]()
                self._steps.pop()
            except Exception as error:  # a step that fails would fail again
                self._steps.pop()
                raised = raised or error
            except BaseException as error:
                raised = raised or error
        if raised is not None:
            raise raised


def replace_forward(undo: Undo, module: nn.Module, forward: Callable[..., object]) -> None:
    """Let ``module`` run ``forward(its own forward, *args, **kwargs)`` until ``undo``."""
    shadowed = module.__dict__.get("forward")  # accelerate puts its own there

    def restore() -> None:
        if shadowed is None:
            module.__dict__.pop("forward", None)
        else:
            module.forward = shadowed

    undo.add(restore)
    module.forward = wraps(module.forward)(partial(forward, module.forward))


def has_own_forward(module: nn.Module) -> bool:
    """Whether a module's forward is its class's own. ``replace_forward`` may wrap it, but the class's method must be
    defined in the class, not patched by a program."""
    forward, own = module.__dict__.get("forward"), type(module).forward
    home = next(kind for kind in type(module).__mro__ if "forward" in kind.__dict__)
    while getattr(getattr(forward, "func", None), "__module__", "").startswith(__package__):
        forward = forward.__wrapped__  # type: ignore[union-attr]
    return own.__module__ == home.__module__ and (forward is None or getattr(forward, "__func__", None) is own)


# ---- models that another library wraps ----


LIBRARIES = ("torch", "peft", "deepspeed", "lightning", "pytorch_lightning")
INNER = ("_orig_mod", "module", "base_model", "model", "_forward_module")
"""Attributes of wrappers that hold the model: ``torch.compile``, parallelism, PEFT (two), Fabric."""
SHARDED = ("FullyShardedDataParallel", "FSDPModule")


def unwrapped(model: PreTrainedModel) -> PreTrainedModel:
    """The transformers model inside wrappers; PEFT adapters within its layers stay. An object that is no module but
    has a ``config`` is returned unchanged.

    Raises:
        ValueError: an unknown wrapper, or one that acts outside the model or holds its weights.
    """
    inner: Any = model
    while True:
        name, library = type(inner).__name__, type(inner).__module__.partition(".")[0]
        if any(kind.__name__ in SHARDED for kind in type(inner).__mro__):
            raise ValueError(
                f"{name} keeps its weights in shards: pass the model before it is sharded, whole on each rank"
            )
        known = isinstance(inner, PreTrainedModel) or (hasattr(inner, "config") and not isinstance(inner, nn.Module))
        if known or hasattr(inner, "description"):  # a stand-in (``Described``) has one
            return cast(PreTrainedModel, inner)
        held = [x for key, x in getattr(inner, "_modules", {}).items() if key in INNER and library in LIBRARIES]
        if not held:
            raise ValueError(f"{name} is neither a model of transformers nor a known wrapper: pass the model itself")
        if library == "peft":
            _check_adapters(inner)
        inner = held[0]


def speaking(model: PreTrainedModel) -> PreTrainedModel:
    """The model inside of wrappers, as ``unwrapped``. Raises ValueError where it makes no logits of the next token too."""
    inner = unwrapped(model)
    if isinstance(inner, PreTrainedModel) and not inner.can_generate():
        raise ValueError(f"{type(inner).__name__} gives no tokens: pass a model with its language model's head")
    return inner


def _check_adapters(model: Any) -> None:
    """Raise ValueError if a PEFT adapter acts on the text outside the layers."""
    for name in model.active_adapters:
        config = model.peft_config[name]
        kind = str(config.peft_type).removeprefix("PeftType.")
        beside = config.is_prompt_learning or kind == "XLORA" or getattr(config, "alora_invocation_tokens", None)
        if beside:
            raise ValueError(
                f"{type(model).__name__}: adapter {name!r} ({kind}) acts outside the layers, where no bounded cache sees it: "
                "pass the model without it, or one with LoRA"
            )


def run_eagerly(undo: Undo, model: nn.Module) -> None:
    """Let modules run as they were before ``torch.compile`` until ``undo``: a graph would end in each layer's attention."""
    for module in model.modules():
        forward, call = module.__dict__.get("forward"), module._compiled_call_impl
        if (own := getattr(forward, "_torchdynamo_orig_callable", None)) is not None:
            undo.add(partial(setattr, module, "forward", forward))
            module.forward = own
        if call is not None:
            undo.add(partial(setattr, module, "_compiled_call_impl", call))
            module._compiled_call_impl = None


# ---- differences between the releases of transformers, looked for in the library, not read off its version ----------

# ``backbones.TESTED`` says which releases were tried.

CACHE = "cache" if "cache" in inspect.signature(create_causal_mask).parameters else "past_key_values"
"""Argument of a forward that takes the cache: ``past_key_values`` before transformers 5.24, ``cache`` from it on."""

ASKED_FOR_STATES = hasattr(Cache, "get_conv_state")
"""Whether modules ask a cache for their states; before transformers 5.21 they take them off its layers."""


def forward(model: PreTrainedModel, ids_BT: Tensor, cache: Cache, **rest: object) -> Tensor:
    """Logits ``[B, T, V]`` of new tokens ``[B, T]`` after those that the cache has read; ``rest`` goes to the model's forward."""
    return speaking(model)(input_ids=ids_BT, use_cache=True, **{CACHE: cache}, **rest).logits


def cache_among(args: Sequence[object], kwargs: Mapping[str, object]) -> Cache | None:
    """The cache among a forward's arguments, whatever its name; None without one."""
    return next((value for value in (*args, *kwargs.values()) if isinstance(value, Cache)), None)


@dataclass(frozen=True)
class LayerKind:
    """Words of a configuration about one layer."""

    config: PreTrainedConfig
    """Configuration of the layer, where layers differ in their sizes."""
    name: str
    window: int | None
    reads_another: bool
    """Whether it attends to another layer's keys and values."""

    @property
    def holds_state(self) -> bool:
        """Whether it has a state of constant size."""
        return self.name in ("linear_attention", "conv", "mamba", "hybrid", "hybrid_sliding")

    @property
    def has_rows(self) -> bool:
        """Whether it has keys and values of its own."""
        return not self.reads_another and self.name not in ("linear_attention", "conv", "mamba", "moe", "mlp", "dummy")

    @property
    def chunked(self) -> bool:
        """Whether its window is a stretch between two multiples of it."""
        return self.name == "chunked_attention"


def layer_kinds(config: PreTrainedConfig) -> list[LayerKind]:
    """Kinds of a decoder's layers, by the rule of transformers' own caches. Releases before 5.20 know no sizes by layer."""
    own = getattr(config, "per_layer_config", None) or [config] * config.num_hidden_layers
    names = getattr(config, "layer_types", None)
    modes = getattr(config, "kv_sharing_modes", None) or [None] * len(own)
    kinds = []
    for i, (one, mode) in enumerate(zip(own, modes, strict=False)):
        window, chunk = getattr(one, "sliding_window", None), getattr(one, "attention_chunk_size", None)
        inferred = "full_attention" if not (window or chunk) else "sliding_attention" if window else "chunked_attention"
        name = names[i] if names else inferred
        within = {"sliding_attention": window, "hybrid_sliding": window, "chunked_attention": chunk}.get(name)
        kinds.append(LayerKind(one, name, within, mode == "reuse"))
    return kinds


def holds_states(cache: Cache) -> tuple[int, ...]:
    """Layers of transformers' own cache that hold a state of constant size."""
    return tuple(i for i, layer in enumerate(cache.layers) if isinstance(layer, LinearAttentionCacheLayerMixin))
