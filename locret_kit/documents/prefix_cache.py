"""A cache that has read the beginning of prompts and is forked for each of them; and the thoughts that stay in one."""

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ..cache.bounded import BoundedCache, CannotFork
from ..text.untrusted import Span


@dataclass(eq=False)
class PrefixCache:
    """A cache of what prompts begin with, read once for all of them.

    Attributes:
        make_cache: makes an empty cache for a prompt of so many tokens; None where what is read cannot be read again.
        cache: what is read; None for nothing.
        ids: tokens of a text that begins with those that are read; only ``begins`` needs them.
    """

    make_cache: Callable[[int], BoundedCache] | None
    cache: BoundedCache | None = None
    ids: Sequence[int] = ()

    @property
    def tokens(self) -> int:
        """Number of tokens that are read."""
        return 0 if self.cache is None else self.cache.get_seq_length()

    def begins(self, prompt: Sequence[int]) -> bool:
        """Whether a prompt begins with all tokens that are read, and goes on."""
        return 0 < self.tokens < len(prompt) and prompt[: self.tokens] == self.ids[: self.tokens]

    def fork(self, prompt_length: int, *, local_len: int | None = None, evidence: bool = False) -> BoundedCache:
        """A cache for a prompt of so many tokens that begins with what is read: a copy, or an empty cache where a copy would
        differ from a fresh run. ``local_len``, ``evidence``: the copy's, see ``BoundedCache.fork``.

        Raises:
            CannotFork: a copy would differ, and there is no ``make_cache``.
        """
        try:
            if self.cache is None or not self.tokens:
                raise CannotFork("nothing is read yet")
            return self.cache.fork(prompt_length, local_len=local_len, evidence=evidence)
        except CannotFork:
            if self.make_cache is None:
                raise
        return self.make_cache(prompt_length)


def pin_thoughts(
    cache: BoundedCache, begin: int, thoughts: Iterable[Span], earlier: Iterable[Span]
) -> tuple[Span, ...]:
    """Pin the thoughts of an answer, and nothing else of it. Where there is no room, the oldest pinned thought is let go; a
    thought that has no room alone is not pinned.

    Args:
        begin: position of the answer's first token. thoughts: half-open spans, counted from there.
        earlier: pinned thoughts of earlier answers, oldest first.

    Returns:
        The pinned thoughts, oldest first.
    """
    pinned = [*earlier]
    cache.unpin(begin, sys.maxsize)
    for span in [(begin + start, begin + end) for start, end in thoughts if start < end]:
        while span not in pinned:
            try:
                cache.pin(*span)
                pinned.append(span)
            except ValueError:
                if not pinned:
                    break
                cache.unpin(*pinned.pop(0))
    return tuple(pinned)
