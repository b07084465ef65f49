"""Text to token ids as a stream: a long document is never tokenised (or held) at once."""

from __future__ import annotations

import hashlib
import re
from array import array
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from functools import lru_cache
from itertools import takewhile
from typing import TYPE_CHECKING

import numpy as np

from .untrusted import BORDER, CUT, Span

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BLOCK = 1 << 16
"""Characters encoded at a time."""
CONTEXT = 384
"""Overlap of windows in characters: a multiple of 3, by which many tokenizers cut digits, and of powers of 2, for blanks."""
NEAR = 64
"""Overlap in characters at the end of a text, where the tokenizer splits words before it makes tokens."""
NEUTRAL = "x"
"""Left context of a text that was forgotten: at the very beginning some tokenizers add a blank."""
HALVES = re.compile("[\ud800-\udfff]")
"""Halves of surrogate pairs, which no tokenizer reads."""
CHARACTER = 4
"""Bytes of a character, and so tokens, at most."""
BYTE = re.compile("<0x([0-9A-F]{2})>")
"""A token of one byte, of SentencePiece."""
_PRINTABLE = (*range(33, 127), *range(161, 173), *range(174, 256))
_OTHERS = (byte for byte in range(256) if byte not in _PRINTABLE)
BYTES = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + n): byte for n, byte in enumerate(_OTHERS)}
"""Bytes by the characters that stand for them in a byte-level vocabulary. Source: GPT-2's encoder."""


def stream_ids(tokenizer: PreTrainedTokenizerBase, pieces: Iterable[str], *, special: bool = False) -> array:
    """Token ids (an ``array('i')``) of the concatenated pieces, equal to those of one call on the whole text.

    Args:
        special: add the tokenizer's own special tokens (a BOS) as one call would.
    """
    if not tokenizer.is_fast:
        prefix, suffix = special_ids(tokenizer) if special else ([], [])
        parts = "".join(pieces).split(CUT)
        ids = [token for part in parts for token in tokenizer(part, add_special_tokens=False).input_ids]
        return array("i", prefix) + array("i", ids) + array("i", suffix)
    stream = IdStream(tokenizer, special=special)
    for piece in pieces:
        stream.feed(piece)
    return stream.finish()


class TooManyTokens(ValueError):
    """A text has more tokens than are taken."""

    def __init__(self, max_tokens: int) -> None:
        super().__init__(f"more than {max_tokens} tokens, the most that a prompt may have")


class IdStream:
    """Incremental encoding: token ids of a text whose end is open.

    Text is encoded in windows that overlap by ``CONTEXT`` characters. A window's tokens are taken up to a token at
    the start of a word, where the next window must have a token boundary too. No token crosses a mark
    (``text.untrusted``).

    Args:
        tokenizer: a fast one. special: add the tokenizer's special tokens (a BOS) once, as one call would.
        max_tokens: encoding stops at a longer text.

    Attributes:
        ids: tokens that no later text can change.
        text: open text, after ``done`` characters of context.

    Raises:
        ValueError: a slow tokenizer, which has no offsets. TooManyTokens: in ``feed`` and ``finish``.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, *, special: bool = False, max_tokens: int | None = None
    ) -> None:
        if not tokenizer.is_fast:
            raise ValueError(f"tokenizer={type(tokenizer).__name__} must be a fast tokenizer: offsets are needed")
        self.tokenizer, self.max_tokens = tokenizer, max_tokens
        prefix, self._suffix = special_ids(tokenizer) if special else ([], [])
        self.ids = array("i", prefix)
        self.text, self.done = "", 0

    def feed(self, piece: str) -> None:
        """Add text at the end."""
        first, *others = piece.split(CUT)
        self._feed(first)
        for part in others:
            _take(self.tokenizer, self.text, self.done, len(self.text), self.ids)
            self.text, self.done = BORDER, len(BORDER)
            self._feed(part)

    def _feed(self, piece: str) -> None:
        """Add text without marks."""
        self.text += piece
        while len(self.text) - self.done > BLOCK:
            self.text, self.done = _take(self.tokenizer, self.text, self.done, self.done + BLOCK, self.ids)
            self._check()

    def _check(self) -> None:
        if self.max_tokens is not None and len(self.ids) > self.max_tokens:
            raise TooManyTokens(self.max_tokens)

    def settle(self) -> None:
        """Take every token that no later text can change: all but those of the last words."""
        margin = _margin(self.tokenizer)
        if len(self.text) - self.done > margin:
            self.text, self.done = _take(self.tokenizer, self.text, self.done, len(self.text), self.ids, margin=margin)

    def forget(self, ends: Callable[[str], bool] = str.isspace) -> None:
        """Take every token and forget the text, but for characters at its end that ``ends`` takes: what follows begins a token
        of its own."""
        kept = self.text[: len(self.text) - sum(1 for _ in takewhile(ends, reversed(self.text)))]
        blanks = self.text[len(kept) :] if len(kept) >= self.done else self.text[self.done :]
        if len(kept) > self.done:
            _take(self.tokenizer, kept, self.done, len(kept), self.ids)
        self.text, self.done = NEUTRAL + blanks, len(NEUTRAL)

    def finish(self, after: str = "") -> array:
        """All ids of the text with ``after`` at its end; the stream stays open."""
        longer = copy(self)
        longer.ids = array("i", self.ids)
        longer.feed(after)
        _take(self.tokenizer, longer.text, longer.done, len(longer.text), longer.ids)
        longer.ids.extend(self._suffix)
        longer._check()
        return longer.ids


def answer_text(tokenizer: PreTrainedTokenizerBase, tokens: Iterable[int], *, special: bool = False) -> str:
    """Text of an answer's tokens, with or without special ones. Blanks stay, also before marks: one that goes later may have
    been a piece already."""
    return str(tokenizer.decode(list(tokens), skip_special_tokens=not special, clean_up_tokenization_spaces=False))


class TextStream:
    """Incremental detokenisation: final pieces of text, which together equal one decode of all tokens. The cost per
    token does not grow.

    Args:
        special: whether special tokens are shown. shown: special tokens to show in any case.
        row: SentencePiece byte tokens that wait for the end of their row, since one invalid byte makes the whole row
            unreadable. Pieces already shown stay.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        special: bool = False,
        row: int = 32,
        shown: frozenset[int] = frozenset(),
    ) -> None:
        self._tokenizer, self._special, self._row = tokenizer, special or bool(shown), row
        known = tokenizer.added_tokens_decoder if shown else {}
        self._hidden = {token for token, one in known.items() if one.special} - shown
        self._tokens: list[int] = []  # those of the newest piece, and those that wait
        self._before = self._shown = 0  # tokens of the newest piece, and characters of them
        self._text = ""

    def add(self, token: int) -> str:
        """The text that is final with this token."""
        if token in self._hidden:
            return ""
        self._tokens.append(token)
        last, self._text = self._text, self._decode()
        waiting = len(self._tokens) - self._before
        in_row = BYTE.fullmatch(str(self._tokenizer.convert_ids_to_tokens(token)))
        is_open = self._text.endswith("\ufffd") or self._text == last
        if waiting < self._row * bool(in_row) or (is_open and waiting < self._row + CHARACTER):
            return ""
        piece = self._text.removesuffix("\ufffd")[self._shown :]
        if piece:  # what comes next begins after a whole character
            del self._tokens[: -(waiting if in_row else max(waiting, CHARACTER))]
        else:
            del self._tokens[-waiting:]
        self._before, self._text = len(self._tokens), self._decode()
        self._shown = len(self._text.removesuffix("\ufffd"))
        return piece

    def end(self) -> str:
        """The pending text that is complete."""
        return self._decode()[self._shown :]

    def _decode(self) -> str:
        return answer_text(self._tokenizer, self._tokens, special=self._special)


def token_texts(tokenizer: PreTrainedTokenizerBase, ids: Iterable[int]) -> list[str]:
    """The text of each token; together they are the text. Of the tokens of one character the last has it."""
    stream = TextStream(tokenizer, special=True, row=0)
    texts = [stream.add(token) for token in ids]
    if texts:
        texts[-1] += stream.end()
    return texts


@lru_cache(maxsize=1 << 14)
def token_text(tokenizer: PreTrainedTokenizerBase, token: int) -> str:
    """The text of one token within a text: at the very beginning some tokenizers leave out its blank."""
    before = tokenizer(NEUTRAL, add_special_tokens=False).input_ids
    return answer_text(tokenizer, [*before, token], special=True)[len(answer_text(tokenizer, before, special=True)) :]


def token_bytes(tokenizer: PreTrainedTokenizerBase, token: int) -> bytes:
    """The bytes of a token in UTF-8, also of one that is a part of a character."""
    text, word = token_text(tokenizer, token), str(tokenizer.convert_ids_to_tokens(token))
    if "\ufffd" not in text:
        return text.encode()
    if byte := BYTE.fullmatch(word):
        return bytes([int(byte[1], 16)])
    return bytes(BYTES[c] for c in word) if BYTES.keys() >= {*word} else text.encode()


def ids_after(tokenizer: PreTrainedTokenizerBase, text: str) -> array:
    """Token ids of a text that follows another one: no special tokens, and no blank that some tokenizers put first."""
    stream = IdStream(tokenizer)
    stream.text, stream.done = NEUTRAL, len(NEUTRAL)
    return stream.finish(text)


def _take(
    tokenizer: PreTrainedTokenizerBase, text: str, done: int, end: int, ids: array, *, margin: int | None = None
) -> tuple[str, int]:
    """Encode ``text[:end]``, append the ids from ``done`` on, and return the remaining text with its encoded prefix.
    If text remains, or a ``margin`` of characters at its end is open, more text follows. Raises ValueError for half
    of a surrogate pair."""
    if HALVES.search(text, done, end):
        raise ValueError("the text has half of a surrogate pair, which is invalid Unicode")
    encoding = tokenizer(text[:end], add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    tokens, offsets = encoding.input_ids, encoding.offset_mapping
    first = next((i for i, (a, b) in enumerate(offsets) if b > done), len(tokens))
    last = len(tokens)
    if margin is not None or end < len(text):
        # Cut well before the window's end, where later text cannot change a token any more.
        early = end - (CONTEXT if margin is None else margin)
        words = (i for i in range(last - 1, first, -1) if _starts_word(text, offsets[i][0]))
        last = next((i for i in words if offsets[i][0] < early), first)
        if last == first:  # no such word in the whole block, as in Chinese
            last = _agreed(tokenizer, text[:end], tokens, offsets, first)
            if margin is not None and not (last < len(tokens) and offsets[last][0] < end - CONTEXT):
                return text, done
    ids.extend(tokens[first:last])
    reached = offsets[last][0] if last < len(tokens) else end
    keep_from = _context_start(text, reached)
    return text[keep_from:], reached - keep_from


def _margin(tokenizer: PreTrainedTokenizerBase) -> int:
    """Number of characters at the end of a text whose tokens may still change. It is small if words are split first,
    and then longer than any added token."""
    cutter = tokenizer.backend_tokenizer.pre_tokenizer  # type: ignore[attr-defined]  # of fast tokenizers
    cuts = cutter is not None and len(cutter.pre_tokenize_str("one two six")) > 2
    return max([NEAR, *(2 * len(text) for text in tokenizer.get_added_vocab())]) if cuts else CONTEXT


def _context_start(text: str, at: int) -> int:
    """Begin of the left context of ``at``: at a word, where there is one near."""
    start = max(0, at - CONTEXT)
    while start and not _starts_word(text, start) and at - start < 2 * CONTEXT:
        start -= 1
    return start


def _agreed(
    tokenizer: PreTrainedTokenizerBase, window: str, tokens: list[int], offsets: list[tuple[int, int]], first: int
) -> int:
    """Index of a token well before the window's end, from where the next window reads the same tokens."""
    whole = [i for i in range(first + 1, len(tokens)) if offsets[i][0] >= offsets[i - 1][1]]  # not inside a character
    early = [i for i in whole if offsets[i][0] < len(window) - CONTEXT] or whole
    for i in early[: -1 - 256 : -1]:
        at = offsets[i][0]
        start = _context_start(window, at)
        again = tokenizer(window[start:], add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        j = next((j for j, (a, _) in enumerate(again.offset_mapping) if start + a >= at), 0)
        if start + again.offset_mapping[j][0] == at and again.input_ids[j : j + 32] == tokens[i : i + 32]:
            return i
    return early[-1] if early else len(tokens)


def _starts_word(text: str, at: int) -> bool:
    """Whether a word starts at ``at``: a space between two letters. Every pre-tokeniser splits there."""
    return 0 < at < len(text) - 1 and text[at] == " " and text[at - 1].isalpha() and text[at + 1].isalpha()


def encode(tokenizer, text: str, *, special: bool = False) -> tuple[list[int], list[Span]]:
    """Token ids of `text` [S] and their half-open character offsets [S]. No token reaches across a mark.

    Args:
        special: whether the tokenizer adds its special tokens (of empty offset) around the text.

    Raises:
        ValueError: for a slow tokenizer, which has no offsets.
    """
    if not tokenizer.is_fast:
        raise ValueError(f"tokenizer={type(tokenizer).__name__} must be a fast tokenizer: character offsets are needed")
    if CUT in text:
        return _encode_cut(tokenizer, text, special)
    encoded = tokenizer(text, add_special_tokens=special, return_offsets_mapping=True, verbose=False)
    return encoded["input_ids"], encoded["offset_mapping"]


def _encode_cut(tokenizer, text: str, special: bool) -> tuple[list[int], list[Span]]:
    """``encode`` of a text with marks, the parts between which are encoded one by one."""
    prefix, suffix = special_ids(tokenizer) if special else ([], [])
    ids, offsets, at = list(prefix), [(0, 0)] * len(prefix), 0
    for part in text.split(CUT):
        context = BORDER if at else ""
        tokens, places = encode(tokenizer, context + part)
        for token, (start, end) in zip(tokens, places, strict=True):
            if end > len(context) or not context:
                ids.append(token)
                offsets.append((at + max(0, start - len(context)), at + end - len(context)))
        at += len(part) + len(CUT)
    return ids + suffix, offsets + [(len(text), len(text))] * len(suffix)


def special_ids(tokenizer) -> tuple[list[int], list[int]]:
    """Special tokens (BOS, EOS) that a tokenizer adds before and after a text."""
    alone = tokenizer("a", add_special_tokens=False).input_ids
    whole = tokenizer("a").input_ids
    start = next(i for i in range(len(whole)) if whole[i : i + len(alone)] == alone)
    return whole[:start], whole[start + len(alone) :]


def token_span(offsets: Sequence[Span], start: int, end: int, *, inner: bool = False) -> Span:
    """Half-open token span of the characters [start, end).

    Args:
        offsets: character offsets of the tokens.
        inner: leave out tokens that reach beyond the characters; otherwise they belong to the span.

    Raises:
        ValueError: if no token lies there (never with `inner`, which then gives an empty span).
    """
    if inner:
        tokens = [i for i, (a, b) in enumerate(offsets) if start <= a < b <= end]
    else:  # a trimmed blank has an empty offset, and counts when it lies inside
        tokens = [i for i, (a, b) in enumerate(offsets) if (a < end and b > start) or start < a == b < end]
    if not tokens and not inner:
        raise ValueError(f"no token covers the characters {start} to {end}: is the answer empty?")
    return (tokens[0], tokens[-1] + 1) if tokens else (0, 0)


def hash_ids(ids: array[int]) -> str:
    """SHA-256 (hexadecimal) of token ids as little-endian 32-bit integers."""
    return hashlib.sha256(np.asarray(ids, "<i4").tobytes()).hexdigest()
