"""Many requests at once, of any lengths: prompts are read by chunks while other answers are written, in shared forwards.

A sequence's cache, evictions and random numbers are its own, so its tokens are those of its run alone: exactly in float64, to
the rounding of the shared matrix products below.
"""

from __future__ import annotations

import time
from collections import abc
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from typing import TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..backbones.intercept import attached
from ..backbones.releases import forward
from ..backbones.wrapped import unwrapped
from ..cache.bounded import BoundedCache
from .cpu_decoder import cpu_decoder
from .decoders import Decoder, Decoding, DynamicDecoder, logits_after
from .sampling import stop_ids
from .sequence import PromptScheduler, Request, Sequence

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
        self.model, self.stop, self.piece, self.scheduler = unwrapped(model), stop, piece, scheduler
        self.running: list[Sequence] = []
        self._added: list[tuple[Sequence, Callable[[], BoundedCache]]] = []
        cpu_decoder(self.model)  # compiled before the first text comes

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
        groups: dict[Decoder | None, list[Piece]] = {}
        for piece in pieces:
            groups.setdefault(self._decoder(piece[0]), []).append(piece)
        with attached(self.model):
            for decoder, group in groups.items():
                noted = [piece for piece in group if piece[0].reading and piece[0].request.prompt_logprobs]
                for piece in noted:
                    changed += self._advance(decoder, [piece])
                if len(noted) < len(group):
                    changed += self._advance(decoder, [piece for piece in group if piece not in noted])
        self.running = [sequence for sequence in self.running if sequence.finish_reason is None]
        return changed

    def _advance(self, decoder: Decoder | None, pieces: list[Piece]) -> list[Sequence]:
        """One forward of some sequences, and what follows from it; those that have a new token or have ended."""
        changed = []
        caches = [sequence.cache for sequence, _ in pieces if sequence.cache is not None]
        try:
            if pieces[0][0].reading and pieces[0][0].request.prompt_logprobs:
                logits_BV = self._forward_noted(*pieces[0])
            elif decoder is None:
                ids = torch.tensor([[token for _, piece in pieces for token in piece]], device=self.model.device)
                logits_BV = logits_after(self.model, caches, ids, [len(piece) for _, piece in pieces]).float()
            else:
                logits_BV = decoder(caches, [token for _, (token,) in pieces])
        except Exception as error:
            self.fail(error, [sequence for sequence, _ in pieces])
            return [sequence for sequence, _ in pieces]
        for (sequence, _), logits_V in zip(pieces, logits_BV, strict=True):
            try:
                if sequence.advance(logits_V, self.stop):
                    changed.append(sequence)
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
            try:
                cache = make_cache()
                cache.bind(self.model)
                sequence.start(cache, self.model.device)
            except Exception as error:
                sequence.end("error", error)
                failed.append(sequence)
        self.running = [sequence for sequence in self.running if sequence.finish_reason is None]
        return failed

    def _pieces(self) -> list[Piece]:
        """Sequences of the next step, each with its new tokens."""
        pieces: list[Piece] = []
        for sequence in self.running:
            if not sequence.reading:
                pieces.append((sequence, [sequence.tokens[-1]]))
        reading = [sequence for sequence in self.running if sequence.reading]
        for sequence in self._in_turn(reading) if self.scheduler is None else self.scheduler.pick(reading):
            pieces.append((sequence, [sequence.request.ids[at] for at in sequence.next_positions()]))
        return pieces

    def _in_turn(self, reading: list[Sequence]) -> Iterator[Sequence]:
        """The prompts that have a piece in the next forward, in the order in which they were added."""
        room = self.piece
        for sequence in reading:
            if sequence.step > room and room < self.piece:
                break
            room -= sequence.step
            yield sequence

    def _forward_noted(self, sequence: Sequence, piece: list[int]) -> Tensor:
        """Logits ``[1, V]`` after the last new token of one sequence, which notes those of every token."""
        assert sequence.cache is not None
        ids = torch.tensor([piece], device=self.model.device)
        logits_TV = forward(self.model, ids, sequence.cache)[0].float()
        sequence.note_prompt(logits_TV)
        return logits_TV[-1:]

    def _decoder(self, sequence: Sequence) -> Decoder | None:
        """The decoder of a sequence's next token; None where its new tokens go into the shared forward."""
        if sequence.reading or sequence.cache is None:
            return None
        if sequence.decoding is None:
            sequence.decoding = Decoding(self.model, sequence.cache)
        decoder = sequence.decoding.next_decoder()
        return None if isinstance(decoder, DynamicDecoder) else decoder


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
