"""Pieces that several tests of policy parts share."""

import torch
from hypothesis import strategies as st

from locret_kit.policies.base import Slots, TopK, rank_of
from locret_kit.policies.methods.kvcrush import KMeans, Representatives
from locret_kit.policies.methods.nacl import Sampled

ANCHORS = ("mean", "random", "alternate", "zeros", "ones")


@st.composite
def layers_of_slots(draw, most_heads: int = 5):
    """Scores, protected and valid [2, H, S], and a number to keep that every head can give."""
    H, S, seed = draw(st.integers(1, most_heads)), draw(st.integers(1, 40)), draw(st.integers(0, 999))
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(2, H, S, generator=generator) ** draw(st.sampled_from([1, 4]))
    if draw(st.booleans()):
        scores = (scores * 4).round() / 4  # many ties
    length = torch.randint(1, S + 1, (2, H, 1), generator=generator)
    valid = torch.arange(S) >= S - length
    keep = draw(st.integers(1, int(valid.sum((1, 2)).min()) // H)) if int(valid.sum((1, 2)).min()) >= H else 0
    protected = (torch.rand(2, H, S, generator=generator) < draw(st.sampled_from([0.0, 0.1]))) & valid
    return scores, protected, valid, keep


def slots_of(scores, valid, seed: int = 0) -> Slots:
    B, H, S = scores.shape
    draw = torch.Generator().manual_seed(seed)
    positions = torch.stack([torch.randperm(3 * S, generator=draw)[:S].sort().values] * H)
    return Slots(
        layer=1, layers=3, keep=1, stabilizers=0, chunk=8, since_eviction=8, seen=3 * S,
        positions=positions.int().expand(B, H, S),
        valid=valid, entry_scores=scores, stats={}, seed=seed, lengths=valid.sum(-1).flatten().tolist(),
        query_head_votes=lambda valid, budgets: (rank_of(scores, ~valid, valid) < budgets[..., None])[:, :, None],
        keys=lambda: torch.randn(B, H, S, 3, generator=torch.Generator().manual_seed(seed)),
    )  # fmt: skip


SELECTIONS = [
    TopK(), Sampled(0.3), Sampled(1.0), Representatives(0.5, level="chunk"), Representatives(0.9, level="page"),
    *(Representatives(0.25, anchor, pick) for anchor in ANCHORS for pick in ("even", "random")),
    Representatives(0.4, bits="median"), KMeans(0.5),
]  # fmt: skip
