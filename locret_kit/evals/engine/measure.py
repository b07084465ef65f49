"""Measurement of one prompt: it is read through one variant's cache, and the result makes the fields of a row.

Distance from full attention needs no labels: likelihood and agreement under eviction are measured here. Distances of texts are in
`metrics.distance`; the runner makes full attention's output their reference (RoCo, section 5). Two greedy answers that differ in
one token may have nothing in common after it, so such distances need many examples; agreement asks for every token of the
reference after the reference's own tokens, and needs few.

What prompts have in common at their beginning, a document, is read once for all of them, one after the other. Its cache is forked
for every prompt (`BoundedCache.fork`). That equals a fresh run bit for bit where the beginning ends at a multiple of ``chunk``
before both prompts' held-back tails; no other is shared.
"""

from __future__ import annotations

import hashlib
import json
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from ...backbones.intercept import attach
from ...cache.bounded import BoundedCache, CannotFork
from ...cache.due import Schedule
from ...files import write_beside
from ...runtime.kept_text import kept_heads
from ...runtime.report import Report
from ...runtime.session import decode, generate, prefill, stop_ids
from ...text.template import protected_spans
from ...text.tokens import stream_ids
from ..metrics import get_metric
from ..tasks.task import Example
from . import BM25, RANDOM_HEADS, Key, Row, Run, Setup, Variant, bm25, is_oracle, oracle, reads_alone

# ---- likelihood and agreement under eviction --------------------------------------------------------------------------


def nll_of(logits_TV: Tensor, ids: Sequence[int]) -> Tensor:
    """Negative log-likelihood ``[T]`` (float32, nats) of each token under the logits before it."""
    target = torch.tensor(list(ids), device=logits_TV.device, dtype=torch.long)
    return F.cross_entropy(logits_TV.float(), target, reduction="none")


@dataclass(frozen=True)
class TeacherForced:
    """A continuation that a policy was given, and how likely it was to it."""

    nll: float
    """Mean negative log-likelihood of its tokens, nats."""
    agreement: float
    """Share of its tokens that greedy decoding would have chosen."""
    prefill_s: float
    decode_s: float


@torch.inference_mode()
def greedy_reference(
    model: PreTrainedModel, cache: BoundedCache, ids: Sequence[int], limit: int, stop: frozenset[int]
) -> list[int]:
    """At most ``limit`` tokens that greedy decoding writes after the prompt; the last may be one of ``stop``."""
    written = []
    with attach(model):
        logits = prefill(model, ids, cache)
        for token in decode(model, cache, logits, prompt=ids, max_new_tokens=limit):
            written.append(token)
            if token in stop:
                break
    return written


@torch.inference_mode()
def teacher_force(
    model: PreTrainedModel, cache: BoundedCache, ids: Sequence[int], continuation: Sequence[int]
) -> TeacherForced:
    """Read the prompt and `score_continuation`, timed.

    Raises:
        ValueError: an empty continuation.
    """
    if not continuation:
        raise ValueError("the continuation holds no tokens")
    with attach(model):
        began = time.perf_counter()
        logits = prefill(model, ids, cache)
        prefilled = time.perf_counter()
        nll, hits = score_continuation(model, cache, logits, continuation)
    n = len(continuation)
    return TeacherForced(nll / n, hits / n, prefilled - began, time.perf_counter() - prefilled)


@torch.inference_mode()
def score_continuation(
    model: PreTrainedModel, cache: BoundedCache, logits_V: Tensor, continuation: Sequence[int]
) -> tuple[float, int]:
    """``(summed NLL, tokens that greedy decoding would have chosen)``, fed one token at a time, so that the cache evicts as
    it does while it decodes. ``logits_V``: those of the first token; the model is attached."""
    total, hits, forced = 0.0, 0, iter(continuation)

    def choose(logits_V: Tensor) -> int:
        nonlocal total, hits
        token = next(forced)
        total += float(nll_of(logits_V[None], [token]))
        hits += int(logits_V.argmax()) == token
        return token

    n = len(continuation)
    for _ in decode(model, cache, logits_V, prompt=continuation, max_new_tokens=n, choose=choose):
        pass
    return total, hits


@torch.inference_mode()
def nll_reading(model: PreTrainedModel, cache: BoundedCache, ids: Sequence[int], skip: int) -> tuple[float, float]:
    """``(nll, seconds)``: mean NLL per token of the prompt's tokens from ``skip`` on, measured while the prompt is read
    chunk by chunk: a token sees its own chunk and what the cache has kept of the chunks before.

    Raises:
        ValueError: nothing lies after ``skip``.
    """
    if not 0 < skip < len(ids):
        raise ValueError(f"skip={skip} must be above 0 and below the prompt's {len(ids)} tokens")
    total = 0.0

    def judge(logits_TV: Tensor, end: int) -> None:
        nonlocal total
        start = end - len(logits_TV)
        first, last = max(skip - 1, start), min(end, len(ids) - 1)  # logits at i are for token i + 1
        if first < last:
            total += float(nll_of(logits_TV[first - start : last - start], ids[first + 1 : last + 1]).sum())

    with attach(model):
        began = time.perf_counter()
        prefill(model, ids, cache, on_prompt=judge)
    return total / (len(ids) - skip), time.perf_counter() - began


# ---- a document that prompts begin with -------------------------------------------------------------------------------


def shared_lengths(prompts: Sequence[array[int]], schedule: Schedule) -> list[int]:
    """First tokens of each prompt that are read for a neighbour too: whole chunks, the last of them before the eviction that
    precedes either tail. They only grow, so that no cache is needed that ends before the one that is held."""
    beside = [_common(a, b, schedule) for a, b in pairwise(prompts)]
    grown = [*accumulate(reversed(beside), min)][::-1]
    return [*grown, *grown[-1:]] if grown else [0] * len(prompts)


def _common(a: array[int], b: array[int], schedule: Schedule) -> int:
    end = 0 if schedule.one_shot else schedule.safe(min(len(a), len(b)) - 1)
    while a[:end] != b[:end]:
        end -= schedule.chunk
    return end


class SharedBeginning:
    """The cache of what prompts have in common, of one policy and budget.

    Args:
        fresh: makes an empty cache for a prompt of so many tokens.
        longest: tokens of the longest prompt; full attention's cache gets room for it, so that it need not grow.
    """

    def __init__(self, model: PreTrainedModel, fresh: Callable[[int], BoundedCache], longest: int) -> None:
        self._model, self._fresh, self._longest = model, fresh, longest
        self.drop()

    def drop(self) -> None:
        """Forget the cache; the next prompt that shares a beginning reads it again."""
        self._cache: BoundedCache | None = None
        self.seconds = 0.0
        """Seconds in which the cache has read what it holds."""

    def fork(self, ids: array[int], shared: int, pins: Sequence[tuple[int, int]] = ()) -> BoundedCache:
        """The cache that the next prompt goes on from: a copy behind its first ``shared`` tokens; or an empty one, where that
        is none or a copy would not equal a fresh run (budgets or frequencies that depend on the prompt's length).

        Args:
            shared: see `shared_lengths`.
            pins: the prompt's, see `BoundedCache.pin`; prompts that begin alike have the same ones there.
        """
        try:
            if shared:
                return _pinned(self._read(ids, shared, pins).fork(len(ids)), pins)
        except CannotFork:
            self.drop()
        return _pinned(self._fresh(len(ids)), pins)

    def _read(self, ids: array[int], shared: int, pins: Sequence[tuple[int, int]]) -> BoundedCache:
        """Read the first ``shared`` tokens, as far as they are not read yet."""
        if self._cache is None:
            self._cache = self._fresh(self._longest)
        if self._cache.get_seq_length() < shared:
            began = time.perf_counter()
            _pinned(self._cache, [(start, min(end, shared)) for start, end in pins if start < shared])
            with attach(self._model):
                prefill(self._model, ids[:shared], self._cache)
            self.seconds += time.perf_counter() - began
        return self._cache


def _pinned(cache: BoundedCache, pins: Sequence[tuple[int, int]]) -> BoundedCache:
    """The cache, with pins."""
    for pin in pins:
        cache.pin(*pin)
    return cache


Fields = dict[str, object]
"""Fields of a row, by name."""


class NotStored(OSError):
    """A file of ``kept/`` could not be written: the run ends, since a full disk is no example's fault."""


def cache_for(setup: Setup, variant: Variant, prompt_length: int | None) -> BoundedCache:
    """A fresh cache of a variant.

    Raises:
        ValueError: a setting that the budget cannot meet; names both.
    """
    if reads_alone(variant.policy):
        raise ValueError(f"policy={variant.policy} reads a prompt before it chooses: it answers tasks of a run alone")
    policy = "locret" if variant.policy == RANDOM_HEADS else variant.policy
    try:
        settings = setup.settings_for(variant, prompt_length)
        return BoundedCache(settings, policy, setup.heads.get(variant.heads), prompt_length=prompt_length)
    except ValueError as error:
        raise ValueError(f"policy={variant.policy}, budget={variant.budget}: {error}") from error


def measure_row(
    run: Run, variant: Variant, example: Example, shared: int, document: SharedBeginning, reference: Row | None
) -> Fields:
    """Fields of one example's row. ``shared``: see `shared_lengths`; ``reference``: the row of full attention."""
    setup = run.setup
    if variant.policy == BM25:
        budget = setup.settings_for(variant, len(example.ids)).budget
        short = replace(example, ids=array("i", bm25.shortened(setup.tokenizer, example, budget)))
        full = replace(variant, policy="full")
        alone = SharedBeginning(setup.model, lambda tokens: cache_for(setup, full, tokens), len(short.ids))
        return measure_row(run, full, short, 0, alone, reference) | {"tokens": len(short.ids), "slots": budget}
    if is_oracle(variant.policy):
        began, shared = time.perf_counter(), 0
        cache = oracle.cache_of(setup, variant, example.ids, chat=not example.special)
        seconds = time.perf_counter() - began
    else:
        protect = setup.settings_for(variant, len(example.ids)).protect
        pins = [] if example.special else protected_spans(setup.tokenizer, example.ids, protect)
        cache = document.fork(example.ids, shared, pins)
        shared = cache.get_seq_length()
        seconds = document.seconds if shared else 0.0
    kind = example.task.kind
    if kind.startswith("nll"):
        fields, report = _score_likelihood(setup, example, cache)
    elif kind == "agreement":
        fields, report = _score_agreement(setup, variant, example, cache, reference)
    else:
        fields, report = _score_generation(run, variant, example, cache, reference)
    names = ("new_tokens", "peak_bytes", "cache_bytes", "computed_share", "device", "dtype", "versions")
    return {
        **fields,
        **{name: getattr(report, name) for name in names},
        **{name: value for name, value in vars(report.settings.run).items() if name != "budget"},
        "slots": 0 if cache.policy.keeps_everything else report.settings.budget,
        "prefix_shared": shared,
        "prefill_s": round(seconds + report.prefill_s, 4),
        "decode_s": round(report.decode_s, 4),
    }


def _score_generation(
    run: Run, variant: Variant, example: Example, cache: BoundedCache, reference: Row | None
) -> tuple[Fields, Report]:
    setup, task = run.setup, example.task
    kept: Fields = {}

    def at_end_of_prompt(read: int, total: int) -> None:
        if read == total and example.sample < run.keep:
            kept["kept"] = store_kept(run.out, variant.key(example), cache, example.ids)

    text, report = generate(
        setup.model, setup.tokenizer, example.ids, cache, max_new_tokens=setup.max_new_tokens or task.max_new_tokens,
        seed=setup.seed, progress=at_end_of_prompt,
    )  # fmt: skip
    answer = example.answer
    if task.kind == "fidelity":
        answer = text if reference is None else reference.output
    scores = get_metric(task.metric)(text, answer, example.extra)
    metric = next(iter(scores))
    if "source" in example.extra:
        distances = get_metric("rouge")(text, example.extra["source"], {})
        scores |= {f"source_{name}": value for name, value in distances.items()}
    return {
        "score": scores[metric],
        "metric": metric,
        "scores": scores,
        "output": text,
        "answer": answer,
        **kept,
    }, report


def _score_agreement(
    setup: Setup, variant: Variant, example: Example, cache: BoundedCache, reference: Row | None
) -> tuple[Fields, Report]:
    """Feed what full attention chooses, token by token, and count what the policy would have chosen too. Without a reference
    this is full attention, which chooses first and is then given its own."""
    fields: Fields = {}
    if reference is None:
        limit = setup.max_new_tokens or example.task.max_new_tokens
        stop = stop_ids(setup.model, setup.tokenizer)
        fresh = cache_for(setup, variant, len(example.ids))
        continuation = greedy_reference(setup.model, fresh, example.ids, limit, stop)
        fields["output"] = setup.tokenizer.decode(continuation, skip_special_tokens=True)
    else:
        continuation = reference.answer
    forced = teacher_force(setup.model, cache, example.ids, continuation)
    scores = {"agreement": forced.agreement, "nll": forced.nll}
    fields |= {"score": forced.agreement, "metric": "agreement", "scores": scores, "answer": continuation}
    return fields, _report(setup, example, cache, len(continuation), forced.prefill_s, forced.decode_s)


def _score_likelihood(setup: Setup, example: Example, cache: BoundedCache) -> tuple[Fields, Report]:
    """The likelihood of the continuation, or of the prompt's second half."""
    kind, ids = example.task.kind, example.ids
    if kind == "nll":
        continuation = stream_ids(setup.tokenizer, [example.continuation])
        forced = teacher_force(setup.model, cache, ids, continuation)
        nll, tokens, prefill_s, decode_s = forced.nll, len(continuation), forced.prefill_s, forced.decode_s
    else:
        tokens, decode_s = len(ids) - len(ids) // 2, 0.0
        nll, prefill_s = nll_reading(setup.model, cache, ids, len(ids) // 2)
    fields: Fields = {"score": nll, "metric": kind, "scores": {kind: nll}}
    return fields, _report(setup, example, cache, tokens, prefill_s, decode_s)


def _report(
    setup: Setup, example: Example, cache: BoundedCache, tokens: int, prefill_s: float, decode_s: float
) -> Report:
    """The report where nothing was written: ``tokens`` were read after the prompt, or are a part of it."""
    return Report.of(
        setup.model, cache, prompt_tokens=len(example.ids), new_tokens=tokens, prefill_s=prefill_s, decode_s=decode_s,
        kept_rows=cache.kept_rows,
    )  # fmt: skip


def store_kept(out: Path, key: Key, cache: BoundedCache, ids: array[int]) -> str:
    """Write what the cache holds now; the file's stem. ``ids``: the prompt's token ids ``[T]`` (int32); ``heads``, for each
    layer and token the key/value heads that hold it ``[L, T]`` (uint8, 0 to H); and ``n_heads``, H of the layers (int).

    Raises:
        NotStored: names the file and the reason.
    """
    heads, n_heads = kept_heads(cache, len(ids))
    stem = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]

    def write(path: Path) -> None:
        with path.open("wb") as file:
            np.savez_compressed(file, ids=np.asarray(ids, dtype=np.int32), heads=heads, n_heads=n_heads)

    try:
        write_beside(out / "kept" / f"{stem}.npz", write)
    except OSError as error:
        raise NotStored(f"{error}; finished examples are safe, run again to go on") from error
    return stem
