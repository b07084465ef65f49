"""Text to token ids as a stream: a long document is never tokenised (or held) at once."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Any

BLOCK = 1 << 16
"""Characters encoded at a time."""
CONTEXT = 512
"""Characters by which windows overlap."""


def stream_ids(tokenizer: Any, pieces: Iterable[str], *, special: bool = False, block: int = BLOCK) -> array:
    """Token ids (an ``array('i')``) of the concatenated pieces, equal to those of one call on the whole text.

    Text is encoded in windows that overlap by ``CONTEXT`` characters; a window's tokens are taken up to a token that
    starts at a word, where the next window must have a token border too.

    Args:
        special: add the tokenizer's own special tokens (a BOS) as one call would.
    """
    ids, prefix, suffix = array("i"), *_specials(tokenizer, special)
    ids.extend(prefix)
    if not tokenizer.is_fast:
        ids.extend(tokenizer("".join(pieces), add_special_tokens=False).input_ids)
        return ids + array("i", suffix)
    text, done = "", 0  # `text[:done]` is encoded already and kept as left context
    for piece in pieces:
        text += piece
        while len(text) - done > block:
            text, done = _take(tokenizer, text, done, done + block, ids)
    _take(tokenizer, text, done, len(text), ids)
    ids.extend(suffix)
    return ids


def _take(tokenizer: Any, text: str, done: int, end: int, ids: array) -> tuple[str, int]:
    """Encode ``text[:end]``, append the ids from ``done`` on, and return the text left with its encoded prefix."""
    encoding = tokenizer(text[:end], add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    tokens, offsets = encoding.input_ids, encoding.offset_mapping
    first = next((i for i, (a, b) in enumerate(offsets) if b > done), len(tokens))
    last = len(tokens)
    if end < len(text):
        # Cut well before the window's end, where later text cannot change a token any more.
        last = next(
            (
                i
                for i in range(last - 1, first, -1)
                if offsets[i][0] < end - CONTEXT and _starts_word(text, offsets[i][0])
            ),
            first,
        )
        if last == first:  # no such word in the whole block
            last = _agreed(tokenizer, text[:end], tokens, offsets, first)
    ids.extend(tokens[first:last])
    reached = offsets[last][0] if last < len(tokens) else end
    keep_from = _context_start(text, reached)
    return text[keep_from:], reached - keep_from


def _context_start(text: str, at: int) -> int:
    """Where the left context of ``at`` begins: at a word, where there is one near."""
    start = max(0, at - CONTEXT)
    while start and not _starts_word(text, start) and at - start < 2 * CONTEXT:
        start -= 1
    return start


def _agreed(tokenizer: Any, window: str, tokens: list[int], offsets: list[tuple[int, int]], first: int) -> int:
    """A token, well before the window's end, from which on the next window will read the same tokens."""
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


def _specials(tokenizer: Any, special: bool) -> tuple[list[int], list[int]]:
    """Special tokens (BOS, EOS) that the tokenizer adds before and after a text."""
    if not special:
        return [], []
    plain = tokenizer("a", add_special_tokens=False).input_ids
    whole = tokenizer("a").input_ids
    start = next(i for i in range(len(whole)) if whole[i : i + len(plain)] == plain)
    return whole[:start], whole[start + len(plain) :]
