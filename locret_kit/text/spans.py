"""Tokens of a text, and the spans of tokens in which stretches of it lie."""

from __future__ import annotations

from collections.abc import Sequence

Span = tuple[int, int]


def encode(tokenizer, text: str, *, special: bool = False) -> tuple[list[int], list[Span]]:
    """Token ids of `text` [S] and their half-open character offsets [S].

    Args:
        special: whether the tokenizer adds its special tokens (of empty offset) around the text.

    Raises:
        ValueError: for a slow tokenizer, which has no offsets.
    """
    if not tokenizer.is_fast:
        raise ValueError(f"tokenizer={type(tokenizer).__name__} must be a fast tokenizer: character offsets are needed")
    encoded = tokenizer(text, add_special_tokens=special, return_offsets_mapping=True, verbose=False)
    return encoded["input_ids"], encoded["offset_mapping"]


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
