"""Read one prompt through one variant's cache and measure the result: the fields of a row."""

from __future__ import annotations

import hashlib
import json
from array import array
from dataclasses import replace
from pathlib import Path

import numpy as np

from ...cache.bounded import BoundedCache
from ...files import write_beside
from ...runtime.kept_text import kept_heads
from ...runtime.report import Report
from ...runtime.session import generate, stop_ids
from ...runtime.tokens import stream_ids
from ...text.template import protected_spans
from ..metrics.benchmarks import get_metric
from . import bm25, fidelity, oracle
from .result_rows import Key, Row
from .run_spec import BM25, RANDOM_HEADS, EvalPrompt, Run, Setup, Variant, is_oracle, reads_alone
from .shared_beginning import Fork, SharedBeginning

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
    run: Run, variant: Variant, prompt: EvalPrompt, shared: int, document: SharedBeginning, reference: Row | None
) -> Fields:
    """Fields of one example's row. ``shared``: see `shared_lengths`; ``reference``: the row of full attention."""
    if variant.policy == BM25:
        budget = run.setup.settings_for(variant, len(prompt.ids)).budget
        ids = array("i", bm25.shortened(run.setup.tokenizer, prompt.example, budget))
        short, full = replace(prompt, ids=ids), replace(variant, policy="full")
        alone = SharedBeginning(run.setup.model, lambda tokens: cache_for(run.setup, full, tokens), len(ids))
        return measure_row(run, full, short, 0, alone, reference) | {"tokens": len(ids), "slots": budget}
    if is_oracle(variant.policy):
        fork = oracle.fork(run.setup, variant, prompt.ids, chat=not prompt.example.special)
    else:
        fork = document.fork(prompt.ids, shared, _pins(run.setup, variant, prompt))
    kind = prompt.task.kind
    if kind.startswith("nll"):
        return _score_likelihood(run.setup, prompt, fork)
    if kind == "agreement":
        return _score_agreement(run.setup, variant, prompt, fork, reference)
    return _score_generation(run, variant, prompt, fork, reference)


def _pins(setup: Setup, variant: Variant, prompt: EvalPrompt) -> list[tuple[int, int]]:
    """Spans that the settings protect in a prompt that went through the chat template."""
    protect = setup.settings_for(variant, len(prompt.ids)).protect
    return [] if prompt.example.special else protected_spans(setup.tokenizer, prompt.ids, protect)


def _score_generation(run: Run, variant: Variant, prompt: EvalPrompt, fork: Fork, reference: Row | None) -> Fields:
    setup, task, example, ids = run.setup, prompt.task, prompt.example, prompt.ids
    kept: dict[str, str] = {}

    def at_end_of_prompt(read: int, total: int) -> None:
        if read == total and prompt.sample < run.keep:
            kept["kept"] = store_kept(run.out, prompt.key(variant), fork.cache, ids)

    text, report = generate(
        setup.model, setup.tokenizer, ids, fork.cache, max_new_tokens=setup.max_new_tokens or task.max_new_tokens,
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
    fields = {"score": scores[metric], "metric": metric, "scores": scores, "output": text, "answer": answer}
    return {**fields, **_cost(report, fork), **kept}


def _score_agreement(setup: Setup, variant: Variant, prompt: EvalPrompt, fork: Fork, reference: Row | None) -> Fields:
    """Feed what full attention chooses, token by token, and count what the policy would have chosen too. Without a reference
    this is full attention, which chooses first and is then given its own."""
    fields: Fields = {}
    if reference is None:
        limit = setup.max_new_tokens or prompt.task.max_new_tokens
        stop = stop_ids(setup.model, setup.tokenizer)
        continuation = fidelity.greedy_reference(setup.model, fork.cache, prompt.ids, limit, stop)
        fields["output"] = setup.tokenizer.decode(continuation, skip_special_tokens=True)
        fork = Fork(cache_for(setup, variant, len(prompt.ids)))
    else:
        continuation = reference.answer
    forced = fidelity.teacher_force(setup.model, fork.cache, prompt.ids, continuation)
    scores = {"agreement": forced.agreement, "nll": forced.nll}
    fields |= {"score": forced.agreement, "metric": "agreement", "scores": scores, "answer": continuation}
    return fields | _cost_of_given_text(setup, prompt, fork, len(continuation), forced.prefill_s, forced.decode_s)


def _score_likelihood(setup: Setup, prompt: EvalPrompt, fork: Fork) -> Fields:
    """The likelihood of the continuation, or of the prompt's second half."""
    kind, ids, cache = prompt.task.kind, prompt.ids, fork.cache
    if kind == "nll":
        continuation = stream_ids(setup.tokenizer, [prompt.example.continuation])
        forced = fidelity.teacher_force(setup.model, cache, ids, continuation)
        nll, prefill_s, decode_s, tokens = forced.nll, forced.prefill_s, forced.decode_s, len(continuation)
    else:
        (nll, prefill_s), decode_s = fidelity.nll_reading(setup.model, cache, ids, len(ids) // 2), 0.0
        tokens = len(ids) - len(ids) // 2
    fields: Fields = {"score": nll, "metric": kind, "scores": {kind: nll}}
    return fields | _cost_of_given_text(setup, prompt, fork, tokens, prefill_s, decode_s)


def _cost_of_given_text(
    setup: Setup, prompt: EvalPrompt, fork: Fork, tokens: int, prefill_s: float, decode_s: float
) -> Fields:
    """`_cost` where nothing was written: ``tokens`` were read after the prompt, or are a part of it."""
    report = Report.of(
        setup.model, fork.cache, prompt_tokens=len(prompt.ids), new_tokens=tokens, prefill_s=prefill_s,
        decode_s=decode_s, kept_rows=fork.cache.kept_rows,
    )  # fmt: skip
    return _cost(report, fork)


def _cost(report: Report, fork: Fork) -> Fields:
    """Cost and settings of a run; its prefill with the seconds in which the fork's beginning was read."""
    names = ("new_tokens", "peak_bytes", "cache_bytes", "computed_share", "device", "dtype", "versions")
    return {
        **{name: getattr(report, name) for name in names},
        **{name: value for name, value in vars(report.settings.run).items() if name != "budget"},
        "slots": 0 if fork.cache.policy.keeps_everything else report.settings.budget,
        "prefix_shared": fork.shared,
        "prefill_s": round(fork.seconds + report.prefill_s, 4),
        "decode_s": round(report.decode_s, 4),
    }


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
