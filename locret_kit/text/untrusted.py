"""Text of others, in which no control token may form: documents, messages, names, tool results, earlier answers.

``defused`` breaks every control token that a text spells, by a mark after its first character; in what a chat template makes
(``text.traced``), every one that is not its own. Whoever encodes the result (``text.spans.encode``, ``runtime.tokens.IdStream``)
makes no token across a mark and leaves it out: what the text says stays, as ordinary tokens. Text that spells no control token is
not changed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from itertools import islice, pairwise
from typing import TYPE_CHECKING

from .traced import OWN, Traced, traced

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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
        """The text with marks: one in every control token that is not the template's from end to end.

        Args:
            before: what precedes it, of which nothing is changed any more.
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
    """Pieces of one text as ``defused`` has them, also where a control token lies across pieces, or begins in the text
    ``before`` them."""
    known = controls(tokenizer)
    for piece in pieces:
        yield str.__str__(known.cut(piece, before))
        before = (before + piece)[-known.longest :] if known.longest else ""


def plain(text: str) -> str:
    """The text without marks, for people to read."""
    return text.replace(CUT, "")
