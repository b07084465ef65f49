"""Arguments of a call, as JSON, piece by piece: from JSON as a model writes it, or from parameters with marks of their own."""

import json
from collections.abc import Sequence
from contextlib import suppress

import regex
from transformers.utils.chat_parsing.content_parsers import parse_content

from .forms import NEVER, CallForm
from .values import Schema, check_json, properties_of, typed, types_of

BARE_SIGN = regex.compile(r'<\|"\|>|\\["\\]|(?<!<\|)"|[{}\[\],]')
NOTATION = {"unquoted_keys": True, "string_delims": [['<|"|>'] * 2]}
"""Gemma's, as transformers reads it."""


class Nesting:
    """Brackets and quotes that are open at a place.

    Args:
        quotes: signs that begin and end a text.
    """

    def __init__(self, quotes: Sequence[str] = ('"', '<|"|>')) -> None:
        self.depth, self.quote, self.quotes = 0, "", quotes

    def step(self, sign: str) -> bool:
        """Whether a sign closes the outermost bracket."""
        if self.quote:
            self.quote = "" if sign == self.quote else self.quote
        elif sign in self.quotes:
            self.quote = sign
        elif sign in ("{", "["):
            self.depth += 1
        elif sign in ("}", "]"):
            self.depth -= 1
            return not self.depth
        return False


class Value:
    """A value in brackets, up to the last of them.

    Args:
        quotes: characters that begin and end a text. marks: pattern of the marks that end a value outside texts.
    """

    def __init__(self, quotes: str = '"', marks: str = NEVER) -> None:
        self.nesting, self.mark = Nesting(quotes), -1  # place of the first mark in a text
        self._sign = regex.compile(rf"\\.|(?P<mark>{marks})|[{{}}\[\]{quotes}]", regex.DOTALL)
        self._at, self._done = 0, False

    def end(self, held: str, at: int, final: bool) -> tuple[int, bool]:
        """End of the part of a text that is read, and whether the value ends there. Each call has the same text, or a longer one.

        Args:
            at: place where the value begins. final: whether nothing follows.
        """
        if self._done:
            return self._at, True
        for sign in self._sign.finditer(held, max(at, self._at), partial=not final):
            if sign.partial or (sign["mark"] is not None and not self.nesting.quote):
                self._at = sign.start()
                return sign.start(), not sign.partial
            self._at = sign.end()
            if sign["mark"] is not None:
                self.mark = sign.start() if self.mark < 0 else self.mark
            elif self.nesting.step(sign[0]):
                self._done = True
                return sign.end(), True
        self._at = len(held)
        return len(held), False

    def take(self, size: int) -> None:
        """The first ``size`` characters of the text are gone."""
        self._at, self.mark = self._at - size, max(-1, self.mark - size)


class JsonArguments:
    """JSON up to its last brace, or up to a mark of the call's end. A mark in a text is a part of it if the JSON ends after it.

    Args:
        marks: their pattern.

    Attributes:
        closing: what their end adds.
    """

    closing = ""

    def __init__(self, marks: str) -> None:
        self._value = Value(marks=marks)

    def read(self, held: str, final: bool, cut: bool) -> tuple[int, str, bool]:
        """Characters that are read, the piece that they are of the arguments, and whether these end. Some calls have none."""
        if not self._value.nesting.depth and held[0] != "{":
            return 0, "{}", True
        size, done = self._value.end(held, 0, final)
        broken = self._value.nesting.depth > 0  # so far
        if broken and self._value.mark >= 0 and not (final and cut):
            size, done = self._value.mark, final or done
        self._value.take(size)
        return size, held[:size], done


class Parameters:
    """Parameters with marks of their own: a text comes in pieces, any other value when it is whole.

    Args:
        schema: of the arguments.
    """

    def __init__(self, form: CallForm, schema: Schema) -> None:
        self._form, self._schema, self._begun = form, schema, False
        known = "|".join(map(regex.escape, properties_of(schema))) or NEVER
        self._patterns = [  # before the end of an answer, and at its end
            [regex.compile(x.replace("END", end).replace("KEYS", known), regex.DOTALL) for x in (form.key, form.end)]
            for end in (NEVER, r"\Z")
        ]
        self._types: set[str] | None = None  # of the value that has begun
        self._bare, self._streams, self._searched, self._nesting = False, False, 0, Nesting()

    @property
    def closing(self) -> str:
        """The end of the JSON."""
        return "}" if self._begun else "{}"

    def read(self, held: str, final: bool, cut: bool) -> tuple[int, str, bool]:
        """Characters that are read, the piece that they are of the arguments, and whether a parameter no longer follows."""
        key, close = self._patterns[final and not cut]
        at, said = 0, ""
        while True:
            if self._types is None:
                begin = key.match(held, at, partial=not final)
                if begin is None or begin.partial:
                    return at, said, begin is None
                at, said = begin.end(), said + self._begin(begin["key"].strip(), begin.groupdict().get("quote"))
            size, end, sure = self._end(held[at:], close, cut or not final)
            if self._streams:
                said, at = said + json.dumps(held[at : at + size], ensure_ascii=False)[1:-1] + '"' * sure, at + size
            elif sure or (final and not cut):
                said, at = said + json.dumps(self._value(held[at : at + size]), ensure_ascii=False), at + size
            if not sure:
                return at, said, False
            self._types, at = None, at + end - size

    def _end(self, text: str, close: regex.Pattern[str], partial: bool) -> tuple[int, int, bool]:
        """The span of the end of a value, and whether it is sure."""
        if not self._bare:
            found = close.search(text, self._searched, partial=partial)
            start, end = (len(text), len(text)) if found is None else found.span()
            self._searched = 0 if self._streams else start
            return start, end, found is not None and not found.partial
        for sign in BARE_SIGN.finditer(text, self._searched, partial=True):
            self._searched = sign.start() if sign.partial else sign.end()
            if sign[0] in (",", "}") and not (self._nesting.depth or self._nesting.quote):
                return sign.start(), sign.start(), True
            if not sign.partial:
                self._nesting.step(sign[0])
        return len(text), len(text), False

    def _begin(self, key: str, quote: str | None) -> str:
        """The JSON up to a parameter's value."""
        before, self._begun = ", " if self._begun else "{", True
        self._types = types_of(properties_of(self._schema).get(key), self._schema)
        self._bare, self._searched, self._nesting = self._form.quotes and not quote, 0, Nesting()
        text = {"string"} if quote else self._types  # with quotes it is a text, if it may be one
        self._streams = not self._bare and (self._types <= {"string"} or self._types & text == {"string"})
        return f"{before}{json.dumps(key, ensure_ascii=False)}: " + '"' * self._streams

    def _value(self, text: str) -> object:
        with suppress(ValueError, RecursionError):
            if self._bare:
                value = parse_content(f"{{value:{text}}}", "json", NOTATION)["value"]
                check_json(value)
                return value
        return typed(text.strip() if self._bare else text, self._types or set(), python=self._form.python)
