"""Keys of what caches have read, without the text: enough to say whether a prompt begins with it."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass

from ..documents.text_record import hash_ids


@dataclass(frozen=True)
class PrefixKey:
    """A session, and what it has read."""

    name: str
    owner: str
    document_id: str
    """The document that it goes on from; '' for none."""
    tokens: int
    sha256: str
    """Hash of the token ids, see ``documents.text_record``."""

    @classmethod
    def of(cls, name: str, owner: str, document_id: str, ids: array[int]) -> PrefixKey:
        """The key of a session that has read ``ids``."""
        return cls(name, owner, document_id, len(ids), hash_ids(ids))

    @classmethod
    def from_record(cls, name: str, owner: str, record: dict[str, object]) -> PrefixKey:
        """The key that a session's file holds. Raises ValueError."""
        document, tokens, digest = (record.get(field) for field in ("about", "tokens", "sha256"))
        right = isinstance(document, str) and type(tokens) is int and isinstance(digest, str) and len(record) == 3
        if not right:
            raise ValueError(f"{name} is no session")
        return cls(name, owner, str(document), int(str(tokens)), str(digest))


class PrefixHashes:
    """Hashes of a prompt's beginnings, each made once."""

    def __init__(self, ids: array[int]) -> None:
        self._ids = ids
        self._known: dict[int, str] = {}

    def longest(self, keys: Iterable[PrefixKey], owner: str, document_id: str) -> PrefixKey | None:
        """The longest of what an owner's caches have read about a document that the prompt begins with and goes on from."""
        mine = [
            key for key in keys if key.owner == owner and key.document_id == document_id and key.tokens < len(self._ids)
        ]
        mine.sort(key=lambda key: -key.tokens)
        return next((key for key in mine if self.hash(key.tokens) == key.sha256), None)

    def hash(self, tokens: int) -> str:
        """The hash of the first ``tokens`` ids."""
        if tokens not in self._known:
            self._known[tokens] = hash_ids(self._ids[:tokens])
        return self._known[tokens]
