"""Differences between the releases of transformers, in one place: looked for in the library, not read off its version."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache
from transformers.masking_utils import create_causal_mask

CACHE = "cache" if "cache" in inspect.signature(create_causal_mask).parameters else "past_key_values"
"""Argument of a forward that takes the cache: ``past_key_values`` before transformers 5.24, ``cache`` from it on."""


def forward(model: Any, ids_BT: Tensor, cache: Cache, **rest: Any) -> Any:
    """The model's output for new tokens ``[B, T]`` after those that the cache has read; ``rest`` goes to its forward."""
    return model(input_ids=ids_BT, use_cache=True, **{CACHE: cache}, **rest)


def cache_among(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Cache | None:
    """The cache among a forward's arguments, whatever its name; None without one."""
    return next((value for value in (*args, *kwargs.values()) if isinstance(value, Cache)), None)
