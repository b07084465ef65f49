"""KeyDiff, arXiv 2504.15364: keys unlike the others."""

from torch import Tensor
from torch.nn import functional as F

from ..base import Score, Slots, wide
from ..registry import part, register


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
