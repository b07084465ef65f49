"""Pictures and text for TensorBoard: predicted against target importance, and the prompt with its kept tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import torch
from torch import Tensor
from torch.nn import functional as F

from ..config.reader import flattened
from ..config.train import TrainConfig


def ranks(score_RS: Tensor) -> Tensor:
    """Rank of each slot in its row, 0 (lowest) to 1: eviction compares slots within a head, so units do not matter."""
    order = score_RS.argsort(-1).argsort(-1)
    return order.float() / max(1, score_RS.shape[-1] - 1)


def cis_image(predicted_RS: Tensor, target_RS: Tensor, width: int = 768) -> Tensor:
    """``[1, height, <= width]`` in [0, 1]: rows of layers and heads, ranks predicted above ranks in truth.

    Long prompts are cut into ``width`` bins that show their highest slot.
    """
    both = torch.stack([ranks(predicted_RS.float()), ranks(target_RS.float())])
    if both.shape[-1] > width:
        both = F.adaptive_max_pool1d(both, width)
    tall = max(1, 256 // both.shape[1])
    above, below = both.repeat_interleave(tall, dim=1)
    line = torch.ones(4, both.shape[-1])
    return torch.cat([above, line, below]).unsqueeze(0)


def most_kept(predicted_RS: Tensor, fraction: float = 0.1) -> Tensor:
    """``[S]`` of bool: the ``fraction`` of slots that most heads would keep if each kept that fraction."""
    n = max(1, int(fraction * predicted_RS.shape[-1]))
    votes = torch.zeros_like(predicted_RS).scatter(-1, predicted_RS.topk(n, dim=-1).indices, 1.0).sum(0)
    votes += 0.5 * ranks(predicted_RS.mean(0, keepdim=True))[0]  # among equals, the higher mean score
    return torch.zeros_like(votes, dtype=torch.bool).scatter(0, votes.topk(n).indices, True)


def marked_text(tokens: Sequence[str], kept: Sequence[bool]) -> str:
    """The text as a Markdown code block; kept tokens stand between ⟦ and ⟧, neighbours together."""
    parts, inside = [], False
    for token, keep in zip(tokens, kept, strict=True):
        if keep != inside:
            parts.append("⟦" if keep else "⟧")
            inside = keep
        parts.append(token)
    text = "".join(parts) + ("⟧" if inside else "")
    return "\n".join("    " + line for line in text.split("\n"))


def flat(config: TrainConfig) -> dict[str, int | float | str]:
    """``{dotted key: value}`` of a configuration; values other than numbers and strings are written out."""
    return {k: v if isinstance(v, (int, float, str)) else str(v) for k, v in flattened(asdict(config)).items()}
