"""Scores by keys and values alone: the L2-norm strategy, arXiv 2406.11430 (keys of low norm receive most attention); KeyDiff,
arXiv 2504.15364 (keys unlike the others); LagKV, arXiv 2504.04704 (keys and values unlike those that follow)."""

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from ...backbones.rope import rotate
from ..base import Count, Entry, Positive, Score, Slots, wide
from ..registry import part, register


@part("score", "knorm")
class KNorm(Score):
    """The negated norm of the key as attention sees it: keys of low norm receive most attention. RoPE does not change a norm
    but by its factor on cos and sin, so it is fixed when the token enters. The weights of a norm after RoPE (Hunyuan) make it
    depend on the place: then it is that at the eviction. Source: L2-norm strategy, arXiv 2406.11430, section 3."""

    def score_new_tokens(self, entry: Entry) -> Tensor:
        """Scores ``[B, H, T]``: a low key norm scores high."""
        k = wide(entry.k)
        if entry.rope is not None:  # the factor lengthens only the part that is turned
            k = rotate(k, *entry.rope.tables(k.new_zeros(1), k.dtype))
        return -k.norm(dim=-1).float()

    def score_slots(self, slots: Slots) -> Tensor:
        """Scores ``[B, H, S]``: a low key norm scores high."""
        if slots.rope is None or slots.rope.weight_R is None:
            return slots.entry_scores
        return -wide(slots.keys()).norm(dim=-1).float()


register("knorm", "arXiv 2406.11430", {"score": KNorm()}, keeps="a small key")


def key_difference(k_BHSD: Tensor) -> Tensor:
    """``-cos(k_s, mean_j k_j / |k_j|)``, ``[B, H, S]``, of rotated keys; rows of zeros (padding) do not count.
    Source: KeyDiff, arXiv 2504.15364, equation of section 3.2 and algorithm 1."""
    unit_BHSD = F.normalize(wide(k_BHSD), dim=-1)
    anchor_BHD1 = F.normalize(unit_BHSD.sum(2), dim=-1)[..., None]
    return -(unit_BHSD @ anchor_BHD1)[..., 0]


@part("score", "keydiff")
class KeyDiff(Score):
    """Dissimilarity of a key to the mean direction of the keys held now. Source: KeyDiff, arXiv 2504.15364."""

    def score_slots(self, slots: Slots) -> Tensor:
        """Scores ``[B, H, S]``: dissimilarity to the mean key."""
        return key_difference(slots.keys()).float()


register("keydiff", "KeyDiff, arXiv 2504.15364", {"score": KeyDiff()}, keeps="a key unlike the others")


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
