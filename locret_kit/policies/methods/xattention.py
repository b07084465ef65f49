"""XAttention, arXiv 2503.16428: blocks of attention chosen by sums over their antidiagonals."""

from typing import Annotated

import torch
from annotated_types import Interval
from torch import Tensor
from torch.nn import functional as F

from locret_kernels.sparse_attend import Blocks

from ..base import Positive, Sparse, wide
from ..registry import part, register
from .streaming import Recency


def antidiagonal_weights(q_BQTD: Tensor, k_BHSD: Tensor, scaling: float, stride: int) -> Tensor:
    """Softmax ``[B, Q, W, C]`` over squares of ``stride`` keys for every ``stride`` queries: of the sum over a square's
    antidiagonal, divided by ``stride``. Squares whose first key comes after their first query weigh nothing; a last square of
    fewer queries or keys is left out. Source: XAttention, algorithm 1."""
    (B, Q, T, D), (H, S) = q_BQTD.shape, k_BHSD.shape[1:3]
    W, C = T // stride, S // stride
    # Side by side, the queries of a stride in reverse and the keys of a stride have the antidiagonal's sum as their product.
    q = wide(q_BQTD[:, :, : W * stride]).unflatten(2, (W, stride)).flip(3).reshape(B, H, Q // H * W, stride * D)
    k = wide(k_BHSD[:, :, : C * stride]).reshape(B, H, C, stride * D)
    logits = (q @ k.transpose(-1, -2) * (scaling / stride)).view(B, Q, W, C)
    first_W, first_C = (stride * torch.arange(n, device=q.device) for n in (W, C))
    return logits.masked_fill_(first_C > (S - T) + first_W[:, None], float("-inf")).softmax(-1)


def fewest_blocks(score_BQNU: Tensor, always_NU: Tensor, threshold: float) -> Tensor:
    """Boolean ``[B, Q, N, U]``: the blocks of ``always``, and the fewest others whose scores bring the row's sum to
    ``threshold`` of the total. Ties go to the earlier block. Source: XAttention, ``find_blocks``."""
    first = score_BQNU.masked_fill(always_NU, float("inf"))  # so these head the order
    order = first.argsort(dim=-1, descending=True, stable=True)
    before = score_BQNU.gather(-1, order).cumsum(-1).roll(1, -1)  # the sum of all before a place
    before[..., 0] = 0
    wanted = threshold * score_BQNU.sum(-1, keepdim=True)
    return torch.zeros_like(first, dtype=torch.bool).scatter_(-1, order, before < wanted) | always_NU


@part("sparse", "antidiagonal")
class Antidiagonal(Sparse):
    """Blocks of ``block`` queries and keys, scored by their antidiagonals: every ``stride``-th key is paired with every
    ``stride``-th query counted from the other end. So a square of ``stride`` tokens has each of its rows and columns in one sum.
    A block of queries attends to the fewest blocks that hold ``threshold`` of its softmax, and to the first one and its own.

    Each chunk of a prompt chooses for its own queries, where the paper chooses for all at once. Blocks of queries begin with
    their chunk, blocks of keys with the rows. So one block of queries may have two of keys for its own. A block with fewer
    queries than a stride attends to everything. The paper's thresholds for each head by dynamic programming are not here.
    Source: XAttention, arXiv 2503.16428, algorithm 1 (the first block and the diagonal: its code).
    """

    threshold: Annotated[float, Interval(gt=0, le=1)] = 0.9
    """Share of the estimated attention that the chosen blocks hold."""
    stride: Positive = 16
    """Tokens; divides ``block``."""
    block: Positive = 128
    """Tokens."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block % self.stride:
            raise ValueError(f"sparse=antidiagonal: stride={self.stride} must divide block={self.block}")

    def choose(self, layer: int, heads: slice, q_BQTD: Tensor, k_BHSD: Tensor, scaling: float) -> Blocks:
        """The blocks of rows of each block of queries."""
        T, S, size = q_BQTD.shape[2], k_BHSD.shape[2], self.block
        N, U, per = -(-T // size), -(-S // size), size // self.stride
        weights = antidiagonal_weights(q_BQTD, k_BHSD, scaling, self.stride)  # [B, Q, W, C]
        weights = F.pad(weights, (0, U * per - weights.shape[3], 0, N * per - weights.shape[2]))
        score_BQNU = weights.unflatten(3, (U, per)).sum(-1).unflatten(2, (N, per)).sum(3)
        start_N, start_U = (size * torch.arange(n, device=q_BQTD.device) for n in (N, U))
        first_N1 = (S - T + start_N)[:, None]
        last_N1 = (S - T + (start_N + size).clamp(max=T) - 1)[:, None]  # rows of a block's first and last query
        own_NU = (start_U <= last_N1) & (start_U + size > first_N1)
        few_N1 = ((T - start_N) < self.stride)[:, None]
        always_NU = own_NU | (start_U == 0) | few_N1
        seen_BQNU = fewest_blocks(score_BQNU, always_NU, self.threshold)
        return Blocks(seen_BQNU & (start_U <= last_N1), size, size)


register(
    "xattention",
    "XAttention, arXiv 2503.16428",
    {"score": Recency(), "sparse": Antidiagonal()},
    keeps_everything=True,
    keeps="nothing is evicted; each chunk computes the fewest blocks that hold 90% of what antidiagonals estimate",
)
