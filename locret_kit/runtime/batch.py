"""Many texts at once, of any lengths: prompts are read by chunks while other texts are decoded, in forwards that all share.

A text's cache, evictions and random numbers are its own, so its tokens are those of its run alone: exactly in float64, to
the rounding of the shared matrix products below.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..backbones.intercept import attached
from ..cache.bounded import BoundedCache
from ..cache.lanes import Packed
from .native import NativeDecoder, native_decoder
from .scheduler import PromptScheduler
from .session import Chooser, Sampling, stop_ids


@dataclass(frozen=True)
class Request:
    """One prompt and how it is answered."""

    ids: Sequence[int]
    cache: Callable[[], BoundedCache]
    """Makes its cache, when it is its turn: empty, or one that has read the prompt's beginning."""
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


@dataclass
class Text:
    """A text of a batch.

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
        self.finish_reason, self.error, self.cache = reason, error, None
        self.ended_s = time.perf_counter() - self.began


Piece = tuple[Text, list[int]]
"""A text and its new tokens."""


class Batch:
    """Texts that are answered together. ``step`` runs one forward, on a CPU one for tokens and one for prompts; texts may be
    added and cancelled between steps.

    Args:
        model: a causal language model; attached inside each step unless it is already.
        piece: tokens of prompts in one forward, at most; a chunk of one prompt may be more.
        scheduler: the order of prompts, which has a ``piece`` of its own; by default that in which they were added.

    Attributes:
        running: texts that have not ended. Nobody waits here: whoever adds texts bounds how many there are.

    Raises:
        ValueError: a piece below 1.
    """

    def __init__(
        self, model: PreTrainedModel, stop: frozenset[int], *, piece: int = 512, scheduler: PromptScheduler[Text] | None = None
    ) -> None:  # fmt: skip
        if piece < 1:
            raise ValueError(f"piece={piece} must be at least 1")
        self.model, self.stop, self.piece, self.scheduler = model, stop, piece, scheduler
        self.running: list[Text] = []
        self._native = native_decoder(model)

    def add(self, request: Request) -> Text:
        """A text that is answered from the next step on, which makes its cache.

        Raises:
            ValueError: no tokens, or fewer than none asked for.
        """
        if not len(request.ids):
            raise ValueError("the prompt holds no tokens")
        if request.max_new_tokens < 0:
            raise ValueError(f"max_new_tokens={request.max_new_tokens} must be at least 0")
        text = Text(request, began=time.perf_counter())
        self.running.append(text)
        return text

    def cancel(self, text: Text, reason: str = "cancelled") -> None:
        """Let a text leave, whatever it is doing; one that has ended stays as it is."""
        if text.finish_reason is None:
            text.end(reason)
            self.running = [one for one in self.running if one is not text]

    def fail(self, error: Exception, texts: Sequence[Text] | None = None) -> None:
        """End texts with an error; by default all that run."""
        for text in list(self.running) if texts is None else texts:
            text.end("error", error)
        self.running = [text for text in self.running if text.finish_reason is None]

    @torch.inference_mode()
    def step(self) -> list[Text]:
        """One forward: the next token of every text that is decoded, and pieces of the prompts of others. Gives the texts that
        have a new token or have ended.

        An error of one text's settings ends that text alone; an error of the forward ends those that took part.
        """
        changed = self._begin()
        pieces = self._pieces()
        if not pieces:
            return changed
        together = [piece for piece in pieces if self._one_call(piece[0])]
        rest = [piece for piece in pieces if not any(piece is one for one in together)]
        with attached(self.model):
            for some, forward in ((together, self._decode), (rest, self._forward)):
                if some:
                    changed += self._advance(some, forward)
        self.running = [text for text in self.running if text.finish_reason is None]
        return changed

    def _advance(
        self, pieces: list[Piece], forward: Callable[[list[BoundedCache], list[list[int]]], Tensor]
    ) -> list[Text]:
        """One forward of some texts, and what follows from it; those that have a new token or have ended."""
        changed = []
        caches = [text.cache for text, _ in pieces if text.cache is not None]
        try:
            logits_BV = forward(caches, [ids for _, ids in pieces])
        except Exception as error:
            self.fail(error, [text for text, _ in pieces])
            return [text for text, _ in pieces]
        for (text, _), logits_V in zip(pieces, logits_BV, strict=True):
            cache = text.cache
            assert cache is not None and text._choose is not None
            if text.reading:
                cache.start_reread()
                if cache.get_seq_length() < len(text.request.ids):
                    continue
                if not text.request.max_new_tokens:
                    text.end("read")
                    changed.append(text)
                    continue
            try:
                self._take(text, logits_V.float())
            except RuntimeError as error:  # no probabilities to draw from: logits that are not finite
                text.end("error", error)
            changed.append(text)
        return changed

    def _one_call(self, text: Text) -> bool:
        """Whether a text's next token comes from the compiled call that texts share on a CPU."""
        native, cache = self._native, text.cache
        if text._next is None or cache is None or isinstance(native, str) or native.reason_against(cache) is not None:
            return False
        return native.takes(cache)

    def _decode(self, caches: list[BoundedCache], pieces: list[list[int]]) -> Tensor:
        """Logits ``[texts, V]`` after a token of each text."""
        assert isinstance(self._native, NativeDecoder)
        return self._native(caches, [token for (token,) in pieces])

    def _begin(self) -> list[Text]:
        """Make the caches of the texts that were added; the texts for which that failed."""
        failed = []
        for text in self.running:
            if text.cache is not None:
                continue
            request = text.request
            try:
                text.cache = request.cache()
                text.cache.bind(self.model)
                text.prompt_read, text.evictions_before = text.cache.get_seq_length(), text.cache.counters.evictions
                if text.prompt_read >= len(request.ids):
                    raise ValueError(
                        f"the cache has seen {text.prompt_read} tokens already, the prompt has {len(request.ids)}"
                    )
                text._choose = Chooser(request.sampling, request.seed, self.model.device, request.ids)
            except Exception as error:
                text.end("error", error)
                failed.append(text)
        self.running = [text for text in self.running if text.finish_reason is None]
        return failed

    def _pieces(self) -> list[Piece]:
        """Texts of the next step, each with its new tokens."""
        pieces: list[Piece] = []
        for text in self.running:
            if text._next is not None:
                pieces.append((text, [text._next]))
        reading = [text for text in self.running if text.reading]
        for text in self._in_turn(reading) if self.scheduler is None else self.scheduler.pick(reading):
            cache, ids = text.cache, text.request.ids
            assert cache is not None
            done = cache.get_seq_length()
            pieces.append((text, [ids[at] for at in cache.prompt_positions(done, done + text.step)]))
        return pieces

    def _in_turn(self, reading: list[Text]) -> Iterator[Text]:
        """The prompts that have a piece in the next forward, in the order in which they were added."""
        room = self.piece
        for text in reading:
            if text.step > room and room < self.piece:
                break
            room -= text.step
            yield text

    def _forward(self, caches: list[BoundedCache], pieces: list[list[int]]) -> Tensor:
        """Logits ``[texts, V]`` after each text's last new token."""
        packed = Packed(caches, [len(piece) for piece in pieces])
        ids = torch.tensor([[token for piece in pieces for token in piece]], device=self.model.device)
        last = torch.tensor(packed.last, device=self.model.device)
        return self.model(input_ids=ids, past_key_values=packed, use_cache=True, logits_to_keep=last).logits[0]

    def _take(self, text: Text, logits_V: Tensor) -> None:
        """A text's next token."""
        assert text._choose is not None
        token, wanted = text._choose(logits_V), text.request.top_logprobs
        if text.first_token_s is None:
            text.first_token_s = time.perf_counter() - text.began
        if token in self.stop:
            text.end("stop")
            return
        if wanted is not None:
            logprobs_V = logits_V.log_softmax(-1)
            top = logprobs_V.topk(min(wanted, len(logprobs_V)))
            pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
            text.logprobs.append(Logprob(float(logprobs_V[token]), tuple(pairs)))
        text.tokens.append(token)
        text._next = token
        if len(text.tokens) == text.request.max_new_tokens:
            text.end("length")


def run(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    requests: Iterable[Request],
    *,
    max_running: int = 16,
    piece: int = 512,
) -> Iterator[Text]:
    """Answer requests together; texts as they end. Requests are taken one by one, when there is room, and their prompts are
    read in that order.

    Args:
        max_running: texts in memory at once. piece: as of ``Batch``.

    Raises:
        ValueError: a number below 1, or a request that cannot be answered, see ``Batch.add``.
    """
    if max_running < 1:
        raise ValueError(f"max_running={max_running} must be at least 1")
    batch, waiting = Batch(model, stop_ids(model, tokenizer), piece=piece), iter(requests)
    with attached(model):
        while True:
            for request in islice(waiting, max_running - len(batch.running)):
                batch.add(request)
            if not batch.running:
                return
            yield from (text for text in batch.step() if text.finish_reason is not None)
