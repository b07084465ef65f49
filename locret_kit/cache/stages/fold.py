"""Merging: evicted slots are folded into slots of the same head that stay."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...backbones.rope import rotate
from ...policies.base import Merge, Slots
from ..context import Context, Stage
from ..storage.rows import BoundedLayer
from ..view import turned_back


@dataclass(frozen=True)
class MergeStage(Stage):
    """Folds the slots that go into those that stay, in place and one head at a time: beside the buffers there are never more
    than a head's rows in float32. Pinned slots are as they were read: no merger sees them."""

    merger: Merge

    def evicted(
        self, ctx: Context, layer: int, rows: BoundedLayer, slots: Slots, scores_BHS: Tensor, stay_BHS: Tensor
    ) -> None:
        merger = self.merger
        raw = ctx.read_rope(layer, rows) is not None  # keys are stored before RoPE
        rope = ctx.rope(layer)
        facts_BHS = merger.told(ctx.policy.score, slots, scores_BHS, ctx.policy.protected(slots), stay_BHS)
        _, H, S = stay_BHS.shape
        for h in range(H):
            keys, values, positions = (rows.head(name, h) for name in ("keys", "values", "positions"))
            own = slice(S - len(keys), S)  # slots are padded on the left
            facts_S, stay_S = facts_BHS[0, h, own], stay_BHS[0, h, own]
            if merger.remembers:
                facts_S = torch.logaddexp(facts_S, rows.head("absorbed", h))
            exact = torch.promote_types(keys.dtype, torch.float32)
            keys_SD = keys.to(exact) if raw else turned_back(rope, keys.to(exact), positions)
            free_S = slice(None) if slots.pinned is None else ~slots.pinned[0, h, own]
            new = merger.fold(layer, keys_SD[free_S], values.to(exact)[free_S], facts_S[free_S], stay_S[free_S])
            at, folded = torch.arange(len(keys), device=keys.device)[free_S][new.slots_R], new.keys_RD
            if not raw:
                folded = rotate(folded, *rope.tables(positions[at], exact))
            keys[at], values[at] = folded.to(keys.dtype), new.values_RD.to(values.dtype)
            if merger.remembers and new.gained_R is not None:
                absorbed = rows.head("absorbed", h)
                absorbed[at] = torch.logaddexp(absorbed[at], new.gained_R)
