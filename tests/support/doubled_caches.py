"""Pieces that several tests of bounded cache share."""

from __future__ import annotations

from functools import cache

import torch
from policy_runs import distinct_tokens
from tiny_models import tiny_model


@cache
def doubled(family: str):
    return tiny_model(family).double()


def tokens(length: int, seed: int = 0, batch: int = 1) -> torch.Tensor:
    """A batch of texts that have no token twice."""
    return torch.tensor([distinct_tokens(length, 100 * seed + text) for text in range(batch)])
