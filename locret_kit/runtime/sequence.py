"""One text: its prompt, piece by piece, and then its answer, token by token. Who computes is not asked here."""

from __future__ import annotations

import time
from collections import abc
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..cache.bounded import BoundedCache
from .decoders import Decoding
from .sampling import Chooser, Sampling

BLOCK = 256
"""Tokens of a prompt in one forward, at most, where the logits of each are wanted: they are as many as the vocabulary."""


@dataclass(eq=False)
class Request:
    """One prompt and how it is answered."""

    ids: abc.Sequence[int]
    max_new_tokens: int = 64
    """0 only reads the prompt."""
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0
    top_logprobs: int | None = field(default=None, kw_only=True)
    """Number of the likeliest tokens whose log-probabilities come with each token's own; None for neither."""
    prompt_logprobs: bool = field(default=False, kw_only=True)
    """Whether those of the prompt's tokens are wanted too, each after what the cache had kept when it was read."""


@dataclass(frozen=True)
class Logprob:
    """Natural logarithms of probabilities, by the model's own distribution: before temperature and penalties.

    Attributes:
        token: of the token that was chosen. top: the likeliest ids, best first, and theirs.
    """

    token: float
    top: tuple[tuple[int, float], ...]


@dataclass(eq=False)
class Sequence:
    """A request that runs.

    Attributes:
        tokens: the answer's ids so far. finish_reason: "stop", "length", "read" (nothing more was asked), "error",
            "cancelled", or None before the end.
        logprobs: of each token, where they are asked for. prompt_logprobs: of the prompt's tokens from its second on.
    """

    request: Request
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    prompt_logprobs: list[Logprob] = field(default_factory=list)
    finish_reason: str | None = None
    error: Exception | None = None
    cache: BoundedCache | None = None
    prompt_read: int = 0
    """Tokens of the prompt that the cache had read before."""
    evictions_before: int = 0
    """Evictions of the cache when it was given."""
    began: float = 0.0
    first_token_s: float | None = None
    ended_s: float | None = None
    alone: bool = False
    """Whether its forwards hold no other text; they may then cross boundaries, where its cache cuts them."""
    choose: Chooser | None = None
    decoding: Decoding | None = None

    @property
    def reading(self) -> bool:
        """Whether its prompt is still being read."""
        return not self.tokens

    @property
    def left(self) -> int:
        """Tokens of the prompt to read."""
        seen = self.cache.get_seq_length() if self.cache is not None else 0
        return 0 if self.finish_reason is not None else max(0, len(self.request.ids) - seen)

    @property
    def step(self) -> int:
        """Tokens of the next piece of the prompt."""
        cache = self.cache
        assert cache is not None
        if not cache.context.description.in_pieces:
            return self.left
        done, cut = cache.get_seq_length(), cache.in_blocks and not self.alone
        step = min(cache.schedule.until_boundary(done) if cut else cache.schedule.piece(done), self.left)
        return min(step, BLOCK) if self.request.prompt_logprobs else step

    def start(self, cache: BoundedCache, device: torch.device) -> None:
        """Give it its cache: an empty one, or one that has read the prompt's beginning.

        Raises:
            ValueError: the cache has read all of the prompt.
        """
        seen, request = cache.get_seq_length(), self.request
        if seen >= len(request.ids):
            raise ValueError(f"the cache has seen {seen} tokens already, the prompt has {len(request.ids)}")
        self.cache, self.prompt_read, self.evictions_before = cache, seen, cache.counters.evictions
        self.choose = Chooser(request.sampling, request.seed, device, request.ids)

    def next_positions(self) -> abc.Sequence[int]:
        """Positions in the prompt of the tokens of the next piece."""
        assert self.cache is not None
        done = self.cache.get_seq_length()
        return self.cache.prompt_positions(done, done + self.step)

    def advance(self, logits_V: Tensor, stop: frozenset[int]) -> bool:
        """Go on after a forward of its new tokens, the last of which has these logits; whether it has one more token or has
        ended. Raises RuntimeError as ``take``."""
        if self.reading:
            assert self.cache is not None
            self.cache.start_reread()
            if self.left:
                return False
            if not self.request.max_new_tokens:
                self.end("read")
                return True
        self.take(logits_V, stop)
        return True

    def note_prompt(self, logits_TV: Tensor) -> None:
        """Note the log-probabilities of the prompt's tokens that follow those just read, which have these logits. What is read
        for the second time was noted in the first."""
        assert self.cache is not None
        if self.cache.reread_positions:
            return
        end = self.cache.get_seq_length()
        following = self.request.ids[end - len(logits_TV) + 1 : end + 1]
        for logits_V, token in zip(logits_TV[: len(following)], following, strict=True):  # nothing follows the last
            self.prompt_logprobs.append(self._logprob(logits_V, token))

    def _logprob(self, logits_V: Tensor, token: int) -> Logprob:
        """The log-probability of a token, with those of the likeliest."""
        logprobs_V = logits_V.float().log_softmax(-1)
        top = logprobs_V.topk(min(self.request.top_logprobs or 0, len(logprobs_V)))
        pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
        return Logprob(float(logprobs_V[token]), tuple(pairs))

    def take(self, logits_V: Tensor, stop: frozenset[int]) -> bool:
        """Choose the next token; False where it is one of ``stop``, which ends the answer.

        Raises:
            RuntimeError: no probabilities to draw from: logits that are not finite.
        """
        assert self.choose is not None
        token = self.choose(logits_V)
        if self.first_token_s is None:
            self.first_token_s = time.perf_counter() - self.began
        if token in stop:
            self.end("stop")
            return False
        if self.request.top_logprobs is not None:
            self.logprobs.append(self._logprob(logits_V, token))
        self.tokens.append(token)
        if len(self.tokens) == self.request.max_new_tokens:
            self.end("length")
        return True

    def end(self, reason: str, error: Exception | None = None) -> None:
        """Let it leave; its cache is free."""
        self.finish_reason, self.error, self.cache, self.decoding = reason, error, None, None
        self.ended_s = time.perf_counter() - self.began
