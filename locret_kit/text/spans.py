"""Tokens of a text, and the spans of tokens in which stretches of it lie."""

from __future__ import annotations

from collections.abc import Sequence

from .untrusted import BORDER, CUT

Span = tuple[int, int]


def encode(tokenizer, text: str, *, special: bool = False) -> tuple[list[int], list[Span]]:
    """Token ids of `text` [S] and their half-open character offsets [S]. No token reaches across a mark (``text.untrusted``).

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
