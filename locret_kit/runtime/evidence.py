"""Passages of a text that an answer was read from: where its tokens attended most among the tokens in memory."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..cache.bounded import BoundedCache
from ..text.converters import PAGE
from ..text.folder import HEADING
from ..text.tokens import token_texts

WINDOW = 48
"""Tokens of a passage, before it grows to whole sentences or lines."""
GROWTH = 240
"""Most characters that it grows by, on either side."""
_END = re.compile(r"(?<=[.!?])\s|\n")
_WORDS = re.escape(HEADING.strip()).replace(re.escape("{path}"), "(?P<path>.+)")
_HEADING = re.compile(rf"(?:\A|(?<=\n\n)){_WORDS}$", re.MULTILINE)
"""A heading of a folder's text, below a blank line: a comment at the beginning of a file may look like one."""


@dataclass(frozen=True)
class Passage:
    """A passage of a text."""

    text: str
    line: int
    """Its first line, from 1; of the file where the text is a folder's."""
    share: float
    """Share of the answer's attention to the text that its tokens received, 0 to 1."""
    file: str = ""
    """Path of its file, in a folder's text."""
    page: int | None = None
    """Its page, from 1, where form feeds part pages, as in the text of a PDF."""

    def __str__(self) -> str:
        """``path, line N: text``, or ``page N: text``"""
        place = f"line {self.line}" if self.page is None else f"page {self.page}"
        return f"{self.file + ', ' if self.file else ''}{place}: {' '.join(self.text.split())}"


class EvidenceSearch:
    """Search for the passages of a prompt's text that an answer was read from. Both calls take the answer's cache.

    Args:
        ids: the prompt. text: tokens ``[start, end)`` of the text in it; none where they are not known.

    Attributes:
        received: attention ``[P]`` that each token of the prompt received from the answer's, once it has ended; None where the
            cache does not sum it up (``BoundedCache.fork``).
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], text: tuple[int, int]) -> None:
        self.tokenizer, self.ids, self.text = tokenizer, ids, text
        self._before: Tensor | None = None
        self.received: Tensor | None = None

    @property
    def begun(self) -> bool:
        """Whether the prompt is read."""
        return self._before is not None

    def begin(self, cache: BoundedCache) -> None:
        """Call it when the prompt is read, before the answer's first token is."""
        self._before = cache.attention_received()

    def end(self, cache: BoundedCache) -> None:
        """Call it when the answer has ended. A single token, which nobody read, has the question's attention."""
        received, before = cache.attention_received(), self._before
        if received is not None and before is not None:
            # What was evicted meanwhile has less than before.
            read = len(received) > len(before)
            self.received = received[: len(self.ids)] - (before if read else 0)

    @cached_property
    def passages(self) -> list[Passage]:
        """Up to three passages, the one that received most first; none where attention is not known. The whole text is decoded
        for it, once."""
        return [] if self.received is None else passages(self.tokenizer, self.ids, self.received, *self.text)


def passages(
    tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], received: Tensor, start: int, end: int, most: int = 3
) -> list[Passage]:
    """The passages of a prompt that received most attention, the highest share first, without overlap.

    Args:
        ids: the prompt. received: attention ``[P]`` that each of its tokens received from the answer's.
        start, end: tokens of the text in the prompt. most: number of passages, at most.
    """
    weights = received[start:end].clamp(min=0).double()
    weights[: max(0, 4 - start)] = 0  # the prompt's first tokens take attention that nothing else wants
    if not len(weights) or not (whole := float(weights.sum())):
        return []
    size, texts = min(WINDOW, len(weights)), token_texts(tokenizer, ids[start:end])
    sums, found, text = weights.unfold(0, size, 1).sum(-1), list[tuple[float, int, int]](), "".join(texts)
    ends = [0, *accumulate(map(len, texts))]
    while len(found) < most and (share := float(sums.max()) / whole) > 0:
        first = int(sums.argmax())
        found.append((share, ends[first], ends[first + size]))
        sums[max(0, first - size + 1) : first + size] = 0
    for at, (share, left, right) in enumerate(found):  # each grows to whole sentences or lines, up to the others
        low = max(0, left - GROWTH, *(stop for *_, stop in found if stop <= left))
        high = min(len(text), right + GROWTH, *(begin for _, begin, _ in found if begin >= right))
        begins, rest = [match.end() for match in _END.finditer(text, low, left)], _END.search(text[right:high])
        found[at] = share, begins[-1] if begins else low, right + rest.start() if rest else high
    return [_passage(text[:left], text[left:right], text[right:], share) for share, left, right in found]


def _passage(before: str, text: str, after: str, share: float) -> Passage:
    """A part of a text, between two others."""
    whole = before + text
    at = len(whole) - len(text.lstrip())
    headings = [heading for heading in _HEADING.finditer(whole) if heading.start() <= at]
    begin = headings[-1].end() if headings else 0
    at = max(at, begin + bool(headings))  # below the heading of its file
    line = whole.count("\n", begin, at) + (not headings)
    paged = not headings and PAGE in whole + after  # a folder has no PDF; in code form feeds part sections
    page = whole.count(PAGE, 0, at) + 1 if paged else None
    return Passage(whole[at:].strip(), line, share, headings[-1]["path"] if headings else "", page)
