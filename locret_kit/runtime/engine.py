"""One loop for all that reads and answers: prompts are read by chunks while other answers are written, in shared forwards.

A sequence's cache, evictions and random numbers are its own, so its tokens are those of its run alone: exactly in float64, to
the rounding of the shared matrix products below.
"""

import time
from collections import abc
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from itertools import chain, islice
from typing import Any, Self, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..backbones.intercept import attached
from ..backbones.libraries import forward
from ..backbones.spec import text_config
from ..backbones.wrapped import unwrapped
from ..cache.bounded import BoundedCache
from ..cache.pages import PagePool
from .drivers import Driver, Drivers, logits_after, prepare
from .sampling import stop_ids
from .sequence import PromptScheduler, Request, Sequence

R = TypeVar("R", bound=Request)


class Engine:
    """Sequences that run together. ``step`` runs one forward, on a CPU one for tokens and one for prompts; sequences may be
    added and cancelled between steps.

    Args:
        model: a causal language model; attached inside each step unless it is already.
        piece: tokens of prompts in one forward, at most; a chunk of one prompt may be more.
        chunk: tokens of a chunk, the unit of ``PromptScheduler``; None reads prompts in the order of their arrival.
        alone: whether it runs one sequence, whose forwards may cross its cache's boundaries, and whose errors ``step`` raises.
        graph: whether a CUDA graph is used; None uses one where it is possible.
        pages: texts whose rows lie side by side, so that their tokens are made in one call a layer; see ``PagePool``.

    Attributes:
        running: sequences that have not ended. There is no queue here: the caller bounds their number.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        stop: frozenset[int],
        *,
        piece: int = 512,
        chunk: int | None = None,
        alone: bool = False,
        graph: bool | None = None,
        pages: int = 0,
    ) -> None:
        self.model, self.stop, self.piece = unwrapped(model), stop, piece
        self._scheduler: PromptScheduler | None = None if chunk is None else PromptScheduler(chunk, piece)
        self.alone, self._pool, self.drivers = alone, PagePool(pages), Drivers(self.model, graph, alone)
        self.running: list[Sequence] = []
        self._added: list[tuple[Sequence, Callable[[], BoundedCache]]] = []

    @classmethod
    def shared(
        cls, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: int, *, piece: int = 512, chunk: int | None = None
    ) -> Self:  # fmt: skip
        """An engine for up to ``texts`` texts at once. The compiled call is made here, so that the first token does
        not wait for it."""
        model = unwrapped(model)
        # On a CPU one compiled call makes the tokens of all texts, wherever their rows lie.
        pages = 0 if model.device.type == "cpu" else texts
        prepare(model)
        return cls(model, stop_ids(model, tokenizer), piece=piece, chunk=chunk, pages=pages)

    @property
    def vocabulary(self) -> int:
        """Number of tokens that the model has logits for."""
        return int(text_config(self.model).vocab_size)

    def takes(self, left: int, *, background: bool = False) -> bool:
        """Whether a prompt with ``left`` tokens to read may be added now."""
        return self._scheduler is None or self._scheduler.takes(left, background=background)

    def add(
        self, request: Request, make_cache: Callable[[], BoundedCache], *, seen: int = 0, background: bool = False
    ) -> Sequence:
        """A sequence that is answered from the next step on; ``takes`` has said that it may be added.

        Args:
            make_cache: called by the next step; an empty cache, or one that has read the prompt's beginning.
            seen: tokens of the prompt that this cache will have read. background: see ``PromptScheduler``.

        Raises:
            ValueError: no tokens, one without a row in the model's embedding, or fewer than none asked for.
        """
        if not len(request.ids):
            raise ValueError("the prompt holds no tokens")
        ends, rows = (min(request.ids), max(request.ids)), text_config(self.model).vocab_size
        if ends[0] < 0 or ends[1] >= rows:
            raise ValueError(f"tokens {ends[0]} to {ends[1]} must be from 0 to {rows - 1}, the rows of the embedding")
        if request.max_new_tokens < 0:
            raise ValueError(f"max_new_tokens={request.max_new_tokens} must be at least 0")
        sequence = Sequence(request, began=time.perf_counter(), alone=self.alone)
        self.running.append(sequence)
        self._added.append((sequence, make_cache))
        if self._scheduler is not None:
            self._scheduler.enter(sequence, len(request.ids) - seen, background=background)
        return sequence

    def cancel(self, sequence: Sequence, reason: str = "cancelled") -> None:
        """Let a sequence leave, in any state; one that has ended stays as it is."""
        if sequence.finish_reason is None:
            sequence.end(reason)
            self._let_go()

    def fail(self, error: Exception, sequences: abc.Sequence[Sequence] | None = None) -> None:
        """End sequences with an error, which is raised where one runs alone; by default all that run."""
        if self.alone:
            try:
                raise error
            finally:
                del error  # a frame of its traceback that held it would hold the cache too
        for sequence in list(self.running) if sequences is None else sequences:
            sequence.end("error", error)
        self._let_go()

    def attached(self) -> AbstractContextManager[None]:
        """A block that attaches the model once for all its steps: that takes longer than a token of a small model."""
        return attached(self.model)

    @torch.inference_mode()
    def step(self) -> list[Sequence]:
        """One forward: the next token of every sequence that is decoded, and pieces of the prompts of others. Gives the
        sequences that have a new token or have ended.

        An error of one sequence's settings ends that sequence alone; an error of the forward ends those that took part.
        """
        changed = self._begin()
        forwards = self.drivers.assign(self._turns(), self.running)
        with attached(self.model):
            for driver, sequences in forwards:
                changed += self._advance(driver, sequences)
        self._let_go()
        return changed

    def read(self, sequence: Sequence, cache: BoundedCache, progress: Callable[[int, int], None] | None) -> None:
        """Read the prompt of the one sequence into its ``cache``. ``progress(done, total)`` is called after every piece."""
        while self.running and sequence.reading:
            self.step()
            if progress:
                progress(cache.get_seq_length(), len(sequence.request.ids))

    def _let_go(self) -> None:
        """Let sequences leave that have ended."""
        self.running = [sequence for sequence in self.running if sequence.finish_reason is None]
        self.drivers.keep(self.running)

    def _advance(self, driver: Driver | None, sequences: list[Sequence]) -> list[Sequence]:
        """One forward of some sequences, and what follows from it; those that have a new token or have ended."""
        changed = []
        try:
            logits_NV = self._forward(driver, sequences)
        except Exception as error:
            self.fail(error, sequences)
            return sequences
        for sequence, logits_V in zip(sequences, logits_NV, strict=True):
            try:
                if sequence.advance(logits_V, self.stop):
                    changed.append(sequence)
            except RuntimeError as error:  # no probabilities to draw from: logits that are not finite
                self.fail(error, [sequence])
                changed.append(sequence)
        return changed

    def _forward(self, driver: Driver | None, sequences: list[Sequence]) -> Tensor:
        """Logits ``[N, V]`` after the new tokens of each sequence."""
        caches = [sequence.cache for sequence in sequences if sequence.cache is not None]
        first = sequences[0]
        if driver is not None:
            # A driver of chunks is the only one for a text that is read, and it takes ids on the device.
            given: Any = first.next_piece() if first.reading else [sequence.tokens[-1] for sequence in sequences]
            return driver(caches, given)
        # Those that are decoded come first (see ``_turns``): one copy to the device for the tokens of all.
        decoded = [sequence.tokens[-1] for sequence in sequences if not sequence.reading]
        pieces = [sequence.next_piece() for sequence in sequences if sequence.reading]
        newest = [torch.tensor(decoded, device=self.model.device)] if decoded else []
        ids_1T = torch.cat([*newest, *pieces])[None]
        if not (first.reading and first.wants_prompt_logits):
            return logits_after(self.model, caches, ids_1T, [1] * len(decoded) + [len(piece) for piece in pieces])
        logits_TV = forward(self.model, ids_1T, caches[0])[0].float()
        first.note_prompt(logits_TV)
        return logits_TV[-1:]

    def _begin(self) -> list[Sequence]:
        """Make the caches of the added sequences. Returns the sequences whose cache could not be made."""
        failed = []
        added, self._added = self._added, []
        for sequence, make_cache in added:
            if sequence.finish_reason is not None:  # cancelled already
                continue
            try:
                cache = make_cache()
                cache.bind(self.model)
                if sequence.request.max_new_tokens:  # who only reads keeps rows of its own
                    self._pool.enter(cache)
                sequence.start(cache, self.model.device)
            except Exception as error:
                self.fail(error, [sequence])
                failed.append(sequence)
        return failed

    def _turns(self) -> Iterator[Sequence]:
        """Sequences of the next step, those that are decoded first."""
        yield from (sequence for sequence in self.running if not sequence.reading)
        reading, room = [sequence for sequence in self.running if sequence.reading], self.piece
        for sequence in reading if self._scheduler is None else self._scheduler.pick(reading):
            if self._scheduler is None and sequence.piece_len > room and room < self.piece:
                break
            room -= sequence.piece_len
            yield sequence


def run(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    requests: Iterable[R],
    make_cache: Callable[[R], BoundedCache],
    *,
    max_running: int = 16,
    piece: int = 512,
) -> Iterator[Sequence]:
    """Answer requests together; each comes back as it ends, with ``request``, ``tokens``, ``finish_reason`` and ``error``.
    Requests are taken one by one, when there is room, and their prompts are read in that order.

    Args:
        make_cache: gives a request's cache when it is its turn; an empty one, or one that has read the prompt's beginning.
        max_running: sequences in memory at once. piece: tokens of prompts in one forward, at most.

    Raises:
        ValueError: a request that cannot be answered, see ``Engine.add``; no room for any.
    """
    if max_running < 1:
        raise ValueError(f"max_running={max_running} must be at least 1")
    waiting = iter(requests)
    first = [*islice(waiting, max_running)]
    engine, waiting = Engine.shared(model, tokenizer, len(first), piece=piece), chain(first, waiting)
    with attached(model):
        while True:
            for request in islice(waiting, max_running - len(engine.running)):
                engine.add(request, partial(make_cache, request))
            if not engine.running:
                return
            yield from (sequence for sequence in engine.step() if sequence.finish_reason is not None)
