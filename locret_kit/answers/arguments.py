"""Arguments of a call, as JSON, piece by piece: from JSON as a model writes it, or from parameters with marks of their own."""

from __future__ import annotations

import json
from contextlib import suppress

import regex
from transformers.utils.chat_parsing.content_parsers import parse_content

from .forms import NEVER, CallForm
from .values import Schema, properties_of, typed, types_of

JSON_PART = regex.compile(r'["{}\[\]\\]')
NOTATION = {"unquoted_keys": True, "string_delims": [['<|"|>'] * 2]}
"""Gemma's, as transformers reads it."""


class JsonArguments:
    """JSON up to its last brace. ``closing``: what its end adds."""

    closing = ""

    def __init__(self) -> None:
        self._depth, self._quoted, self._escaped = 0, False, False

    def read(self, held: str, final: bool, cut: bool) -> tuple[int, str, bool]:
        """Characters that are read, the piece that they are of the arguments, and whether these end."""
        size = 0
        for part in JSON_PART.finditer(held):
            sign, before = part[0], self._escaped and part.start() == size
            self._escaped, size = sign == "\\" and self._quoted and not before, part.end()
            if sign == '"' and not before:
                self._quoted = not self._quoted
            elif sign != "\\" and not self._quoted:
                self._depth += 1 if sign in "{[" else -1
                if not self._depth:
                    return size, held[:size], True
        self._escaped = self._escaped and size == len(held)
        return len(held), held, False


class Parameters:
    """Parameters with marks of their own: a text comes in pieces, any other value when it is whole.

    Args:
        schema: of the arguments.
    """

    def __init__(self, form: CallForm, schema: Schema) -> None:
        self._form, self._schema, self._begun = form, schema, False
        known = "|".join(map(regex.escape, properties_of(schema))) or NEVER
        patterns = [pattern.replace("KEYS", known) for pattern in (form.key, form.end, form.bare_end)]
        self._patterns = [  # before the end of an answer, and at its end
            [regex.compile(pattern.replace("END", end), regex.DOTALL) for pattern in patterns] for end in (NEVER, r"\Z")
        ]
        self._types: set[str] | None = None  # of the value that has begun
        self._bare, self._streams, self._searched = False, False, 0

    @property
    def closing(self) -> str:
        """The end of the JSON."""
        return "}" if self._begun else "{}"

    def read(self, held: str, final: bool, cut: bool) -> tuple[int, str, bool]:
        """Characters that are read, the piece that they are of the arguments, and whether a parameter no longer follows."""
        key, *ends = self._patterns[final and not cut]
        at, said = 0, ""
        while True:
            if self._types is None:
                begin = key.match(held, at, partial=not final)
                if begin is None or begin.partial:
                    return at, said, begin is None
                at, said = begin.end(), said + self._begin(begin["key"].strip(), begin.groupdict().get("quote"))
            end = ends[self._bare].search(held[at:], self._searched, partial=cut or not final)
            sure = end is not None and not end.partial
            size = len(held) - at if end is None else end.start()
            if self._streams:
                said, at = said + json.dumps(held[at : at + size], ensure_ascii=False)[1:-1] + '"' * sure, at + size
            elif sure:
                said, at = said + json.dumps(self._value(held[at : at + size]), ensure_ascii=False), at + size
            self._searched = 0 if sure or self._streams or self._bare else size
            if end is None or end.partial:
                return at, said, False
            self._types, at = None, at + end.end() - end.start()

    def _begin(self, key: str, quote: str | None) -> str:
        """The JSON up to a parameter's value."""
        before, self._begun = ", " if self._begun else "{", True
        self._types = types_of(properties_of(self._schema).get(key), self._schema)
        self._bare = bool(self._form.bare_end) and not quote
        self._streams = not self._bare and self._types <= {"string"}
        return f"{before}{json.dumps(key, ensure_ascii=False)}: " + '"' * self._streams

    def _value(self, text: str) -> object:
        with suppress(ValueError, RecursionError):
            if self._bare:
                value = parse_content(f"{{value:{text}}}", "json", NOTATION)["value"]
                json.dumps(value, allow_nan=False)
                return value
        return typed(text.strip() if self._bare else text, self._types or set())
