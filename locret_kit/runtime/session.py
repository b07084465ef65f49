"""Prefill a prompt through a bounded cache and decode from it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.logits_process import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ..backbones.intercept import attached
from ..cache.bounded import BoundedCache
from ..planning.memory import explain_oom
from .decoders import Decoding, logits_after
from .report import Report


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen; ``temperature=0`` is greedy."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature={self.temperature} must be at least 0, and finite")
        if 0 < self.temperature < 1e-3:  # logits divided by it would overflow
            raise ValueError(f"temperature={self.temperature} must be 0 (greedy), or at least 0.001")
        if self.top_k < 0:
            raise ValueError(f"top_k={self.top_k} must be at least 0 (0 keeps every token)")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must be above 0 and at most 1")
        if not 0 < self.repetition_penalty < math.inf:
            raise ValueError(f"repetition_penalty={self.repetition_penalty} must be above 0, and finite")

    def processors(self) -> LogitsProcessorList:
        """transformers' own processors, in its own order."""
        chain = LogitsProcessorList()
        if self.repetition_penalty != 1.0:
            chain.append(RepetitionPenaltyLogitsProcessor(self.repetition_penalty))
        if self.temperature > 0:
            if self.temperature != 1.0:
                chain.append(TemperatureLogitsWarper(self.temperature))
            if self.top_k:
                chain.append(TopKLogitsWarper(self.top_k))
            if self.top_p < 1.0:
                chain.append(TopPLogitsWarper(self.top_p))
        return chain


class Chooser:
    """The next token of one text, by its own random numbers: ``choose(logits)``."""

    def __init__(self, sampling: Sampling, seed: int, device: torch.device, prompt: Sequence[int]) -> None:
        self._sampling, self._processors = sampling, sampling.processors()
        self._generator = torch.Generator(device=device).manual_seed(seed)
        self._seen = list(prompt) if sampling.repetition_penalty != 1.0 else []

    def __call__(self, logits_V: Tensor) -> int:
        scores_V = logits_V
        if self._processors:  # for a copy of what was said the host waits
            history: Any = torch.tensor([self._seen], device=logits_V.device, dtype=torch.long)
            scores_V = self._processors(history, logits_V[None])[0]
        if self._sampling.temperature > 0:
            token = int(torch.multinomial(scores_V.softmax(-1), 1, generator=self._generator))
        else:
            token = int(scores_V.argmax())
        self._seen.append(token)
        return token


@torch.inference_mode()
def prefill(
    model: PreTrainedModel, ids: Sequence[int], cache: BoundedCache, progress: Callable[[int, int], None] | None = None
) -> Tensor:
    """Read the prompt through ``cache``: logits ``[V]`` after its last token. What the cache has seen already (a fork) is taken
    as the prompt's beginning and not read again.

    Args:
        model: attached.
        ids: any integer sequence; fewer than the cache's ``prompt_length`` are the beginning of a prompt.
        progress: called as ``progress(done, total)`` after every piece.

    Raises:
        ValueError: no tokens, none that are new, or more than the prompt for which the cache was made.
    """
    total, done, logits = len(ids), cache.get_seq_length(), None
    expected = cache.schedule.prompt_length
    if expected is not None and done < expected < total:
        raise _other_length(cache, total)
    if not total:
        raise ValueError("the prompt holds no tokens")
    if done >= total:
        raise ValueError(f"the cache has seen {done} tokens already, the prompt has {total}")
    text = torch.as_tensor(ids, dtype=torch.long).to(model.device)  # once: for every copy the host waits
    while done < total:
        at = cache.prompt_positions(done, min(done + cache.schedule.piece(done), total))
        piece = text[at.start : at.stop] if isinstance(at, range) else text[torch.tensor(at, device=model.device)]
        logits = logits_after(model, [cache], piece[None], [len(piece)])
        cache.start_reread()
        done = cache.get_seq_length()
        if progress:
            progress(done, total)
    assert logits is not None
    if logits.is_cuda:  # so that the time of a prefill is a prefill's
        torch.cuda.synchronize(logits.device)
    return logits[0]


def _other_length(cache: BoundedCache, tokens: int) -> ValueError:
    return ValueError(
        f"prompt_length={cache.schedule.prompt_length} of the cache must be the {tokens} tokens of the prompt: "
        f"reset(prompt_length={tokens}) it, or make a new cache"
    )


@torch.inference_mode()
def decode(
    model: PreTrainedModel,
    cache: BoundedCache,
    logits: Tensor,
    *,
    prompt: Sequence[int],
    max_new_tokens: int,
    sampling: Sampling,
    stop: frozenset[int],
    seed: int = 0,
    graph: bool | None = False,
) -> Iterator[int]:
    """Token ids one by one, the first chosen from ``logits``; ends before an id of ``stop``.

    ``graph=True`` replays a CUDA graph for each token, None does so where it is possible; not the default before it has run on
    a GPU. With the backend ``cpu`` one compiled call makes a token, where it takes the cache (see ``cpu_decoder``).
    ``cache.counters.decoding`` says what was done.

    Raises:
        ValueError: ``graph=True`` where it is not possible; says why.
    """
    step = Decoding(model, cache, graph)
    choose = Chooser(sampling, seed, logits.device, prompt)
    for n in range(max_new_tokens):
        token = choose(logits)
        if token in stop:
            return
        yield token
        if n + 1 < max_new_tokens:
            logits = step(token)


def ready(model: PreTrainedModel, cache: BoundedCache) -> None:
    """Make what the first decoded token would wait for: on a CPU the compiled call and its weights."""
    Decoding(model, cache)


def stop_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Every end-of-sequence id that the generation configuration or the tokenizer names."""
    eos = getattr(model.generation_config, "eos_token_id", None)
    ids = set(eos if isinstance(eos, list) else [eos]) | {tokenizer.eos_token_id}
    return frozenset(i for i in ids if i is not None)


class Answer:
    """An answer that is written while it is read: ``for piece in answer`` gives final pieces of text, and ``str(answer)``
    all of it.

    The cache reads the prompt with the first piece. What it has seen of it before (a fork) is not read again.

    Args:
        cache: made for this prompt. The other arguments are as in ``generate``.

    Attributes:
        tokens: ids so far.
        finish_reason: "stop", "length" after ``max_new_tokens``, or None before the end.
        first_token_s: seconds from the start to the first token.

    Raises:
        OutOfMemory, ValueError: as ``generate``.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        ids: Sequence[int],
        cache: BoundedCache,
        *,
        max_new_tokens: int = 64,
        sampling: Sampling | None = None,
        seed: int = 0,
        graph: bool | None = False,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        if not cache.get_seq_length() and cache.schedule.prompt_length not in (None, len(ids)):
            raise _other_length(cache, len(ids))
        cache.bind(model)
        if graph:
            Decoding(model, cache, graph)  # raises before minutes of prefill
        self.cache, self.ids = cache, ids
        self.tokens: list[int] = []
        self.finish_reason: str | None = None
        self.first_token_s = 0.0
        self._text = ""
        self._report: Report | None = None
        self._pieces = self._write(model, tokenizer, max_new_tokens, sampling or Sampling(), seed, graph, progress)

    def __iter__(self) -> Iterator[str]:
        return self._pieces

    def __str__(self) -> str:
        for _ in self:
            pass
        return self._text

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

    def _write(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        most: int,
        sampling: Sampling,
        seed: int,
        graph: bool | None,
        progress: Callable[[int, int], None] | None,
    ) -> Generator[str, None, None]:
        ids, cache = self.ids, self.cache
        with attached(model), explain_oom(model, cache, len(ids)):
            began = time.perf_counter()
            logits = prefill(model, ids, cache, progress)
            prefilled = time.perf_counter()
            kept = cache.kept_rows
            stop = stop_ids(model, tokenizer)
            for token in decode(
                model,
                cache,
                logits,
                prompt=ids,
                max_new_tokens=most,
                sampling=sampling,
                stop=stop,
                seed=seed,
                graph=graph,
            ):
                if not self.tokens:
                    self.first_token_s = time.perf_counter() - began
                self.tokens.append(token)
                text = str(tokenizer.decode(self.tokens, skip_special_tokens=True))
                if not text.endswith("\ufffd"):  # a character whose last token is yet to come
                    piece, self._text = text[len(self._text) :], text
                    yield piece
            text = str(tokenizer.decode(self.tokens, skip_special_tokens=True))
            piece, self._text = text[len(self._text) :], text
        self.finish_reason = "stop" if len(self.tokens) < most else "length"
        self._report = Report.of(
            model, cache, prompt_tokens=len(ids), new_tokens=len(self.tokens), prefill_s=prefilled - began,
            decode_s=time.perf_counter() - prefilled, kept_rows=kept,
        )  # fmt: skip
        if piece:
            yield piece


def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    ids: Sequence[int],
    cache: BoundedCache,
    *,
    max_new_tokens: int = 64,
    sampling: Sampling | None = None,
    seed: int = 0,
    graph: bool | None = False,
    progress: Callable[[int, int], None] | None = None,
    on_text: Callable[[str], None] | None = None,
) -> tuple[str, Report]:
    """Prefill and decode; ``(text, report)``. Attaches the model unless it is attached
    already, as where threads share it.
    ``on_text`` gets each piece of text that is final, ``graph`` is as in ``decode``.

    Raises:
        OutOfMemory: says what was asked, what was free and which settings fit.
        ValueError: ``graph=True`` where it is not possible, and why; a prompt of another length than the cache's.
    """
    answer = Answer(
        model, tokenizer, ids, cache, max_new_tokens=max_new_tokens, sampling=sampling, seed=seed, graph=graph, progress=progress
    )  # fmt: skip
    for piece in answer:
        if on_text:
            on_text(piece)
    return str(answer), answer.report
