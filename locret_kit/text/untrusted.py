"""Untrusted text: the author of each character, marks that prevent control tokens, and its tokens.

A chat template searches for its own tokens in its input, and cuts an answer at ``</think>`` for example. So it gets
every text unchanged, and each character of its output is traced to the template's literals or to an untrusted text.

``defused`` breaks every control token in a text by a mark after its first character. In a template's output it
breaks those that the template did not write. Encoders (``encode``, ``text.tokens.IdStream``) make no token across a
mark and drop the mark, so the text stays, as ordinary tokens. Text without control tokens is not changed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import islice, pairwise
from typing import TYPE_CHECKING, SupportsIndex, TypeVar, cast

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")

OTHERS, OWN, FIRST = "\0", "\1", 2
"""Origins of a character: of others, or of the template; the content of messages[i] has chr(FIRST + i)."""


class Traced(str):
    """A text with the origin of each of its characters.

    What templates do with texts keeps origins: slices, sums, joins, splits, strips, replacements, formats. What anything else
    makes of it (JSON, ``indent``, ``escape``) is a plain text, of others: no text becomes the template's.

    Args:
        origin: one for each character, or one for all.
    """

    origin: str

    def __new__(cls, text: str, origin: str = OTHERS) -> Traced:
        made = super().__new__(cls, text)
        made.origin = origin * len(text) if len(origin) == 1 else origin
        return made

    def __str__(self) -> str:
        return self

    def __add__(self, other: str) -> Traced:
        return NOTHING.join((self, other)) if type(other) in (str, Traced) else NotImplemented

    def __radd__(self, other: str) -> Traced:
        return NOTHING.join((other, self)) if type(other) is str else NotImplemented

    def __mul__(self, times: SupportsIndex) -> Traced:
        return Traced(str.__mul__(self, times), self.origin * times)

    __rmul__ = __mul__

    def __getitem__(self, at: SupportsIndex | slice) -> Traced:
        return Traced(str.__getitem__(self, at), self.origin[at])

    def __iter__(self) -> Iterator[str]:
        return map(Traced, str.__iter__(self), self.origin)

    def __mod__(self, values: object) -> str:
        made, parts = str.__mod__(self, values), self.split("%s")
        given = list(values) if isinstance(values, tuple) else [values]
        if len(parts) != len(given) + 1 or str.count(self, "%") != len(given):  # other signs than %s
            return made
        texts = [part for pair in zip(parts, map(str, given), strict=False) for part in pair]
        return NOTHING.join([*texts, parts[-1]])

    def join(self, parts: Iterable[str]) -> Traced:
        parts = list(parts)
        return Traced(str.join(self, parts), self.origin.join(map(_origin, parts)))

    def lstrip(self, chars: str | None = None) -> Traced:
        return self[len(self) - len(str.lstrip(self, chars)) :]

    def rstrip(self, chars: str | None = None) -> Traced:
        return self[: len(str.rstrip(self, chars))]

    def strip(self, chars: str | None = None) -> Traced:
        return self.lstrip(chars).rstrip(chars)

    def removeprefix(self, prefix: str) -> Traced:
        return self[len(self) - len(str.removeprefix(self, prefix)) :]

    def removesuffix(self, suffix: str) -> Traced:
        return self[: len(str.removesuffix(self, suffix))]

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._found(str.split(self, sep, maxsplit), sep)

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._found(str.rsplit(self, sep, maxsplit), sep)

    def splitlines(self, keepends: bool = False) -> list[str]:
        return self._found(str.splitlines(self, keepends))

    def partition(self, sep: str) -> tuple[str, str, str]:
        return cast(tuple[str, str, str], tuple(self._found(str.partition(self, sep), "")))

    def rpartition(self, sep: str) -> tuple[str, str, str]:
        return cast(tuple[str, str, str], tuple(self._found(str.rpartition(self, sep), "")))

    def replace(self, old: str, new: str, count: SupportsIndex = -1) -> str:
        return traced(new).join(self.split(old, count)) if old else str.replace(self, old, new, count)

    def _found(self, pieces: Iterable[str], sep: str | None = None) -> list[str]:
        """Pieces of this text in their order, with ``sep`` between them; None for blanks or line ends, which begin no piece."""
        at, made = 0, list[str]()
        for piece in pieces:
            at = str.find(self, piece, at) if sep is None else at
            made.append(self[at : at + len(piece)])
            at += len(piece) + len(sep or "")
        return made


def _recased(change: Callable[[str], str]) -> Callable[[Traced], str]:
    return lambda text: Traced(made, text.origin) if len(made := change(text)) == len(text) else made


for _change in (str.upper, str.lower, str.title, str.capitalize):
    setattr(Traced, _change.__name__, _recased(_change))
NOTHING = Traced("")


def _origin(text: str) -> str:
    return text.origin if isinstance(text, Traced) else OTHERS * len(text)


def traced(value: T, origin: str = OTHERS) -> T:
    """A value of JSON with every text in it traced; one that is traced already stays."""
    if isinstance(value, str):
        return cast(T, value if isinstance(value, Traced) else Traced(value, origin))
    if isinstance(value, Mapping):
        return cast(T, {traced(name, origin): traced(inner, origin) for name, inner in value.items()})
    return cast(T, [traced(inner, origin) for inner in value]) if isinstance(value, (list, tuple)) else value


CUT = "\ufdd0"
"""The mark: one of Unicode's noncharacters, which are for use inside of programs and in no text."""
BORDER = "\n"
"""Left context of the text after a mark: no tokenizer joins a line's end to what follows, and none adds a blank there."""
MARK = re.compile(r"<\|.*\|>", re.DOTALL)
"""Spelling of control tokens that some vocabularies do not call special."""


class Controls:
    """Control tokens by their texts.

    Args:
        normalize: the tokenizer's own change of a text before it is cut into tokens; None for none.
    """

    def __init__(self, texts: Iterable[str], normalize: Callable[[str], str] | None = None) -> None:
        self._normalize, plain = normalize, {text for text in texts if len(text) > 1}
        self._texts = plain | {normalize(text).strip("\u2581 ") for text in plain} if normalize else plain
        self._sizes = sorted({len(text) for text in self._texts if text})
        starts = "".join(re.escape(first) for first in sorted({text[0] for text in self._texts if text}))
        self._first = re.compile(f"[{starts}]" if starts else r"(?!)")

    @property
    def longest(self) -> int:
        """Characters of the longest."""
        return max(self._sizes, default=0)

    def places(self, text: str) -> list[tuple[int, int]]:
        """Half-open spans of the control tokens that a text spells, the longest at each beginning."""
        spans = []
        for first in self._first.finditer(text):
            at = first.start()
            sizes = [size for size in self._sizes if text[at : at + size] in self._texts]
            spans += [(at, at + sizes[-1])] if sizes else []
        return spans

    def cut(self, text: str, before: str = "") -> Traced:
        """The text with a mark in every control token that the template did not write completely.

        Args:
            before: preceding text, which no longer changes.
        """
        before = before[max(0, len(before) - self.longest + 1) :]
        whole, marks = Traced(before, OWN) + traced(text), set[int]()
        for start, end in self.places(whole):
            others = (at for at in range(start + 1, end) if whole.origin[at - 1 : at + 1] != 2 * OWN)
            marks.update(islice(others, 1))
        for run in re.finditer(f"[^{OWN}]+", whole.origin):
            at, said = run.start(), str.__getitem__(whole, slice(*run.span()))
            for line in said.split("\n") if self._respelt(said) else ():
                marks.update(range(at + 1, at + len(line)) if self._respelt(line) else ())
                at += len(line) + 1
        cuts = [len(before), *sorted(marks), len(whole)]
        return Traced(CUT).join(whole[a:b] for a, b in pairwise(cuts))

    def _respelt(self, text: str) -> bool:
        """Whether a text spells a control token in other characters."""
        return self._normalize is not None and len(self.places(self._normalize(text))) > len(self.places(text))


def controls(tokenizer: PreTrainedTokenizerBase) -> Controls:
    """The control tokens of a tokenizer: added tokens that are special, that its chat template names, or that are spelt
    ``<|...|>``; not those of blanks or HTML tags, which some vocabularies have too."""
    return _controls(tokenizer, len(tokenizer), str(tokenizer.chat_template or ""))


@lru_cache(maxsize=4)
def _controls(tokenizer: PreTrainedTokenizerBase, size: int, template: str) -> Controls:
    added = [token for token in tokenizer.added_tokens_decoder.values() if token.content.strip()]
    texts = {one.content for one in added if one.special or one.content in template or MARK.fullmatch(one.content)}
    normalizer = tokenizer.backend_tokenizer.normalizer if tokenizer.is_fast else None
    texts |= {str(text) for text in tokenizer.all_special_tokens}
    return Controls(texts, None if normalizer is None else normalizer.normalize_str)


def defused(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    """The text, with a mark in every control token that it spells. To do it twice changes nothing."""
    return str.__str__(controls(tokenizer).cut(text))


def defused_pieces(tokenizer: PreTrainedTokenizerBase, pieces: Iterable[str], before: str = "") -> Iterator[str]:
    """Pieces of one text, defused as ``defused`` does for the whole text. Control tokens across pieces, or with a
    beginning in the text ``before``, are found too."""
    known = controls(tokenizer)
    for piece in pieces:
        yield str.__str__(known.cut(piece, before))
        before = (before + piece)[-known.longest :] if known.longest else ""


Span = tuple[int, int]
