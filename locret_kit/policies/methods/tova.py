"""TOVA, arXiv 2401.06104: attention of the newest query."""

from torch import Tensor

from ..attention import recent_attention
from ..base import Slots, Weight
from ..registry import part, register


@part("score", "ltas")
class Ltas(Weight):
    """Attention of the last token, in each head for itself (RoCo, section 4.1); the code of its authors takes the mean over all
    heads of a layer, which then keep the same slots. Source: TOVA, arXiv 2401.06104."""

    def recent(self, chunk: int) -> int:
        return 1

    def score_slots(self, slots: Slots) -> Tensor:
        """Scores ``[B, H, S]``: attention of the newest query."""
        return recent_attention(slots, 1)


register("tova", "TOVA, arXiv 2401.06104", {"score": Ltas()}, keeps="the newest query's attention")
