"""Slots that a token of the prompt attends to while the prompt is read. The prompt's tail and decoded tokens attend to all."""

from __future__ import annotations

from .base import PrefillMask
from .parameters import Count
from .registry import part


@part("prefill_mask", "sliding")
class Sliding(PrefillMask):
    """Once slots have been evicted, a token sees the first ``sinks`` slots of its head, the ``newest`` ones that were kept at the
    last eviction, and what has been read since. The other slots wait for the question.

    A context with gaps is not what a backbone was trained on, and what it makes of new tokens there is worse, which shows
    when they are asked for. Source: sinks and a window are StreamingLLM's, arXiv 2309.17453; keeping slots that the text
    after them does not see is this project's (``checkpoints/smollm2-135m-locret/LOG.md``).
    """

    newest: Count = 1024
    sinks: Count = 8

    def visible(self, rows: int, fresh: int) -> tuple[slice, slice] | None:
        """The rows that a token sees of a head's ``rows``, of which ``fresh`` entered since the last eviction; None for all."""
        hidden_until = rows - fresh - self.newest
        return (slice(0, self.sinks), slice(hidden_until, rows)) if hidden_until > self.sinks else None
