"""Prefill a prompt through a bounded cache, and answer it."""

import re
import time
import warnings
from collections import abc
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..answers.reader import Event
from ..backbones.intercept import attached
from ..backbones.wrapped import unwrapped
from ..cache.bounded import BoundedCache
from ..heads import RetainingHeads
from ..planning import duration
from ..policies import Policy
from ..policies.base import PolicyWarning
from ..settings import Resolved
from ..text.tokens import TextStream
from .drivers import driver_of
from .engine import Engine
from .evidence import EvidenceSearch, Passage
from .report import Report
from .sampling import Sampling, stop_ids
from .sequence import Request, Sequence
from .thoughts import Thought


@torch.inference_mode()
def prefill(
    model: PreTrainedModel,
    ids: abc.Sequence[int],
    cache: BoundedCache,
    progress: Callable[[int, int], None] | None = None,
    graph: bool | None = None,
) -> Tensor:
    """Read the prompt through ``cache``: logits ``[V]`` after its last token. Tokens that the cache has seen already
    (a fork) are the prompt's beginning. They are not read again.

    Args:
        ids: any integer sequence; fewer than the cache's ``prompt_length`` are the beginning of a prompt.
        progress: called as ``progress(done, total)`` after every piece.
        graph: False never replays a CUDA graph for chunks of a long prompt; None does where it is possible.

    Raises:
        ValueError: no tokens, none that are new, or a longer prompt than the cache was made for.
    """
    model = unwrapped(model)
    total, expected = len(ids), cache.schedule.prompt_length
    if expected is not None and cache.get_seq_length() < expected < total:
        raise _other_length(cache, total)
    cache.bind(model)
    engine = Engine(model, frozenset(), alone=True, graph=graph)
    sequence = engine.add(Request(ids, 0), lambda: cache)
    with attached(model):
        engine.read(sequence, cache, progress)
    assert sequence.logits_V is not None
    if sequence.logits_V.is_cuda:  # so that the time of a prefill is a prefill's
        torch.cuda.synchronize(sequence.logits_V.device)
    return sequence.logits_V


LONG = 8192
"""Tokens of a text whose reading is worth a measurement."""
MEASURED, WARM = 512, 16
"""Tokens of a measurement, at most, and those of them that prepare memory and kernels."""


def reading_time(
    model: PreTrainedModel, ids: abc.Sequence[int], settings: Resolved, policy: Policy, heads: RetainingHeads | None
) -> str | None:
    """Words for the time that the reading of a long text will take, from a piece that is read beside as many rows as there are
    on average, with what an eviction takes.

    Args:
        model: the backbone, not attached. settings: resolved for the text.
    """
    if len(ids) < max(LONG, 2 * settings.chunk) or settings.chunk <= WARM or settings.one_shot:
        return None
    most = min(settings.budget, len(ids))
    budget = most - most**2 // (2 * len(ids))  # rows grow up to it, then stay
    stabilizers, local_len = min(settings.stabilizers, budget - 1), min(settings.local_len, budget - 1)
    run = replace(settings.run, budget=budget, stabilizers=stabilizers, local_len=local_len, protect=None)
    with warnings.catch_warnings(action="ignore", category=PolicyWarning):  # nobody has chosen that budget
        seconds = seconds_per_token(model, ids, BoundedCache(run, policy, heads, prompt_length=len(ids)))
    return f"{len(ids):,} tokens take about {duration(len(ids) * seconds)}, {1 / seconds:.0f} tok/s beside a full cache"


def seconds_per_token(model: PreTrainedModel, ids: abc.Sequence[int], cache: BoundedCache) -> float:
    """Seconds for a token of a piece that ends with an eviction, read into an empty cache that is filled up before."""
    cache.bind(model)
    ctx, chunk = cache.context, cache.schedule.chunk
    end = len(ids) // 2 // chunk * chunk
    piece = min(chunk, MEASURED)
    layers = zip(ctx.spec.layers, cache.bounded, ctx.description.devices(model), ctx.budgets, strict=True)
    with torch.inference_mode():
        for layer, rows, device, budget in layers:
            rows.update(*layer.empty(model.dtype, device))
            left = end if rows.grows else min(budget or rows.capacity, rows.capacity - piece)
            while left > 0:
                step = min(left, chunk)
                k, v = (x.new_zeros(*x.shape[:2], step, x.shape[3]) for x in layer.empty(model.dtype, device))
                score_T = torch.linspace(0, 1, step, dtype=torch.float32, device=device)
                rows.append(k, v, score_T.expand(k.shape[:3]))
                rows.codec.finish_block()
                left -= step
            rows.seen = end - piece
    prefill(model, ids[: end - piece + WARM], cache, graph=False)
    began = time.perf_counter()
    prefill(model, ids[:end], cache, graph=False)
    return (time.perf_counter() - began) / (piece - WARM)


def _other_length(cache: BoundedCache, tokens: int) -> ValueError:
    return ValueError(
        f"prompt_length={cache.schedule.prompt_length} of the cache must be the {tokens} tokens of the prompt: "
        f"reset(prompt_length={tokens}) it, or make a new cache"
    )


def iter_tokens(engine: Engine, sequence: Sequence) -> Iterator[int]:
    """Tokens of the one sequence of an engine, as they are chosen."""
    yield from sequence.tokens
    while engine.running:
        count = len(sequence.tokens)
        engine.step()
        yield from sequence.tokens[count:]


class ThoughtPiece(str):
    """A piece of an answer's thought."""


class Answer:
    """An answer that is written while it is read: ``for piece in answer`` gives final pieces of text, and ``str(answer)``
    all of it. Its thought, where one is watched, comes in pieces that are a ``ThoughtPiece``, and is no part of ``str(answer)``.

    The cache reads the prompt with the first piece. Tokens that it has seen before (a fork) are not read again.

    Args:
        cache: made for this prompt.
        stop: ids that end it; by default those that the model and the tokenizer name.
        graph: whether a CUDA graph is used; None uses one where it is possible.
        choose, on_prompt, thought: see ``Request``.
        search: of the passages that it is read from, for ``evidence``.

    Attributes:
        tokens: ids so far. stopped_by: the id of ``stop`` that ended it, if one did. max_new_tokens: as given.
        finish_reason: "stop", "length" after ``max_new_tokens``, or None before the end.
        first_token_s: seconds from the start to the first token. text, thought_text: the answer and its thought so far.

    Raises:
        OutOfMemory: names the memory that was asked for, the budget and the chunk.
        ValueError: ``graph=True`` where it is not possible, and why; a prompt of another length than the cache's.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        ids: abc.Sequence[int],
        cache: BoundedCache,
        *,
        max_new_tokens: int = 64,
        sampling: Sampling | None = None,
        seed: int = 0,
        stop: frozenset[int] | None = None,
        graph: bool | None = None,
        progress: Callable[[int, int], None] | None = None,
        choose: Callable[[Tensor], int] | None = None,
        on_prompt: Callable[[Tensor, int], None] | None = None,
        thought: Thought | None = None,
        search: EvidenceSearch | None = None,
    ) -> None:
        """Check the settings and bind the cache; nothing is read yet. ``choose`` takes logits ``[V]``, ``on_prompt``
        logits ``[T, V]``."""
        model = unwrapped(model)
        expected = cache.schedule.prompt_length
        if expected is not None and cache.get_seq_length() < expected != len(ids):
            raise _other_length(cache, len(ids))
        with explain_oom(cache):
            cache.bind(model)
        if graph:
            driver_of(model, cache, graph)  # raises before minutes of prefill
        self.cache, self.ids, self.thought, self.max_new_tokens = cache, ids, thought, max_new_tokens
        self._search = search
        self.tokens: list[int] = []
        self.stopped_by: list[int] = []
        self.finish_reason: str | None = None
        self.first_token_s = 0.0
        self.text = self.thought_text = ""
        self._report: Report | None = None
        stop = stop_ids(model, tokenizer) if stop is None else stop
        engine = Engine(model, stop, alone=True, graph=graph)
        request = Request(
            ids, max_new_tokens, sampling or Sampling(), seed, choose=choose, on_prompt=on_prompt, thought=thought
        )
        self._pieces = self._write(engine, request, TextStream(tokenizer), progress)

    def __iter__(self) -> Iterator[str]:
        return self._pieces

    def __str__(self) -> str:
        for _ in self:
            pass
        return self.text

    def leave(self) -> None:
        """Write no more: the cache stays as it is."""
        self._pieces.close()

    @property
    def report(self) -> Report:
        """Cost of the answer; reads it to its end. Raises RuntimeError where it was left before."""
        str(self)
        if self._report is None:
            raise RuntimeError("this answer was left before its end, so there is no report of it")
        return self._report

    @property
    def notices(self) -> Iterator[str]:
        """Lines about a thought or a text that was cut at its bound, with the option that raises it, and about missing evidence,
        once it has ended."""
        if self._search is not None and self.finish_reason is not None and not self.evidence:
            sparse = "no attention to the text was summed up, as where prefill is sparse"
            yield f"no evidence: {sparse if self._search.text[1] else 'the document was written without its text'}"
        if self.thought is not None and self.thought.cut:
            yield (
                f"the thought was closed after max_thought_tokens={self.thought.max_tokens}: --max-thought-tokens N gives it "
                "more, --no-think leaves it out where the model can"
            )
        if self.finish_reason == "length":
            yield f"the answer was cut after max_new_tokens={self.max_new_tokens}: --max-new-tokens N gives it more"

    @property
    def evidence(self) -> list[Passage]:
        """Up to three passages of the text that the answer's tokens attended to most, the highest share first; reads the
        answer to its end. Empty without ``search``, and where the cache does not sum attention up (``BoundedCache.fork``)."""
        str(self)
        return [] if self._search is None else self._search.passages

    def _write(
        self, engine: Engine, request: Request, text: TextStream, progress: Callable[[int, int], None] | None
    ) -> Generator[str, None, None]:
        ids, cache, model = self.ids, self.cache, engine.model
        with attached(model), explain_oom(cache):
            began, before, earlier = time.perf_counter(), cache.get_seq_length(), replace(cache.counters)
            sequence = engine.add(request, lambda: cache)
            engine.read(sequence, cache, progress)
            prefilled, kept = time.perf_counter(), cache.kept_rows
            if self._search is not None:
                self._search.begin(cache)
            self.first_token_s = sequence.first_token_s or 0.0
            for token in iter_tokens(engine, sequence):
                self.tokens.append(token)
                yield from self._split(text.add(token))
            if self.thought is not None:
                self.thought.end()
            last = [*self._split(text.end())]
        if self._search is not None:
            self._search.end(cache)
        self.finish_reason = "stop" if sequence.finish_reason == "stop" else "length"
        self.stopped_by = sequence.stopped_by
        self._report = Report.of(
            model, cache, prompt_tokens=len(ids), new_tokens=len(self.tokens), prefill_s=prefilled - began,
            decode_s=time.perf_counter() - prefilled, kept_rows=kept, read_before=before, earlier=earlier,
        )  # fmt: skip
        yield from last

    def _split(self, piece: str) -> Iterator[str]:
        """The new part of the answer: a piece of its text, or of thought and text where a thought is watched."""
        events = [Event("text", piece)] if piece else []
        if self.thought is not None:
            events, self.thought.events = self.thought.events, []
        for event in events:
            if event.kind == "thought":
                self.thought_text += event.text
                yield ThoughtPiece(event.text)
            else:
                self.text += event.text
                yield event.text


class OutOfMemory(RuntimeError, MemoryError):
    """The device ran out of memory. The message has the bytes that were asked for, the budget and the chunk."""


@dataclass(frozen=True)
class explain_oom:
    """A block that turns an out-of-memory error of a run into an ``OutOfMemory``. It is a class, because a generator's context
    that raises leaves a cycle from Python 3.12 on. That cycle would keep the run's memory alive."""

    cache: BoundedCache

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        asked = re.search(r"ried to allocate ([\d.]+ ?(?:bytes|[KMGT]iB))", str(error))  # a card's words, or a CPU's
        if not isinstance(error, RuntimeError) or not (asked or isinstance(error, torch.OutOfMemoryError)):
            return
        needed, schedule = f"{asked[1]} were asked for, " if asked else "", self.cache.schedule
        raise OutOfMemory(
            f"out of memory: {needed}with budget={schedule.budget} and chunk={schedule.chunk}; "
            "locret-plan prints the largest that fit"
        ) from error
