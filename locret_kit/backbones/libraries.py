"""Differences between the releases of transformers, looked for in the library, not read off its version. ``backbones.TESTED``
says which releases were tried."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, LinearAttentionCacheLayerMixin
from transformers.masking_utils import create_causal_mask

from .wrapped import speaking

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
