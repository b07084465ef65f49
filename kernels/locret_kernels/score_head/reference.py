"""One layer's retaining head, ``fc2(act(fc1([q; k; v])))``: the definition, in torch. Source: Locret, section 3.2."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ..bounds import check_some

ACTIVATIONS = ("silu", "gelu_pytorch_tanh")


def score_head(
    q_BQTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, fc1_RE: Tensor, fc2_HR: Tensor, *, activation: str = "silu"
) -> Tensor:
    """Predicted importance ``[B, H, T]`` (float32) of tokens in each key/value head.

    Args:
        q_BQTD: queries, keys and values before RoPE.
        fc1_RE: ``E = (Q + 2 H) D`` columns in the order q, k, v, head after head; ``R`` is the hidden width.
        activation: one of ``ACTIVATIONS``.

    Raises:
        ValueError: an activation that is not there, or no token.
    """
    check_some("q", q_BQTD.shape[2], "tokens")
    x_BTE = torch.cat((q_BQTD, k_BHTD, v_BHTD), dim=1).transpose(1, 2).flatten(2).float()
    hidden_BTR = x_BTE @ fc1_RE.float().T
    return (apply(hidden_BTR, activation) @ fc2_HR.float().T).transpose(1, 2)


def apply(x: Tensor, activation: str) -> Tensor:
    """The activation by its name in a transformers configuration."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation={activation!r} must be one of: {', '.join(ACTIVATIONS)}")
    return F.silu(x) if activation == "silu" else F.gelu(x, approximate="tanh")
