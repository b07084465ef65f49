"""Stand-in for a model that another engine runs: its configuration, rotary embeddings, device, and attention as seen there.

The engine runs the model, so its layers are measured, not transformers' own.
"""

from collections.abc import Iterable, Iterator
from copy import deepcopy
from dataclasses import replace
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from .bfloat16 import lacks_bfloat16
from .decoder_attention import AttentionCall, DecoderAttention, Described, Rotation, rotaries_of, unrotate
from .identity import stored_weights
from .load import load_config, resolve_model
from .probe import assumed
from .recording import close
from .rotations import fits, rotation_between
from .spec import AttentionLayer, UnsupportedArchitecture, spec_of
from .undo import Undo

Heads = tuple[Tensor, Tensor]
"""Queries and keys ``[T, heads, D]``."""


class SeenLayer(NamedTuple):
    """Attention of one layer in the engine's forwards of the same tokens, from position 0 on."""

    name: str
    layer: int
    """Number of the decoder's layer."""
    sizes: tuple[int, int, int, int]
    """Heads of queries, heads of keys and values, channels of a key and of a value."""
    window: int | None
    plain: bool
    """Whether its softmax has a scaling alone."""
    shared: bool
    """Whether it reads another layer's rows."""
    unrotated: Heads
    """The arguments of attention where nothing is rotated."""
    shifted: Heads
    """The arguments of attention for the same tokens at other positions, without rotation."""
    rotated: Heads
    """The arguments of attention where queries and keys are rotated."""


def config_of_rank(config: PretrainedConfig, ranks: int) -> PretrainedConfig:
    """A model's configuration with the heads of one of ``ranks`` processes; itself where one has all.

    Raises:
        ValueError: key/value heads that cannot be shared out evenly.
    """
    if ranks == 1:
        return config
    own, spec = deepcopy(config), spec_of(config)
    if spec.n_kv_heads % ranks:
        raise ValueError(f"tensor_parallel_size={ranks} must divide the {spec.n_kv_heads} key/value heads")
    own.head_dim = spec.head_dim
    own.num_attention_heads, own.num_key_value_heads = spec.n_heads // ranks, spec.n_kv_heads // ranks
    return own


class StandIn(nn.Module, Described):
    """The language model of one of ``ranks`` processes that share its heads, for a cache. Its attention follows the configuration
    until the engine's was seen.

    Args:
        name: a folder or a repository of the Hub, with ``revision``.
    """

    def __init__(self, name: str, revision: str | None, ranks: int, dtype: torch.dtype, device: torch.device) -> None:
        from transformers import AutoModelForCausalLM

        super().__init__()
        config = load_config(name, revision)
        with torch.device("meta"):
            shell = AutoModelForCausalLM.from_config(deepcopy(config), dtype=torch.float32)
        self.name, self.names = name, [weight for weight, _ in shell.named_parameters()]
        self.config, self.dtype, self.device = config_of_rank(config, ranks), dtype, device
        for path, module in rotaries_of(shell.get_decoder()).items():
            if "." not in path:
                setattr(self, path, type(module)(config=deepcopy(config)).to(device))
        self.description = assumed(self.config, getattr(self, "rotary_emb", None))

    def get_decoder(self) -> Self:
        return self

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """The whole model's weights from its files, to tell models apart. The engine's own weights are joined and
        split.

        Raises:
            ValueError: they are no ``.safetensors`` files with transformers' names.
        """
        return map(nn.Parameter, stored_weights(resolve_model(self.name), self.names))

    @property
    def widens(self) -> bool:
        """Whether the processor must widen each number of the model's type."""
        return self.device.type == "cpu" and self.dtype == torch.bfloat16 and lacks_bfloat16()

    @staticmethod
    def unrotate(model: nn.Module) -> None:
        """Let rotary embeddings of the engine's model turn no token, where they are transformers' own."""
        unrotate(Undo(), model)

    def described(self, seen: Iterable[tuple[object, ...]]) -> DecoderAttention:
        """The description by what the engine's forward was seen to do: a ``SeenLayer`` for each call of attention.

        Raises:
            UnsupportedArchitecture: a layer whose attention the kit does not know, in one sentence.
        """
        longest = getattr(self.config, "max_position_embeddings", None)
        layers, calls, rotations = [], [], []
        for number, layer in enumerate(SeenLayer(*fields) for fields in seen):  # type: ignore[arg-type]
            # A window as long as the trained context never hides a token.
            window = None if longest and layer.window and layer.window >= longest else layer.window
            layers.append(AttentionLayer(*layer.sizes, window, index=layer.layer))
            calls.append(AttentionCall(layer.name, number, layer.shared, layer.plain))
            if not layer.shared:
                rotations.append(self._rotation(layer))
        spec = replace(self.description.spec, layers=tuple(layers), shared=any(call.shared for call in calls))
        return DecoderAttention(spec, tuple(calls), tuple(rotations))

    def _rotation(self, layer: SeenLayer) -> Rotation:
        """The rotation of a layer by transformers' frequencies, those that the configuration names first."""
        if any(_turns(a, b) for a, b in zip(layer.unrotated, layer.shifted, strict=True)):
            raise UnsupportedArchitecture(f"{layer.name} turns queries or keys by a rotation that cannot be left out")
        named, known = Rotation(), rotaries_of(self)
        if self.description.rotations:
            pairs = zip(self.description.spec.layers, self.description.rotations, strict=True)
            named = next((rotation for own, rotation in pairs if own.index == layer.layer), named)
        before, after = ([x.transpose(0, 1)[None] for x in pair] for pair in (layer.unrotated, layer.rotated))
        if (found := rotation_between(known, before, after, first=named.buffer)) is not None:
            return found
        # Chosen anew for each text by its length; vLLM chooses once, for the longest.
        kinds = getattr(known.get(named.module), "rope_type", None)
        if named.module and {"longrope", "dynamic"} & {*(kinds.values() if isinstance(kinds, dict) else [kinds])}:
            return named
        said = "transformers' frequencies of this configuration say"
        raise UnsupportedArchitecture(f"{layer.name} rotates otherwise than {said}")


def _turns(a: Tensor, b: Tensor) -> bool:
    """Whether vectors ``[T, heads, D]`` of one shape keep their lengths but not their directions."""
    return close(a.norm(dim=-1), b.norm(dim=-1)) and not fits(a.transpose(0, 1), b.transpose(0, 1))
