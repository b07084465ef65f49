"""The plain forward, which takes every cache at any token."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...backbones.libraries import forward
from ...cache.batch import Packed
from ...cache.bounded import BoundedCache


class PlainDriver:
    """One forward for a token of each text."""

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
    last = torch.tensor(packed.ends, device=model.device) - 1
    return forward(model, ids_1T, packed, logits_to_keep=last)[0]
