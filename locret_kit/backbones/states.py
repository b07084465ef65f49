"""States of constant size of layers that are no attention: state spaces, linear attention, short convolutions.

They live in transformers' own cache layers, which the backbone's modules write. A text's states are one object, so that whoever
copies, saves or forgets the text's rows does the same with them.
"""

from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache

from .spec import BackboneSpec, text_config


class States:
    """States of one text.

    Attributes:
        cache: transformers' own; only its layers with a state are used.
    """

    def __init__(self, cache: DynamicCache) -> None:
        self.cache = cache

    @classmethod
    def of(cls, model: PreTrainedModel, spec: BackboneSpec) -> Self | None:
        """States of an empty text; None if the backbone has attention alone."""
        return cls(DynamicCache(config=text_config(model))) if spec.states else None

    def tensors(self) -> dict[str, Tensor]:
        """States of any shape by name ``states.LAYER.KIND.NUMBER``, of the layers that have started."""
        found = {}
        for index, layer in enumerate(self.cache.layers):
            for kind in ("conv_states", "recurrent_states"):
                for number, state in getattr(layer, kind, {}).items():
                    if state is not None:
                        found[f"states.{index}.{kind}.{number}"] = state
        return found

    @torch.inference_mode(False)  # states are written outside of it
    def fill(self, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        """Load the states that ``tensors`` returned, of any shape, into an empty text."""
        for name, state in tensors.items():
            _, index, kind, number = name.split(".")
            layer: Any = self.cache.layers[int(index)]
            own = state.to(device, copy=True)
            layer.lazy_initialization(**{kind: own, "state_idx": int(number)})
            getattr(layer, kind)[int(number)].copy_(own)
            layer.has_previous_state[int(number)] = True

    @property
    def nbytes(self) -> int:
        """Bytes of all states."""
        return sum(state.nbytes for state in self.tensors().values())


class StatefulCache(Cache):
    """A cache whose layers hold attention alone. The states of other layers are in the text's ``States``."""

    def _states(self) -> States | None:
        """None if the backbone has attention alone, or is not known yet."""
        raise NotImplementedError

    def get_conv_state(self, *args: int, **named: int) -> Tensor | None:
        """A layer's convolution state, of any shape, or None."""
        return self._own_layers().get_conv_state(*args, **named)

    def update_conv_state(self, conv_states: Tensor, *args: int, **named: int) -> Tensor:
        """Store a layer's convolution state, of any shape, and return it."""
        with torch.inference_mode(False):  # one that begins in inference mode is written outside of it too
            return self._own_layers().update_conv_state(conv_states, *args, **named)

    def get_recurrent_state(self, *args: int, **named: int) -> Tensor | None:
        """A layer's recurrent state, of any shape, or None."""
        return self._own_layers().get_recurrent_state(*args, **named)

    def update_recurrent_state(self, recurrent_states: Tensor, *args: int, **named: int) -> Tensor:
        """Store a layer's recurrent state, of any shape, and return it."""
        with torch.inference_mode(False):
            return self._own_layers().update_recurrent_state(recurrent_states, *args, **named)

    def has_previous_state(self, *args: int | None, **named: int | None) -> bool:
        states = self._states()
        return states is not None and bool(states.cache.has_previous_state(*args, **named))

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def _own_layers(self) -> Cache:
        if (states := self._states()) is None:
            raise ValueError("a layer asks for its state, which this cache was not made for")
        return states.cache
