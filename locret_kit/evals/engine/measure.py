"""Measurement of one prompt: it is read through one variant's cache, and the result makes the fields of a row.

Distance from full attention needs no labels: likelihood and agreement under eviction are measured here. Distances of texts are in
`metrics.distance`; the runner makes full attention's output their reference (RoCo, section 5). Two greedy answers that differ in
one token may have nothing in common after it, so such distances need many examples. Agreement asks for every token of the
reference after the reference's own tokens, and needs few.

A document that prompts begin with is read once for all of them, one after the other. Its cache is forked for every prompt
(`BoundedCache.fork`). That equals a fresh run bit for bit where the beginning ends at a multiple of ``chunk`` before both
prompts' held-back tails; no other is shared.
"""

from __future__ import annotations

import hashlib
import json
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from ...documents.kept import Kept
from ...documents.prefix_cache import PrefixCache
from ...engine import Answer, BoundedCache, KVzip, Thought, prefill
from ...files import write_beside
from ...naming import first_line, prefixed_errors
from ...text.template import protected_spans
from ...text.tokens import hash_ids, stream_ids
from ...validation import build
from ..metrics import get_metric
from ..tasks.task import Example
from . import BM25, KEY, ORACLES, RANDOM_HEADS, Key, Row, Run, Setup, Variant, bm25, is_oracle, reads_alone


def nll_of(logits_TV: Tensor, ids: Sequence[int]) -> Tensor:
    """Negative log-likelihood ``[T]`` (float32, nats) of each token under the logits before it."""
    target = torch.tensor(list(ids), device=logits_TV.device, dtype=torch.long)
    return F.cross_entropy(logits_TV.float(), target, reduction="none")


class Forced:
    """A continuation that a policy is given, token by token, so that the cache evicts as it does while it decodes.

    Attributes:
        nll: summed negative log-likelihood of the tokens so far, nats. hits: those that greedy decoding would have chosen.
        first_V: the logits of the first token.
    """

    def __init__(self, continuation: Sequence[int]) -> None:
        self._left, self.tokens = iter(continuation), len(continuation)
        self.nll, self.hits = 0.0, 0
        self.first_V: Tensor | None = None

    def __call__(self, logits_V: Tensor) -> int:
        """The next token, counted under its logits."""
        token = next(self._left)
        self.first_V = logits_V if self.first_V is None else self.first_V
        self.nll += float(nll_of(logits_V[None], [token]))
        self.hits += int(logits_V.argmax()) == token
        return token

    def scores(self) -> dict[str, float]:
        """Share of the tokens that greedy decoding would have chosen, and mean NLL."""
        return {"agreement": self.hits / self.tokens, "nll": self.nll / self.tokens}

    def answer(self, setup: Setup, ids: Sequence[int], cache: BoundedCache) -> Answer:
        """Read the prompt and the continuation."""
        answer = Answer(
            setup.model, setup.tokenizer, ids, cache, max_new_tokens=self.tokens, stop=frozenset(), choose=self
        )  # fmt: skip
        str(answer)
        return answer


def nll_reading(setup: Setup, cache: BoundedCache, ids: Sequence[int], skip: int) -> tuple[float, Answer]:
    """Mean NLL per prompt token (nats) from token ``skip`` on, and the reading itself. Each token sees its own chunk
    and the kept slots of earlier chunks.
    """
    total = 0.0

    def judge(logits_TV: Tensor, end: int) -> None:
        nonlocal total
        start = end - len(logits_TV)
        first, last = max(skip - 1, start), min(end, len(ids) - 1)  # logits at i are for token i + 1
        if first < last:
            total += float(nll_of(logits_TV[first - start : last - start], ids[first + 1 : last + 1]).sum())

    reading = Answer(setup.model, setup.tokenizer, ids, cache, max_new_tokens=0, on_prompt=judge)
    str(reading)
    return total / (len(ids) - skip), reading


def shared_lengths(prompts: Sequence[array[int]], cache: BoundedCache) -> list[int]:
    """First tokens of each prompt that are read for a neighbour too, in such a cache: whole chunks, the last of them before the
    eviction that precedes either tail. They only grow, so that no cache is needed that ends before the one that is held."""
    beside = [_common(a, b, cache) for a, b in pairwise(prompts)]
    grown = [*accumulate(reversed(beside), min)][::-1]
    return [*grown, *grown[-1:]] if grown else [0] * len(prompts)


def _common(a: array[int], b: array[int], cache: BoundedCache) -> int:
    schedule = cache.schedule
    end = 0 if schedule.one_shot else schedule.safe(min(len(a), len(b)) - 1)
    while a[:end] != b[:end]:
        end -= schedule.chunk
    return end


class SharedBeginning:
    """The cache of the prefix that prompts share, for one policy and budget.

    Args:
        make_cache: makes an empty cache for a prompt of n tokens.
        longest: tokens of the longest prompt. Full attention's cache is allocated for it, so it never grows.
    """

    def __init__(self, model: PreTrainedModel, make_cache: Callable[[int], BoundedCache], longest: int) -> None:
        self._model, self._make_cache, self._longest = model, make_cache, longest
        self.drop()

    def drop(self) -> None:
        """Forget the cache; the next prompt that shares a prefix reads it again."""
        self._prefix = PrefixCache(self._make_cache)
        self.seconds = 0.0
        """Seconds spent reading the tokens in the cache."""

    def fork(self, ids: array[int], shared: int, pins: Sequence[tuple[int, int]] = ()) -> BoundedCache:
        """A cache for the next prompt: a copy after its first ``shared`` tokens. The cache is empty if nothing is
        shared, or if a copy would differ from a fresh run (budgets or frequencies that depend on the prompt's length).

        Args:
            shared: see `shared_lengths`.
            pins: the prompt's, see `BoundedCache.pin`. Prompts that share a prefix have the same pins in it.
        """
        if shared and self._prefix.tokens < shared:
            began = time.perf_counter()
            read = self._make_cache(self._longest) if self._prefix.cache is None else self._prefix.cache
            self._prefix.cache = read
            read.pin_all((start, min(end, shared)) for start, end in pins if start < shared)
            prefill(self._model, ids[:shared], read)
            self.seconds += time.perf_counter() - began
        cache = self._prefix.fork(len(ids)) if shared else self._make_cache(len(ids))
        cache.pin_all(pins)
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
        raise ValueError(f"policy={variant.policy} reads the whole prompt first: it runs in locret-eval only")
    policy = "locret" if variant.policy == RANDOM_HEADS else variant.policy
    with prefixed_errors(f"policy={variant.policy}, budget={variant.budget}", ValueError):
        settings = setup.settings_for(variant, prompt_length)
        return BoundedCache(settings, policy, setup.heads.get(variant.heads), prompt_length=prompt_length)


def measure_row(
    run: Run, variant: Variant, example: Example, shared: int, document: SharedBeginning, reference: Row | None
) -> Row:
    """The row of one example; an exception becomes its error. After running out of memory, a prompt is tried once more
    without sharing.

    Args:
        shared: see `shared_lengths`.
        reference: the row of full attention, for tasks that are compared with it.
    """
    device = run.setup.model.device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    try:
        if reference is not None and reference.error is not None:
            raise ValueError(f"full attention, the reference, failed: {reference.error}")
        return _row(run, variant, example, _measure(run, variant, example, shared, document, reference))
    except NotStored:
        raise
    except Exception as error:
        document.drop()
        failed = error_row(run, variant, example, error)
        no_memory = isinstance(error, (torch.OutOfMemoryError, MemoryError))
    if no_memory:  # out here, where the error no longer holds what the example had allocated
        torch.cuda.empty_cache()
        if shared:
            return measure_row(run, variant, example, 0, document, reference)
    return failed


def error_row(run: Run, variant: Variant, example: Example, error: Exception) -> Row:
    """The row of an example that ended with an error."""
    return _row(run, variant, example, {"error": f"{type(error).__name__}: {first_line(error)}"})


def _row(run: Run, variant: Variant, example: Example, fields: Fields) -> Row:
    setup = run.setup
    record: Fields = dict(zip(KEY, variant.key(example), strict=True))
    record |= {
        "seed": setup.seed, "model": setup.name, "adapter": setup.adapter, "rank": run.rank,
        "heads_hash": setup.hashes.get(variant.heads, ""), "text_hash": example.task.text_hash,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }  # fmt: skip
    if example.error is None:
        record |= {
            "depth": example.depth, "cut": example.cut, "tokens": len(example.ids), "answer": example.answer,
            "prompt_hash": hash_ids(example.ids)[:16], "ending": example.extra.get("ending", ""),
        }  # fmt: skip
    return build(Row, record | fields).writable()


def _measure(
    run: Run, variant: Variant, example: Example, shared: int, document: SharedBeginning, reference: Row | None
) -> Fields:
    setup = run.setup
    if variant.policy == BM25:
        budget = setup.settings_for(variant, len(example.ids)).budget
        short = replace(example, ids=array("i", bm25.shortened(setup.tokenizer, example, budget)))
        full = replace(variant, policy="full")
        alone = SharedBeginning(setup.model, lambda tokens: cache_for(setup, full, tokens), len(short.ids))
        return _measure(run, full, short, 0, alone, reference) | {"tokens": len(short.ids), "slots": budget}
    if is_oracle(variant.policy):
        began, shared = time.perf_counter(), 0
        oracle = KVzip(setup.settings_for(variant, len(example.ids)), ORACLES[variant.policy])
        cache = oracle.read(setup.model, setup.tokenizer, example.ids, chat=not example.special)
        seconds = time.perf_counter() - began
    else:
        protect = setup.settings_for(variant, len(example.ids)).protect
        pins = [] if example.special else protected_spans(setup.tokenizer, example.ids, protect)
        cache = document.fork(example.ids, shared, pins)
        shared = cache.get_seq_length()
        seconds = document.seconds if shared else 0.0
    kind = example.task.kind
    if kind.startswith("nll"):
        fields, answer = _score_likelihood(setup, example, cache)
    elif kind == "agreement":
        fields, answer = _score_agreement(setup, variant, example, cache, reference)
    else:
        fields, answer = _score_generation(run, variant, example, cache, reference)
    report = answer.report
    names = ("new_tokens", "peak_bytes", "cache_bytes", "computed_share", "device", "dtype", "versions")
    return {
        **{name: getattr(report, name) for name in names},
        **fields,
        **{name: value for name, value in asdict(report.settings.run).items() if name != "budget"},
        "slots": 0 if cache.policy.keeps_everything else report.settings.budget,
        "prefix_shared": shared,
        "prefill_s": round(seconds + report.prefill_s, 4),
        "decode_s": round(report.decode_s, 4),
    }


def _score_generation(
    run: Run, variant: Variant, example: Example, cache: BoundedCache, reference: Row | None
) -> tuple[Fields, Answer]:
    setup, task = run.setup, example.task
    kept: Fields = {}
    thought = Thought.after(setup.tokenizer, example.ids, max_tokens=setup.max_thought_tokens)

    def at_end_of_prompt(read: int, total: int) -> None:
        if read == total and example.sample < run.keep:
            kept["kept"] = store_kept(run.out, variant.key(example), cache, example.ids)

    written = Answer(
        setup.model, setup.tokenizer, example.ids, cache, max_new_tokens=setup.max_new_tokens or task.max_new_tokens,
        seed=setup.seed, progress=at_end_of_prompt, thought=thought,
    )  # fmt: skip
    text, answer = str(written), example.answer
    if task.kind == "fidelity":
        answer = text if reference is None else reference.output
    scores = get_metric(task.metric)(text, answer, example.extra)
    metric = next(iter(scores))
    if "source" in example.extra:
        distances = get_metric("rouge")(text, example.extra["source"], {})
        scores |= {f"source_{name}": value for name, value in distances.items()}
    fields = {"score": scores[metric], "metric": metric, "scores": scores, "output": text, "answer": answer, **kept}
    fields |= {"thought": written.thought_text} if written.thought_text else {}
    return fields, written


def _score_agreement(
    setup: Setup, variant: Variant, example: Example, cache: BoundedCache, reference: Row | None
) -> tuple[Fields, Answer]:
    """Agreement: feed full attention's tokens one by one, and count the policy's own choices that are equal. Without a
    reference this is full attention, which first generates the tokens and is then scored on them."""
    fields: Fields = {}
    if reference is None:
        fresh, limit = cache_for(setup, variant, len(example.ids)), setup.max_new_tokens or example.task.max_new_tokens
        greedy = Answer(setup.model, setup.tokenizer, example.ids, fresh, max_new_tokens=limit)
        str(greedy)
        continuation = [*greedy.tokens, *greedy.stopped_by]
        fields["output"] = setup.tokenizer.decode(continuation, skip_special_tokens=True)
    else:
        continuation = reference.answer
    forced = Forced(continuation)
    answer = forced.answer(setup, example.ids, cache)
    scores = forced.scores()
    fields |= {"score": scores["agreement"], "metric": "agreement", "scores": scores, "answer": continuation}
    return fields, answer


def _score_likelihood(setup: Setup, example: Example, cache: BoundedCache) -> tuple[Fields, Answer]:
    """The likelihood of the continuation, or of the prompt's second half."""
    kind, ids = example.task.kind, example.ids
    if kind == "nll":
        forced = Forced(continuation_ids(example))
        answer = forced.answer(setup, ids, cache)
        nll, tokens = forced.scores()["nll"], forced.tokens
    else:
        skip = len(ids) // 2
        if not skip:
            raise ValueError("a prompt of one token has no token whose likelihood is known")
        tokens = len(ids) - skip
        nll, answer = nll_reading(setup, cache, ids, skip)
    return {"score": nll, "metric": kind, "scores": {kind: nll}, "new_tokens": tokens}, answer


def continuation_ids(example: Example) -> array[int]:
    """Token ids of the continuation behind its prompt, which some tokenizers begin with a blank where it stands alone."""
    whole = [example.prompt, example.continuation]
    # Those of the whole prompt, also where passages of it are read alone.
    ids, both = (stream_ids(example.tokenizer, texts, special=example.special) for texts in (whole[:1], whole))
    # Of a tokenizer that ends a text with a token of its own, or whose tokens reach across the border, those of the text alone.
    return both[len(ids) :] if both[: len(ids)] == ids else stream_ids(example.tokenizer, whole[1:])


def store_kept(out: Path, key: Key, cache: BoundedCache, ids: array[int]) -> str:
    """Write the cache's kept slots to a file; returns its stem. Arrays: ``ids``, the prompt's token ids ``[T]``
    (int32); ``heads`` ``[L, T]`` (uint8), the number of key/value heads per layer that hold each token; ``n_heads``
    (int), heads per layer.

    Raises:
        NotStored: has the file's name and the reason.
    """
    kept = Kept.of(ids, cache)
    held = [kept.heads(layer) for layer in range(len(kept.positions))]
    heads = np.stack([counts for counts, _ in held]).astype(np.uint8)
    stem = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]

    def write(path: Path) -> None:
        with path.open("wb") as file:
            np.savez_compressed(file, ids=np.asarray(ids, dtype=np.int32), heads=heads, n_heads=held[-1][1])

    try:
        write_beside(out / "kept" / f"{stem}.npz", write)
    except OSError as error:
        raise NotStored(f"{error}; finished examples are safe, run again to go on") from error
    return stem
