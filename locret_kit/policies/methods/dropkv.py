"""DropKV: what attention's output loses when one slot is dropped, exactly."""

import torch
from torch import Tensor

from ...backbones.handlers import Softmax
from ..attention import attention_of_each, of_recent_queries
from ..base import Positive, Slots, Weight, wide
from ..registry import Window, part, register


def drop_residual(q_BQWD: Tensor, k_BHSD: Tensor, v_BHSD: Tensor, softmax: Softmax) -> Tensor:
    """Squared change ``[B, H, S]`` (float32) of attention's output when one slot is dropped, ``(p / (1 - p))^2 |v -
    o|^2``: sum over the ``W`` queries, mean over the group. The last query sees all slots, each earlier one a slot
    less. A query that sees a single slot counts 0, since it has no output without the slot."""
    v_BHSD, p_BHGWS = wide(v_BHSD), attention_of_each(q_BQWD, k_BHSD, softmax)
    B, H, S, _ = v_BHSD.shape
    W = q_BQWD.shape[2]
    o_BHGWD = p_BHGWS @ v_BHSD[:, :, None]
    odds_BHGWS = p_BHGWS / (1 - p_BHGWS).clamp_min(torch.finfo(p_BHGWS.dtype).eps)
    out_BHS = v_BHSD.new_zeros(B, H, S)
    for w in range(W):  # differences of all queries at once would be W times the values
        distance_BHGS = (v_BHSD[:, :, None] - o_BHGWD[..., w : w + 1, :]).square().sum(-1)
        out_BHS += (odds_BHGWS[..., w, :].square() * distance_BHGS).mean(2)
    return out_BHS.float()


@part("score", "residual")
class DropResidual(Weight):
    """Squared change of attention's output when the slot alone is dropped, ``(p / (1 - p))^2 |v - o|^2`` with attention ``p``,
    value ``v`` and output ``o``: sum over the newest ``window`` queries, mean over the query heads of a group. Changes of heads
    have one unit, so that ``allocation=adaptive`` compares them. Source: DropKV, openreview.net/forum?id=MqfNzH3TVH."""

    window: Positive = 32
    """Queries."""

    def recent(self, chunk: int) -> int:
        return self.window

    def score_slots(self, slots: Slots) -> Tensor:
        """Scores ``[B, H, S]``: the residual of dropping each slot."""

        def residual(q: Tensor, k: Tensor, v: Tensor, heads: slice) -> Tensor:
            return drop_residual(q, k, v, slots.softmax.of(heads))

        return of_recent_queries(slots, self.window, residual, slots.keys(), slots.values())


register(
    "dropkv",
    "DropKV, openreview.net/forum?id=MqfNzH3TVH",
    {"score": DropResidual(), "scopes": (Window(DropResidual.window),)},
    names={"size": "window"},
    keeps="the change of the newest 32 queries' output without it",
)
