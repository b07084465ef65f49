"""L2-norm strategy, arXiv 2406.11430: keys of low norm receive most attention."""

from torch import Tensor

from ...backbones.rope import rotate
from ..base import Entry, Score, Slots, wide
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
