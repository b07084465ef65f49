"""Many requests at once, of any lengths: prompts are read by chunks while other answers are written, in shared forwards.

A sequence's cache, evictions and random numbers are its own, so its tokens are those of its run alone: exactly in float64, to
the rounding of the shared matrix products below.
"""

from __future__ import annotations

import time
from collections import abc
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..backbones.intercept import attached
from ..cache.bounded import BoundedCache
from .cpu_decoder import cpu_decoder
from .decoders import Decoder, Decoding, DynamicDecoder, logits_after
from .scheduler import PromptScheduler
from .session import Chooser, Sampling, stop_ids


@dataclass(eq=False)
class Request:
    """One prompt and how it is answered."""

    ids: abc.Sequence[int]
    max_new_tokens: int = 64
    """0 only reads the prompt."""
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0
    top_logprobs: int | None = field(default=None, kw_only=True)
    """Of each token of the answer: its log-probability, and those of so many of the likeliest; None for neither."""


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
        logprobs: of each token, where they are asked for.
    """

    request: Request
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
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
    _choose: Chooser | None = None
    _next: int | None = None
    _decoding: Decoding | None = None

    @property
    def reading(self) -> bool:
        """Whether its prompt is still being read."""
        return self._next is None

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
        done = cache.get_seq_length()
        step = cache.schedule.until_boundary(done) if cache.needs_logits else cache.schedule.piece(done)
        return min(step, self.left)

    def end(self, reason: str, error: Exception | None = None) -> None:
        """Let it leave; its cache is free."""
        self.finish_reason, self.error, self.cache, self._decoding = reason, error, None, None
        self.ended_s = time.perf_counter() - self.began


R = TypeVar("R", bound=Request)
Piece = tuple[Sequence, list[int]]
"""A sequence and its new tokens."""


class Batch:
    """Sequences that run together. ``step`` runs one forward, on a CPU one for tokens and one for prompts; sequences may be
    added and cancelled between steps.

    Args:
        model: a causal language model; attached inside each step unless it is already.
        piece: tokens of prompts in one forward, at most; a chunk of one prompt may be more.
        scheduler: the order of prompts, which has a ``piece`` of its own; by default that in which they were added.

    Attributes:
        running: sequences that have not ended. Nobody waits here: whoever adds sequences bounds how many there are.

    Raises:
        ValueError: a piece below 1.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        stop: frozenset[int],
        *,
        piece: int = 512,
        scheduler: PromptScheduler[Sequence] | None = None,
    ) -> None:
        if piece < 1:
            raise ValueError(f"piece={piece} must be at least 1")
        self.model, self.stop, self.piece, self.scheduler = model, stop, piece, scheduler
        self.running: list[Sequence] = []
        self._added: list[tuple[Sequence, Callable[[], BoundedCache]]] = []
        cpu_decoder(model)  # compiled before the first text comes

    def add(self, request: Request, make_cache: Callable[[], BoundedCache]) -> Sequence:
        """A sequence that is answered from the next step on.

        Args:
            make_cache: called by the next step; an empty cache, or one that has read the prompt's beginning.

        Raises:
            ValueError: no tokens, or fewer than none asked for.
        """
        if not len(request.ids):
            raise ValueError("the prompt holds no tokens")
        if request.max_new_tokens < 0:
            raise ValueError(f"max_new_tokens={request.max_new_tokens} must be at least 0")
        sequence = Sequence(request, began=time.perf_counter())
        self.running.append(sequence)
        self._added.append((sequence, make_cache))
        return sequence

    def cancel(self, sequence: Sequence, reason: str = "cancelled") -> None:
        """Let a sequence leave, whatever it is doing; one that has ended stays as it is."""
        if sequence.finish_reason is None:
            sequence.end(reason)
            self.running = [one for one in self.running if one is not sequence]

    def fail(self, error: Exception, sequences: abc.Sequence[Sequence] | None = None) -> None:
        """End sequences with an error; by default all that run."""
        for sequence in list(self.running) if sequences is None else sequences:
            sequence.end("error", error)
        self.running = [sequence for sequence in self.running if sequence.finish_reason is None]

    @torch.inference_mode()
    def step(self) -> list[Sequence]:
        """One forward: the next token of every sequence that is decoded, and pieces of the prompts of others. Gives the
        sequences that have a new token or have ended.

        An error of one sequence's settings ends that sequence alone; an error of the forward ends those that took part.
        """
        changed = self._begin()
        pieces = self._pieces()
        if not pieces:
            return changed
        together: dict[Decoder, list[Piece]] = {}
        rest = []
        for piece in pieces:
            decoding = piece[0]._decoding
            decoder = None if decoding is None else decoding.next_decoder()
            if decoder is None or isinstance(decoder, DynamicDecoder):
                rest.append(piece)
            else:
                together.setdefault(decoder, []).append(piece)
        with attached(self.model):
            for decoder, some in together.items():
                changed += self._advance(some, partial(_decode, decoder))
            if rest:
                changed += self._advance(rest, self._forward)
        self.running = [sequence for sequence in self.running if sequence.finish_reason is None]
        return changed

    def _advance(
        self, pieces: list[Piece], forward: Callable[[list[BoundedCache], list[list[int]]], Tensor]
    ) -> list[Sequence]:
        """One forward of some sequences, and what follows from it; those that have a new token or have ended."""
        changed = []
        caches = [sequence.cache for sequence, _ in pieces if sequence.cache is not None]
        try:
            logits_BV = forward(caches, [ids for _, ids in pieces])
        except Exception as error:
            self.fail(error, [sequence for sequence, _ in pieces])
            return [sequence for sequence, _ in pieces]
        for (sequence, _), logits_V in zip(pieces, logits_BV, strict=True):
            cache = sequence.cache
            assert cache is not None and sequence._choose is not None
            if sequence.reading:
                cache.start_reread()
                if cache.get_seq_length() < len(sequence.request.ids):
                    continue
                if not sequence.request.max_new_tokens:
                    sequence.end("read")
                    changed.append(sequence)
                    continue
            try:
                self._take(sequence, logits_V)
            except RuntimeError as error:  # no probabilities to draw from: logits that are not finite
                sequence.end("error", error)
            changed.append(sequence)
        return changed

    def _begin(self) -> list[Sequence]:
        """Make the caches of the sequences that were added; gives those for which that failed."""
        failed = []
        added, self._added = self._added, []
        for sequence, make_cache in added:
            if sequence.finish_reason is not None:  # cancelled already
                continue
            request = sequence.request
            try:
                cache = sequence.cache = make_cache()
                cache.bind(self.model)
                sequence.prompt_read, sequence.evictions_before = cache.get_seq_length(), cache.counters.evictions
                if sequence.prompt_read >= len(request.ids):
                    raise ValueError(
                        f"the cache has seen {sequence.prompt_read} tokens already, the prompt has {len(request.ids)}"
                    )
                sequence._choose = Chooser(request.sampling, request.seed, self.model.device, request.ids)
            except Exception as error:
                sequence.end("error", error)
                failed.append(sequence)
        self.running = [sequence for sequence in self.running if sequence.finish_reason is None]
        return failed

    def _pieces(self) -> list[Piece]:
        """Sequences of the next step, each with its new tokens."""
        pieces: list[Piece] = []
        for sequence in self.running:
            if sequence._next is not None:
                pieces.append((sequence, [sequence._next]))
        reading = [sequence for sequence in self.running if sequence.reading]
        for sequence in self._in_turn(reading) if self.scheduler is None else self.scheduler.pick(reading):
            cache, ids = sequence.cache, sequence.request.ids
            assert cache is not None
            done = cache.get_seq_length()
            pieces.append((sequence, [ids[at] for at in cache.prompt_positions(done, done + sequence.step)]))
        return pieces

    def _in_turn(self, reading: list[Sequence]) -> Iterator[Sequence]:
        """The prompts that have a piece in the next forward, in the order in which they were added."""
        room = self.piece
        for sequence in reading:
            if sequence.step > room and room < self.piece:
                break
            room -= sequence.step
            yield sequence

    def _forward(self, caches: list[BoundedCache], pieces: list[list[int]]) -> Tensor:
        """Logits ``[sequences, V]`` after the last new token of each."""
        ids = torch.tensor([[token for piece in pieces for token in piece]], device=self.model.device)
        return logits_after(self.model, caches, ids, [len(piece) for piece in pieces])

    def _take(self, sequence: Sequence, logits_V: Tensor) -> None:
        """A sequence's next token."""
        assert sequence._choose is not None
        token, wanted = sequence._choose(logits_V), sequence.request.top_logprobs
        if sequence.first_token_s is None:
            sequence.first_token_s = time.perf_counter() - sequence.began
        if token in self.stop:
            sequence.end("stop")
            return
        if wanted is not None:
            logprobs_V = logits_V.log_softmax(-1)
            top = logprobs_V.topk(min(wanted, len(logprobs_V)))
            pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
            sequence.logprobs.append(Logprob(float(logprobs_V[token]), tuple(pairs)))
        sequence.tokens.append(token)
        sequence._next = token
        if len(sequence.tokens) == sequence.request.max_new_tokens:
            sequence.end("length")
        elif sequence._decoding is None:
            assert sequence.cache is not None
            sequence._decoding = Decoding(self.model, sequence.cache)


def _decode(decoder: Decoder, caches: list[BoundedCache], pieces: list[list[int]]) -> Tensor:
    """Logits ``[sequences, V]`` after a token of each."""
    return decoder(caches, [token for (token,) in pieces])


def run(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    requests: Iterable[R],
    make_cache: Callable[[R], BoundedCache],
    *,
    max_running: int = 16,
    piece: int = 512,
) -> Iterator[Sequence]:
    """Answer requests together; gives the answers as they end. Requests are taken one by one, when there is room, and their
    prompts are read in that order.

    Args:
        make_cache: gives a request's cache when it is its turn; an empty one, or one that has read the prompt's beginning.
        max_running: sequences in memory at once. piece: tokens of prompts in one forward, at most.

    Raises:
        ValueError: a number below 1, or a request that cannot be answered, see ``Batch.add``.
    """
    if max_running < 1:
        raise ValueError(f"max_running={max_running} must be at least 1")
    batch, waiting = Batch(model, stop_ids(model, tokenizer), piece=piece), iter(requests)
    with attached(model):
        while True:
            for request in islice(waiting, max_running - len(batch.running)):
                batch.add(request, partial(make_cache, request))
            if not batch.running:
                return
            yield from (sequence for sequence in batch.step() if sequence.finish_reason is not None)
