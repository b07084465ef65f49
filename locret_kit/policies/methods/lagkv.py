"""LagKV, arXiv 2504.04704: keys and values unlike those that follow."""

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from ..base import Count, Entry, Positive, Score, Slots, wide
from ..registry import part, register


def lag_relative(x_BHPLD: Tensor, present_BHPL: Tensor) -> Tensor:
    """``softmax_L( std_D( (x - low) / (high - low) ) )``, ``[B, H, P - 1, L]``: partitions of ``L`` tokens; ``low``
    and ``high`` are the channel-wise extremes of the *next* partition. A channel that is constant in it counts as 0.
    Source: LagKV, arXiv 2504.04704, equations 4 to 8."""
    x_BHPLD = wide(x_BHPLD)
    there = present_BHPL[:, :, 1:, :, None]
    low = x_BHPLD[:, :, 1:].masked_fill(~there, float("inf")).amin(3, keepdim=True)
    span = x_BHPLD[:, :, 1:].masked_fill(~there, float("-inf")).amax(3, keepdim=True) - low
    relative = torch.where(span > 0, (x_BHPLD[:, :, :-1] - low) / span, 0.0)
    return relative.std(-1).masked_fill(~present_BHPL[:, :, :-1], float("-inf")).softmax(-1)


def lag_rank(k_BHPLD: Tensor, v_BHPLD: Tensor, present_BHPL: Tensor) -> Tensor:
    """Rank of each token in its partition over ``L`` (``[B, H, P - 1, L]``, in ``[0, 1)``) by the sum of the key's and the
    value's lag-relative score. Ranks make "the best of each partition" one order over the whole text."""
    score_BHPL = lag_relative(k_BHPLD, present_BHPL) + lag_relative(v_BHPLD, present_BHPL)
    order_BHPL = score_BHPL.argsort(dim=-1, stable=True)
    return order_BHPL.argsort(-1).float() / k_BHPLD.shape[3]


def on_grid(x_BHSD: Tensor, cell_BHS: Tensor, cells: int) -> Tensor:
    """Rows moved to their cell, ``[B, H, cells, D]``; cell ``cells`` is dropped, cells without a row are zero."""
    B, H, _, D = x_BHSD.shape
    index_BHSD = cell_BHS[..., None].expand_as(x_BHSD)
    return x_BHSD.new_zeros(B, H, cells + 1, D).scatter_(2, index_BHSD, x_BHSD)[:, :, :cells]


@part("score", "lagkv")
class LagKV(Score):
    """Rank of a token in its partition of the text by how widely its key and value spread over the range of the next
    partition. The last complete partition and what follows score 1, above every rank; the first ``sinks`` tokens score 2.

    A slot is scored once, when the partition after its own is complete, and keeps that: so every part of the text keeps
    an equal share, as in the paper's single pass. Source: LagKV, arXiv 2504.04704 (ranks: its implementation in kvpress)."""

    sinks: Count = 4
    lag: Positive = 128
    per_token: ClassVar[bool] = True

    def score_new_tokens(self, entry: Entry) -> Tensor:
        """Scores ``[B, H, T]`` until the next partition is complete; 2 for sinks, 1 otherwise."""
        return (1 + (entry.positions < self.sinks).float()).expand(entry.k.shape[:3])

    def score_slots(self, slots: Slots) -> Tensor:
        """Scores ``[B, H, S]``: ranks within partitions, once the next one is complete."""
        before, complete = ((n - self.sinks) // self.lag for n in (slots.seen - slots.since_eviction, slots.seen))
        first = max(0, before - 1)  # partitions below have their ranks since the last eviction
        if complete - 1 <= first:
            return slots.entry_scores
        origin, cells = self.sinks + first * self.lag, (complete - first) * self.lag
        place_BHS = slots.positions.long() - origin
        waiting_BHS = slots.valid & (slots.entry_scores == 1) & (place_BHS < cells - self.lag)
        new = slice(-min(slots.seen - origin, place_BHS.shape[-1]), None)  # no head holds more of these partitions
        inside_BHW = slots.valid[..., new] & (place_BHS[..., new] >= 0) & (place_BHS[..., new] < cells)
        cell_BHW = place_BHS[..., new].masked_fill(~inside_BHW, cells)

        def partitions(x_BHWD: Tensor) -> Tensor:
            return on_grid(x_BHWD, cell_BHW, cells).unflatten(2, (-1, self.lag))

        present_BHPL = partitions(inside_BHW[..., None].float())[..., 0] > 0
        rank = lag_rank(partitions(slots.keys()[:, :, new]), partitions(slots.values()[:, :, new]), present_BHPL)
        rank_BHW = F.pad(rank.flatten(2), (0, self.lag + 1)).gather(2, cell_BHW)
        slots.entry_scores[..., new] = rank_BHW.where(waiting_BHS[..., new], slots.entry_scores[..., new])
        return slots.entry_scores


register("lagkv", "LagKV, arXiv 2504.04704", {"score": LagKV()}, keeps="keys and values unlike those that follow")
