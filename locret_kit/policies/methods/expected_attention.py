"""Expected Attention, arXiv 2510.00636: attention expected of the queries to come."""

from collections.abc import Mapping, MutableMapping
from typing import Annotated, ClassVar

import torch
from annotated_types import Ge
from torch import Tensor

from ...backbones.rope import rotate
from ..base import Count, Entry, Positive, Score, Slots, wide
from ..registry import part, register


def add_moments(memory: MutableMapping[str, Tensor], q_BQTD: Tensor) -> None:
    """Merge a block of queries into their running ``count`` ``[B]``, ``mean`` ``[B, Q, D]`` and ``scatter`` (sum of outer
    products about the mean) ``[B, Q, D, D]``. Source: Chan, Golub and LeVeque's pairwise update."""
    q_BQTD = wide(q_BQTD)
    B, T = q_BQTD.shape[0], q_BQTD.shape[2]
    if T == 0:
        return
    mean_BQD = q_BQTD.mean(2)
    centred_BQTD = q_BQTD - mean_BQD[:, :, None]
    scatter_BQDD = centred_BQTD.mT @ centred_BQTD
    before_B = memory.get("count", q_BQTD.new_zeros(B))
    known_BQD = memory.get("mean", torch.zeros_like(mean_BQD))
    known_BQDD = memory.get("scatter", torch.zeros_like(scatter_BQDD))
    shift_BQD, share_B11 = mean_BQD - known_BQD, (T / (before_B + T))[:, None, None]
    outer_BQDD = shift_BQD[..., :, None] * shift_BQD[..., None, :]
    memory["scatter"] = known_BQDD + scatter_BQDD + outer_BQDD * (before_B[:, None, None] * share_B11)[..., None]
    memory["mean"], memory["count"] = known_BQD + shift_BQD * share_B11, before_B + T


def expected_attention(
    mean_BHGD: Tensor, covariance_BHGDD: Tensor, k_BHSD: Tensor, among_BHS: Tensor, scaling: float
) -> Tensor:
    """Attention ``[B, H, S]`` that a Gaussian query is expected to pay, softmax over the slots of ``among``, mean over the
    group: ``softmax_s( c k.mean + c^2 / 2 k.covariance.k )``, ``c`` = ``scaling``.
    Source: Expected Attention, arXiv 2510.00636, section 3 (``E[exp(x)] = exp(mean + variance / 2)``)."""
    k_BH1SD = wide(k_BHSD)[:, :, None]
    variance_BHGS = ((k_BH1SD @ covariance_BHGDD) * k_BH1SD).sum(-1)
    logits_BHGS = scaling * (k_BH1SD @ mean_BHGD[..., None])[..., 0] + scaling**2 / 2 * variance_BHGS
    return logits_BHGS.masked_fill(~among_BHS[:, :, None], float("-inf")).softmax(-1).mean(2).nan_to_num(0.0)


@part("score", "expected-attention")
class ExpectedAttention(Score):
    """Attention that the queries of the next ``future`` positions are expected to pay to a slot, plus ``epsilon``, times
    the norm of its value unless ``value_norm`` is off. Queries are Gaussian with mean and covariance of all queries of the
    text so far, turned by the mean rotation of those positions. The first ``sinks`` tokens are left out and kept.
    Source: Expected Attention, arXiv 2510.00636."""

    sinks: Count = 4
    future: Positive = 512
    epsilon: Annotated[float, Ge(0)] = 0.0
    value_norm: bool = True
    needs_unrotated: ClassVar[bool] = True

    def memory(self, seen: int) -> Mapping[str, str]:
        return {"count": "B", "mean": "BQD", "scatter": "BQDD"} if seen > self.sinks else {}

    def score_new_tokens(self, entry: Entry) -> None:
        add_moments(entry.state, entry.q[:, :, max(0, self.sinks - entry.position) :])

    def score_slots(self, slots: Slots) -> Tensor:
        """Scores ``[B, H, S]``: the expected attention of future queries."""
        assert slots.rope is not None and slots.next_position is not None  # needs_unrotated
        among_BHS = slots.valid & (slots.positions >= self.sinks)
        if slots.seen <= self.sinks:
            return slots.entry_scores
        B, H = slots.positions.shape[:2]
        mean_BHGD = slots.state["mean"].unflatten(1, (H, -1))
        covariance_BHGDD = (slots.state["scatter"] / slots.state["count"].view(B, 1, 1, 1)).unflatten(1, (H, -1))
        ahead_BHN = slots.next_position[..., None] + torch.arange(self.future, device=mean_BHGD.device)
        tables = slots.rope.of_queries.tables(ahead_BHN.flatten(), mean_BHGD.dtype)
        cos_BH1R, sin_BH1R = (x.view(B, H, self.future, -1).mean(2, keepdim=True) for x in tables)
        turn = cos_BH1R[:, :, None], sin_BH1R[:, :, None]
        moments = rotate(mean_BHGD, cos_BH1R, sin_BH1R), rotate(rotate(covariance_BHGDD, *turn).mT, *turn)
        score_BHS = expected_attention(*moments, slots.keys(), among_BHS, slots.softmax.scaling)
        if self.value_norm:
            score_BHS = (score_BHS + self.epsilon) * wide(slots.values()).norm(dim=-1)
        return torch.where(among_BHS, score_BHS, score_BHS.max() + 1).float()


register(
    "expected-attention",
    "Expected Attention, arXiv 2510.00636",
    {"score": ExpectedAttention()},
    keeps="the attention that later queries are expected to pay",
)
