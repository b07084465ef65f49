"""Answers that follow a grammar: JSON of a schema, calls of tools. llguidance says which tokens may come next."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import torch
from fastapi import HTTPException

from ..answers.grammar import Spell, up_to
from ..naming import first_line, install_line
from ..text.tokens import CHARACTER

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from transformers import PreTrainedTokenizerBase

FORMAT = re.compile(r"Unknown format: (.*?)(?: \(\d+ times\))?", re.DOTALL)
"""The library's words for a format that it does not know."""
DIGITS = 40
"""Digits of a number in a row, at most: JSON has no bound, and small models find no end."""


class TooLarge(RuntimeError, ValueError):
    """A schema that is found too large while its answer is written: the request's fault, which ends that answer alone."""


class Grammar:
    """The tokens that a grammar allows next in one answer: see ``Sampling.constrain``.

    Args:
        digits: number of digits of each token that has only digits. letter: a token that cannot continue a number.
    """

    def __init__(self, matcher: LLMatcher, digits: Mapping[int, int], letter: int) -> None:
        self._matcher, self._digits, self._letter = matcher, digits, letter
        self._row = 0

    def allowed(self, vocabulary: int) -> torch.Tensor:
        """Mask [V] (bool) of the tokens that may come next. Raises TooLarge if the grammar exceeds the library's limits."""
        if self._matcher.is_error():
            said = first_line(ValueError(self._matcher.get_error()))
            raise TooLarge(f"the schema cannot be followed: {said}")
        bits = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), np.uint8), bitorder="little")
        allowed_V = np.zeros(vocabulary, np.uint8)  # a vocabulary is often padded, and a mask too
        allowed_V[: len(bits)] = bits[:vocabulary]
        if self._row >= DIGITS and not allowed_V[self._letter]:  # in a number, not in a text
            shorter_V = allowed_V.copy()
            shorter_V[list(self._digits)] = 0
            allowed_V = shorter_V if shorter_V.any() else allowed_V
        return torch.from_numpy(allowed_V.view(np.bool_))

    def take(self, token: int) -> None:
        """Take the newest token. A mark that closes a thought within a character stands in the place of its half."""
        for _ in range(CHARACTER - 1):
            if self._matcher.is_error() or self._matcher.validate_tokens([token]):
                break
            self._matcher.rollback(1)
        self._matcher.consume_token(token)
        self._row = self._row + self._digits[token] if token in self._digits else 0


@lru_cache(maxsize=4)
def speller(tokenizer: PreTrainedTokenizerBase) -> Spell:
    """Texts in a grammar: added tokens by their ids, as the model writes them, and the rest as it is."""
    tokens = {text: token for text, token in tokenizer.get_added_vocab().items() if text.strip()}
    cut = re.compile(f"({'|'.join(map(re.escape, sorted(tokens, key=len, reverse=True))) or '(?!)'})")

    def spell(text: str) -> str:
        parts = [part for part in cut.split(text) if part]
        return " ".join(f"<[{tokens[part]}]>" if part in tokens else json.dumps(part) for part in parts) or '""'

    return spell


def constraint(
    tokenizer: PreTrainedTokenizerBase,
    stop: frozenset[int],
    rules: Sequence[str],
    text_end: str = "",
    notes: list[str] | None = None,
) -> Callable[[], Grammar]:
    """A maker of constraints. An answer under a constraint follows one of the rules, whose ``text`` has this end.

    Formats of texts that the library does not know have no effect, as JSON Schema has it, and are added to ``notes``.

    Raises:
        HTTPException: 400, if a schema is invalid or cannot be followed, or if the library is not installed.
    """
    try:
        from llguidance import LLMatcher
    except ImportError:
        raise HTTPException(400, f"answers by a grammar need llguidance: {install_line('serve')}") from None

    text = f"\n{up_to('text', text_end, speller(tokenizer))}\n" if text_end else ""
    try:
        grammar = LLMatcher.grammar_from_lark("start: " + " | ".join(rules) + text)
        first = LLMatcher(_tokenizer(tokenizer, stop), grammar, log_level=0)
        _, said = LLMatcher.validate_grammar_with_warnings(grammar, _tokenizer(tokenizer, stop))
        if first.is_error() or (others := [one for one in said if not FORMAT.fullmatch(one)]):
            raise ValueError(first.get_error() or others[0])  # what else the library would leave out
        if notes is not None:
            notes += [f"format {found[1]}" for found in map(FORMAT.fullmatch, said) if found]
    except (ValueError, RecursionError) as error:
        raise HTTPException(400, f"the schema cannot be followed: {_reason(error)}") from None
    digits, letter = _digits(tokenizer)
    return lambda: Grammar(first.deep_copy(), digits, letter)


def _reason(error: Exception) -> str:
    """Why the library refuses a schema, in one line."""
    lines = str(error).splitlines()
    if wrong := [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]:  # of a pattern
        return f"pattern {lines[1].strip()!r}: {wrong[0]}"
    return first_line(error).rpartition("JSON schema: ")[2]


@lru_cache(maxsize=2)
def _tokenizer(tokenizer: PreTrainedTokenizerBase, stop: frozenset[int]) -> LLTokenizer:
    """The vocabulary as llguidance has it; takes seconds for a large one."""
    from llguidance.hf import from_tokenizer

    return from_tokenizer(tokenizer, eos_token=sorted(stop) or None)  # type: ignore[arg-type]


@lru_cache(maxsize=2)
def _digits(tokenizer: PreTrainedTokenizerBase) -> tuple[dict[int, int], int]:
    """Number of digits of each token that is nothing else, and a token of one letter that is in no number."""
    vocabulary = tokenizer.get_vocab()
    digits = {token: len(text) for text, token in vocabulary.items() if text.isascii() and text.isdigit()}
    return digits, next((vocabulary[text] for text in "ghijklmopqsvwxyz" if text in vocabulary), 0)
