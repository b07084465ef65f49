"""Many texts at once, of any lengths: prompts are read by chunks while other texts are decoded, in forwards that all share.

A text's cache, evictions and random numbers are its own, so its tokens are those of its run alone: exactly in float64, to
the rounding of the shared matrix products below.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..backbones.intercept import attached
from ..backbones.releases import forward
from ..cache.bounded import BoundedCache
from ..cache.lanes import Packed
from .cpu_decoder import CpuDecoder, cpu_decoder
from .session import Chooser, Sampling, stop_ids
from .turns import Turns

TURNS = 4
"""Every so many forwards, the prompt that has waited longest comes first; in the others, the one with the shortest rest."""


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
    aside: bool = field(default=False, kw_only=True)
    """Read between the prompts of others, see ``turns``."""
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
    _passed: int = 0
    """Forwards since its prompt last had a piece in one."""

    @property
    def waits(self) -> bool:
        """Whether it has no cache yet."""
        return self.cache is None and self.finish_reason is None

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

    @property
    def aside(self) -> bool:
        """As the request has it."""
        return self.request.aside

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
        most: texts in memory at once; the others wait in the order in which they were added.
        piece: tokens of prompts in one forward, at most; a chunk of one prompt may be more.
        turns: the order of prompts; by default those with the shortest rest first, and at times the one that waited longest.

    Raises:
        ValueError: a number below 1.
    """

    def __init__(
        self, model: PreTrainedModel, stop: frozenset[int], *, most: int = 16, piece: int = 512, turns: Turns[Text] | None = None
    ) -> None:  # fmt: skip
        for name, value in (("most", most), ("piece", piece)):
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        self.model, self.stop, self.most, self.piece, self.turns = model, stop, most, piece, turns
        self.waiting: deque[Text] = deque()
        self.running: list[Text] = []
        self._forwards = 0
        self._native = cpu_decoder(model)

    def add(self, request: Request) -> Text:
        """A text that is answered from one of the next steps on.

        Raises:
            ValueError: no tokens, or none asked for.
        """
        if not len(request.ids):
            raise ValueError("the prompt holds no tokens")
        if request.max_new_tokens < 0:
            raise ValueError(f"max_new_tokens={request.max_new_tokens} must be at least 0")
        text = Text(request, began=time.perf_counter())
        self.waiting.append(text)
        return text

    def cancel(self, text: Text, reason: str = "cancelled") -> None:
        """Let a text leave, whatever it is doing; one that has ended stays as it is."""
        if text.finish_reason is None:
            text.end(reason)
            self.running = [one for one in self.running if one is not text]
            self.waiting = deque(one for one in self.waiting if one is not text)

    def fail(self, error: Exception, texts: Sequence[Text] | None = None) -> None:
        """End texts with an error; by default all that run."""
        for text in list(self.running) if texts is None else texts:
            text.end("error", error)
        self.running = [text for text in self.running if text.finish_reason is None]

    @property
    def busy(self) -> bool:
        """Whether a text waits or runs."""
        return bool(self.running or self.waiting)

    @torch.inference_mode()
    def step(self) -> list[Text]:
        """One forward: the next token of every text that is decoded, and pieces of the prompts of others, the shortest rest
        first and at times the one that waited longest (``TURNS``). Gives the texts that have a new token or have ended.

        An error of one text's settings ends that text alone; an error of the forward ends those that took part.
        """
        changed = self._admit()
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
        assert isinstance(self._native, CpuDecoder)
        return self._native(caches, [token for (token,) in pieces])

    def _admit(self) -> list[Text]:
        """Make caches for those that wait, while there is room; the texts for which that failed."""
        failed = []
        while self.waiting and len(self.running) < self.most:
            text = self.waiting.popleft()
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
                continue
            self.running.append(text)
        return failed

    def _pieces(self) -> list[Piece]:
        """Texts of the next step, each with its new tokens."""
        pieces: list[Piece] = []
        for text in self.running:
            if text._next is not None:
                pieces.append((text, [text._next]))
        reading = [text for text in self.running if text.reading and text.cache is not None]
        for text in self._order(reading) if self.turns is None else self.turns.pick(reading):
            cache, ids = text.cache, text.request.ids
            assert cache is not None
            done = cache.get_seq_length()
            pieces.append((text, [ids[at] for at in cache.prompt_positions(done, done + text.step)]))
        return pieces

    def _order(self, reading: list[Text]) -> Iterator[Text]:
        """The prompts that have a piece in the next forward."""
        reading.sort(key=lambda text: text.left)
        self._forwards += 1
        # So that short prompts, however many, do not keep a long one waiting.
        if reading and self._forwards % TURNS == 0:
            longest = max(reading, key=lambda text: text._passed)
            reading.sort(key=lambda text: text is not longest)
        for text in reading:
            text._passed += 1
        room = self.piece
        for text in reading:
            if text.step > room and room < self.piece:
                break
            text._passed = 0
            room -= text.step
            yield text

    def _forward(self, caches: list[BoundedCache], pieces: list[list[int]]) -> Tensor:
        """Logits ``[texts, V]`` after each text's last new token."""
        packed = Packed(caches, [len(piece) for piece in pieces])
        ids = torch.tensor([[token for piece in pieces for token in piece]], device=self.model.device)
        last = torch.tensor(packed.last, device=self.model.device)
        return forward(self.model, ids, packed, logits_to_keep=last).logits[0]

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
    most: int = 16,
    piece: int = 512,
) -> Iterator[Text]:
    """Answer requests together; texts as they end. Requests are taken one by one, when there is room.

    Args:
        most, piece: as of ``Batch``.
    """
    batch, source = Batch(model, stop_ids(model, tokenizer), most=most, piece=piece), iter(requests)
    more = True
    with attached(model):
        while more or batch.busy:
            while more and len(batch.running) + len(batch.waiting) < most:
                request = next(source, None)
                if request is None:
                    more = False
                else:
                    batch.add(request)
            if batch.busy:
                yield from (text for text in batch.step() if text.finish_reason is not None)
