"""L2-norm strategy, arXiv 2406.11430: keys of low norm receive most attention."""

from torch import Tensor

from ...backbones.rope import rotate
from ..base import Entry, Score, wide
from ..registry import part, register


@part("score", "knorm")
class KNorm(Score):
    """The negated norm of the key as attention sees it: keys of low norm receive most attention. RoPE does not change a norm
    but by its factor on cos and sin, so it is fixed when the token enters. Source: L2-norm strategy, arXiv 2406.11430,
    section 3."""

    def score_new_tokens(self, entry: Entry) -> Tensor:
        """Scores ``[B, H, T]``: a low key norm scores high."""
        k = wide(entry.k)
        if entry.rope is not None:  # the factor lengthens only the part that is turned
            k = rotate(k, *entry.rope.tables(k.new_zeros(1), k.dtype))
        return -k.norm(dim=-1).float()


register("knorm", "arXiv 2406.11430", {"score": KNorm()}, keeps="a small key")
