"""Who makes the next token of a text: chosen once for a cache, by what its settings and the device allow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from ..backbones.releases import forward
from ..backbones.wrapped import unwrapped
from ..cache.bounded import BoundedCache
from ..cache.lanes import Packed
from .cpu_decoder import cpu_decoder
from .graph_decoder import GraphDecoder

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Decoder(Protocol):
    """Makes a token of each of several texts, or of one.

    Attributes:
        name: in ``cache.counters.decoding``.
    """

    name: str

    def takes(self, cache: BoundedCache) -> str | None:
        """Reason why a cache is decoded by the plain forward; None where it is not, as far as settings tell."""

    def ready(self, cache: BoundedCache) -> bool:
        """Whether the next token of a cache can come here."""

    def __call__(self, caches: Sequence[BoundedCache], tokens: Sequence[int]) -> Tensor:
        """Logits ``[texts, V]`` (float32) after one token more of each text."""


class DynamicDecoder:
    """The plain forward, which takes every cache at any token."""

    name = "dynamic"

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    def takes(self, cache: BoundedCache) -> str | None:
        return None

    def ready(self, cache: BoundedCache) -> bool:
        return True

    def __call__(self, caches: Sequence[BoundedCache], tokens: Sequence[int]) -> Tensor:
        ids = torch.tensor([tokens], device=self.model.device)
        return logits_after(self.model, caches, ids, [1] * len(caches)).float()


class Decoding:
    """The decoder of one cache. ``decoding(token)`` gives the logits ``[V]`` after a token.

    Args:
        model: attached.
        cache: bound to it, after its prompt.
        graph: True replays a CUDA graph for each token, None does so where it is possible, False never.

    Raises:
        ValueError: ``graph=True`` where it is not possible; says why. A reason may also show after a few tokens.
    """

    def __init__(self, model: PreTrainedModel, cache: BoundedCache, graph: bool | None = False) -> None:
        model = unwrapped(model)
        self._cache, self._graph, self._dynamic = cache, graph, DynamicDecoder(model)
        self._decoder: Decoder = self._dynamic
        chosen = _chosen(model, cache, graph)
        if isinstance(chosen, str):
            self._refuse(chosen)
        else:
            self._decoder, cache.counters.decoding = chosen, chosen.name

    def __call__(self, token: int) -> Tensor:
        return self.next_decoder()([self._cache], [token])[0]

    def next_decoder(self) -> Decoder:
        """The decoder of the next token: the plain forward where the chosen one is not ready."""
        if self._decoder.ready(self._cache):
            return self._decoder
        reason = self._decoder.takes(self._cache)
        if reason is not None:  # it was found on the way
            self._refuse(reason)
        return self._dynamic

    def _refuse(self, reason: str) -> None:
        if self._graph:
            raise ValueError(f"graph=True is not possible here: {reason}")
        self._decoder, self._cache.counters.decoding = self._dynamic, f"dynamic: {reason}"


def _chosen(model: PreTrainedModel, cache: BoundedCache, graph: bool | None) -> Decoder | str:
    """The decoder that is asked for on the model's device, or why it cannot be."""
    device = model.device.type
    decoder: Decoder | str
    if device == "cpu" and not graph:
        decoder = cpu_decoder(model, cache.context.heads)
    elif graph is False:
        return DynamicDecoder(model)
    else:
        decoder = GraphDecoder(model, cache) if device == "cuda" else f"CUDA graphs need a CUDA device, not {device}"
    return decoder if isinstance(decoder, str) else decoder.takes(cache) or decoder


def logits_after(
    model: PreTrainedModel, caches: Sequence[BoundedCache], ids_1T: Tensor, counts: Sequence[int]
) -> Tensor:
    """Logits ``[texts, V]`` in the model's type after the last new token of each text, in one forward.

    Args:
        model: attached.
        ids_1T: new tokens of the texts, end to end. counts: how many are each text's.
    """
    if len(caches) == 1:
        return forward(model, ids_1T, caches[0], logits_to_keep=1)[:, -1]
    if not caches[0].context.description.packs_texts:
        own = zip(caches, ids_1T.split(list(counts), 1), strict=True)
        return torch.cat([logits_after(model, [cache], ids, [ids.shape[1]]) for cache, ids in own])
    packed = Packed(caches, counts)
    last = torch.tensor(packed.last, device=model.device)
    return forward(model, ids_1T, packed, logits_to_keep=last)[0]
