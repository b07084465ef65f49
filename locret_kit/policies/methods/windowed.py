"""Locret with StreamingLLM's reading: slots that a token of the prompt attends to while the prompt is read. The prompt's tail and
decoded tokens attend to all."""

from ..base import Count, PrefillMask
from ..registry import Stabilizers, part, register
from .locret import SCORE


@part("prefill_mask", "sliding")
class Sliding(PrefillMask):
    """Mask of tokens after the first eviction: a token sees the first ``sinks`` slots of its head, the ``newest`` slots kept
    at the last eviction, and all tokens read since. The other slots wait for the question.

    Backbones are not trained on contexts with gaps. New tokens read in one get worse keys and values, which shows
    when the question needs them. Source: sinks and a window are StreamingLLM's, arXiv 2309.17453. Keeping slots that
    later text does not see is this project's (``checkpoints/smollm2-135m-locret/LOG.md``).
    """

    newest: Count = 1024
    sinks: Count = 8

    def visible(self, rows: int, fresh: int) -> tuple[slice, slice] | None:
        """The row ranges that a token sees, out of a head's ``rows``; ``fresh`` of them entered since the last
        eviction. None for all."""
        hidden_until = rows - fresh - self.newest
        return (slice(0, self.sinks), slice(hidden_until, rows)) if hidden_until > self.sinks else None


register(
    "windowed-locret",
    "Locret with StreamingLLM's reading",
    {"scopes": (Stabilizers(Sliding.newest),), "prefill_mask": Sliding(), **SCORE},
    names={"most": "newest"},
    keeps="as locret; tokens of the text attend to the newest 1,024 slots, the question to all",
)
