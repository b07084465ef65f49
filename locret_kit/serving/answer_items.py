"""Items of answers by their ids: a request may name one (OpenAI's ``item_reference``) instead of sending it again."""

from __future__ import annotations

import json
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping

from .errors import Refused

MAX_CHARACTERS = 4 << 20
"""Characters of an owner's items in memory, at most: of more, those that were made first are forgotten."""


class AnswerItems:
    """Items in memory, apart for each owner."""

    def __init__(self) -> None:
        self._owners: defaultdict[str, OrderedDict[str, str]] = defaultdict(OrderedDict)
        self._sizes: defaultdict[str, int] = defaultdict(int)

    def add(self, owner: str, items: Iterable[Mapping[str, object]]) -> None:
        """Remember items."""
        mine = self._owners[owner]
        for item in items:
            mine[str(item["id"])] = text = json.dumps(item)
            self._sizes[owner] += len(text)
            while self._sizes[owner] > MAX_CHARACTERS:
                self._sizes[owner] -= len(mine.popitem(last=False)[1])

    def resolved(self, owner: str, given: object) -> object:
        """A request's input, with items in place of their references.

        Raises:
            Refused: 404, an item is not here.
        """
        if not isinstance(given, list):
            return given
        return [
            self._item(owner, number, item)
            if isinstance(item, dict) and item.get("type") == "item_reference" else item
            for number, item in enumerate(given)
        ]  # fmt: skip

    def _item(self, owner: str, number: int, reference: Mapping[str, object]) -> object:
        name = str(reference.get("id"))
        text = self._owners[owner].get(name)
        if text is None:
            said = "is not here, or not any more: send the item itself, as clients do with store=false"
            raise Refused(404, f"input.{number}: item_reference {name[:64]!r} {said}", "input")
        return json.loads(text)
