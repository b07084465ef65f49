"""MInference 1.0, arXiv 2407.02490: each head has its own attention pattern, whose positions are estimated from the
newest queries."""

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from locret_kernels.attend import Blocks

from ...backbones.spec import BackboneSpec
from ...files import read_json
from ..base import Count, Positive, Sparse, wide
from ..registry import part, register
from .streaming import Recency

BLOCK = 64
"""Queries of a block, and rows of a tile."""
FIRST, NEAREST = 30, 100
"""Columns from the first on, and diagonals from the query's own on, that a head always has."""
LEAST = 50
"""Diagonals at least."""
POOLED = 100
"""Tiles of a block of queries where a head's pattern is ``block_sparse``."""
KINDS = ("vertical_and_slash", "stream_llm", "block_sparse")


class Pattern(NamedTuple):
    """Pattern of one head."""

    kind: str
    """Name of the pattern, in ``KINDS``."""
    vertical: int
    """Columns; for ``stream_llm`` the first tokens."""
    slash: int
    """Diagonals; for ``stream_llm`` the newest tokens."""


Patterns = list[dict[int, Pattern]]
"""Per layer, by query head."""


def read_patterns(path: str) -> Patterns:
    """Patterns in MInference's format: a list with an object per layer, ``{"head": [pattern, vertical, slash, score]}``.

    Raises:
        ValueError: no such file or another format; names file, layer and head.
    """
    try:
        layers = read_json(Path(path))
    except OSError as error:
        raise ValueError(f"patterns={path!r}: {error.strerror}") from error
    if not isinstance(layers, list) or not all(isinstance(one, dict) for one in layers):
        raise ValueError(f"patterns={path!r} must hold a list with an object per layer")
    return [dict(_read(f"patterns={path!r}, layer {n}", *item) for item in one.items()) for n, one in enumerate(layers)]


def _read(where: str, head: str, given: object) -> tuple[int, Pattern]:
    """Number and pattern of a head."""
    if not head.isascii() or not head.isdigit():
        raise ValueError(f"{where}: head {head!r} must be a number")
    match given:
        case [str(kind), int(vertical), int(slash), *_] if kind in KINDS and vertical >= 0 and slash >= 0:
            return int(head), Pattern(kind, vertical, slash)
    form = f"[PATTERN, VERTICAL, SLASH, SCORE], with one of: {', '.join(KINDS)}"
    raise ValueError(f"{where}, head {head}: {given!r} must be {form}")


def newest_weights(q_BQTD: Tensor, k_BHSD: Tensor, scaling: float, newest: int) -> Tensor:
    """Attention ``[B, Q, L, S]`` of the newest ``L <= newest`` queries to the rows that they see."""
    (B, Q, T, D), (H, S) = q_BQTD.shape, k_BHSD.shape[1:3]
    L = min(newest, T)
    q = wide(q_BQTD[:, :, T - L :]).reshape(B, H, Q // H * L, D)
    logits = (q @ wide(k_BHSD).transpose(-1, -2) * scaling).view(B, Q, L, S)
    own_L = torch.arange(S - L, S, device=q.device)
    return logits.masked_fill_(torch.arange(S, device=q.device) > own_L[:, None], float("-inf")).softmax(-1)


def diagonal_sums(weight_BQLS: Tensor) -> Tensor:
    """Sums ``[B, Q, S]`` over the diagonals, by how far a row lies before the query: 0 is the query's own."""
    L, S = weight_BQLS.shape[2:]
    # Query l has its own row at S - L + l: shifted by L - 1 - l, all diagonals are columns.
    padded = F.pad(weight_BQLS.flip(2), (0, L)).flatten(2)  # [..., L * (S + L)], the newest query first
    shifted = padded[..., : L * (S + L - 1)].unflatten(2, (L, S + L - 1))  # each query one further to the right
    return shifted.sum(2)[..., :S].flip(-1)


def largest(score_BQS: Tensor, count_Q: Tensor) -> Tensor:
    """Boolean ``[B, Q, S]``: the ``count`` largest of every head, of equals the earlier ones."""
    order = score_BQS.argsort(dim=-1, descending=True, stable=True)
    rank_S = torch.arange(score_BQS.shape[-1], device=score_BQS.device)
    chosen = (rank_S < count_Q[:, None]).expand_as(order)
    return torch.zeros_like(chosen).scatter_(-1, order, chosen)


def rows_of_diagonals(offset_BQS: Tensor, first_N: Tensor) -> Tensor:
    """Boolean ``[B, Q, N, S]``: the rows of a block whose first query has row ``first``: all ``BLOCK`` rows of each diagonal."""
    S = offset_BQS.shape[-1]
    # Row r lies on diagonals first - r to first - r + BLOCK - 1 of the block's queries.
    until = F.pad(offset_BQS.int().cumsum(-1, dtype=torch.int32), (1, 0))  # [B, Q, S + 1]: chosen ones before an offset
    low_NS = first_N[:, None] - torch.arange(S, device=offset_BQS.device)
    low, high = low_NS.clamp(0, S).flatten(), (low_NS + BLOCK).clamp(0, S).flatten()
    return (until[..., high] > until[..., low]).unflatten(-1, low_NS.shape)


def pooled_tiles(q_BQTD: Tensor, k_BHSD: Tensor, scaling: float) -> Tensor:
    """Boolean ``[B, Q, N, S]``: the ``POOLED`` tiles of rows with the largest products of mean query and mean key."""
    (B, Q, T, D), (H, S) = q_BQTD.shape, k_BHSD.shape[1:3]
    q, k = (_means(wide(x)) for x in (q_BQTD, k_BHSD))  # [B, Q, N, D], [B, H, U, D]
    logits = (q.reshape(B, H, -1, D) @ k.transpose(-1, -2) * scaling).view(B, Q, q.shape[2], k.shape[2])
    start_N, start_U = (BLOCK * torch.arange(n, device=q.device) for n in logits.shape[2:])
    hidden = start_U > (S - T) + start_N[:, None]
    place = logits.masked_fill(hidden, float("-inf")).argsort(dim=-1, descending=True, stable=True).argsort(-1)
    return ((place < POOLED) & ~hidden).repeat_interleave(BLOCK, -1)[..., :S]


def _means(x_BHSD: Tensor) -> Tensor:
    """Means over blocks of rows; of a last one over the rows that it has."""
    tiles = F.pad(x_BHSD, (0, 0, 0, -x_BHSD.shape[2] % BLOCK)).unflatten(2, (-1, BLOCK)).sum(3)
    count = torch.full((tiles.shape[2], 1), float(BLOCK), dtype=tiles.dtype, device=tiles.device)
    count[-1] = (x_BHSD.shape[2] - 1) % BLOCK + 1
    return tiles / count


@part("sparse", "vertical-slash")
class VerticalSlash(Sparse):
    """A chunk's queries see the ``vertical`` columns and ``slash`` diagonals with the most attention from the
    chunk's newest ``last`` queries, including always the first 30 columns and the nearest 100 diagonals. Diagonals
    are computed in tiles: a block of 64 queries attends to all rows that one of them reaches on it.

    The paper estimates once, by the last queries of the whole prompt. Here each chunk estimates for itself, by
    queries nearer to its text. The defaults are the paper's for contexts of 128K; at 8K they compute almost
    everything. Source: MInference 1.0, arXiv 2407.02490, algorithm 2 and its code (its other patterns need a file of
    measured heads).
    """

    vertical: Count = 1000
    """Columns of a head."""
    slash: Count = 6096
    """Diagonals of a head."""
    last: Positive = 64
    """Queries that estimate."""
    patterns: str | None = None
    """File of patterns for each layer and query head, in MInference's format: heads it does not name have the two above."""

    @cached_property
    def _patterns(self) -> Patterns:
        """Read when a backbone is bound, not when a policy is parsed, whose text may come with a saved cache."""
        return [] if self.patterns is None else read_patterns(self.patterns)

    def bind(self, spec: BackboneSpec) -> None:
        """Read the patterns. Raise ValueError for no such file, or patterns of a backbone with other layers or fewer heads."""
        said, layers = f"patterns={self.patterns!r}", len(self._patterns)
        if self.patterns is not None and layers != spec.n_layers:
            raise ValueError(f"{said} has {layers} layers, and the backbone {spec.n_layers}")
        max_head = max((head for one in self._patterns for head in one), default=0)
        if max_head >= spec.n_heads:
            raise ValueError(f"{said} names head {max_head}, and the backbone has {spec.n_heads}")

    def of_heads(self, layer: int, heads: slice) -> list[Pattern]:
        """The patterns of some query heads of a layer."""
        given: Mapping[int, Pattern] = self._patterns[layer] if self._patterns else {}
        own = Pattern(KINDS[0], self.vertical, self.slash)
        return [given.get(head, own) for head in range(heads.start, heads.stop)]

    def choose(self, layer: int, heads: slice, q_BQTD: Tensor, k_BHSD: Tensor, scaling: float) -> Blocks:
        """The rows of each block of queries."""
        T, S, device = q_BQTD.shape[2], k_BHSD.shape[2], q_BQTD.device
        patterns = self.of_heads(layer, heads)
        kind_Q = torch.tensor([KINDS.index(one.kind) for one in patterns], device=device)
        vertical_Q, slash_Q = (torch.tensor(n, device=device) for n in zip(*(one[1:] for one in patterns), strict=True))
        weight_BQLS = newest_weights(q_BQTD, k_BHSD, scaling, self.last)
        column_BQS, offset_BQS = weight_BQLS.sum(2), diagonal_sums(weight_BQLS)
        column_BQS[..., :FIRST] = offset_BQS[..., :NEAREST] = float("inf")
        column_BQS = largest(column_BQS, vertical_Q.clamp(min=FIRST))
        offset_BQS = largest(offset_BQS, slash_Q.clamp(min=LEAST))
        if (kind_Q == 1).any():  # a window and the first tokens are columns and diagonals too
            place_S, ends = torch.arange(S, device=device), (kind_Q == 1)[:, None]
            column_BQS = torch.where(ends, place_S < vertical_Q[:, None], column_BQS)
            offset_BQS = torch.where(ends, place_S < slash_Q[:, None], offset_BQS)
        first_N = torch.arange(S - T, S, BLOCK, device=device)
        seen_BQNS = column_BQS[:, :, None] | rows_of_diagonals(offset_BQS, first_N)
        if (kind_Q == 2).any():
            seen_BQNS = torch.where((kind_Q == 2)[:, None, None], pooled_tiles(q_BQTD, k_BHSD, scaling), seen_BQNS)
        rows_S = torch.arange(S, device=device)
        own_NS = (rows_S >= first_N[:, None]) & (rows_S < first_N[:, None] + BLOCK)
        return Blocks((seen_BQNS | own_NS) & (rows_S < first_N[:, None] + BLOCK), BLOCK, 1)


register(
    "minference",
    "MInference, arXiv 2407.02490",
    {"score": Recency(), "sparse": VerticalSlash()},
    keeps_everything=True,
    keeps="nothing is evicted; each chunk computes the columns and diagonals that its last 64 queries attend to most",
)
