"""What a cache has read, without the text: enough to say whether a prompt begins with it."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass

from ..documents.document import hash_ids


@dataclass(frozen=True)
class Past:
    """What a session has read."""

    name: str
    owner: str
    about: str
    """The document that it goes on from; '' for none."""
    tokens: int
    sha256: str
    """Of the token ids, see ``documents``."""

    @classmethod
    def of(cls, name: str, owner: str, about: str, ids: array[int]) -> Past:
        """What a session has read."""
        return cls(name, owner, about, len(ids), hash_ids(ids))


class Prefixes:
    """Hashes of a prompt's beginnings, each made once."""

    def __init__(self, ids: array[int]) -> None:
        self._ids = ids
        self._known: dict[int, str] = {}

    def longest(self, pasts: Iterable[Past], owner: str, about: str) -> Past | None:
        """Of what an owner's caches have read about a document, the longest that the prompt begins with and goes on from."""
        mine = [past for past in pasts if past.owner == owner and past.about == about and past.tokens < len(self._ids)]
        mine.sort(key=lambda past: -past.tokens)
        return next((past for past in mine if self.hash(past.tokens) == past.sha256), None)

    def hash(self, tokens: int) -> str:
        """The hash of the first ``tokens`` ids."""
        if tokens not in self._known:
            self._known[tokens] = hash_ids(self._ids[:tokens])
        return self._known[tokens]
