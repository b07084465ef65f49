"""Measurements of a whole model with random weights, each a generator of figures; `scripts/gpu.py` runs them.

Weights and heads have the sizes of `recipes/configs`; tokens are random, batch 1.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import bench
import torch
from decoding import decode
from kernel_cases import Shape, cases
from transformers import AutoModelForCausalLM, DynamicCache
from triton.errors import TritonError

from locret_kit import BoundedCache, HeadsConfig, RetainingHeads, attach
from locret_kit.backbones.libraries import CACHE
from locret_kit.backbones.load import freeze
from locret_kit.backbones.weights import dense
from locret_kit.cache.backend import backend_for
from locret_kit.naming import first_line
from locret_kit.planning.backbone_sizes import ITEM_BYTES, BackboneSizes, head_parameters
from locret_kit.planning.inference_plan import Setting, plan_inference
from locret_kit.runtime.drivers.dense import LayerStages, stages_of, timings
from locret_kit.runtime.session import Sampling, prefill

WARM, TIMED = 8, 48
"""Decoded tokens."""
PASSES = 3
"""Short prefills that shares are taken from."""
BEHIND = 8192
"""Tokens of the shorter prompt that decoding is timed after, where the budget is below."""
SHARE = 0.2
"""Share of the floating-point ceiling that prefill is expected to reach before anything is measured."""
COMPILING = 20.0
"""Seconds that a measurement may spend on compiling kernels."""
FAILURES = (RuntimeError, ValueError, TritonError)
"""Errors that end one measurement and not the others: no memory, a kernel that does not compile, an error of the device."""


class Figure(NamedTuple):
    """One measurement."""

    name: str
    value: float | None
    unit: str
    note: str = ""


@dataclass
class Run:
    """A model under measurement, and its figures so far."""

    name: str
    config: Any
    setting: Setting
    device: torch.device
    flops: float
    """Floating-point operations per second of the matmul ceiling."""
    bandwidth: float
    """Bytes per second of the copy ceiling."""
    model: Any = None
    heads: Any = None
    ids: list[int] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds of whole prefills, by policy."""
    share: float = SHARE
    """Share of the floating-point ceiling that prefill reached."""
    warm: set[str] = field(default_factory=set)
    """Policies whose kernels are compiled."""
    wrong: set[str] = field(default_factory=set)
    """Operations that do not equal their references, and ``logits`` where the model's own do not."""
    cache_bytes: int = 0
    after: Any = None
    """Cache and logits after Locret's whole prompt, until something else needs the room."""

    def build(self) -> None:
        """Random weights, made on the device in the setting's dtype."""
        dtype, spec = getattr(torch, self.setting.dtype), BackboneSizes.of(self.config).spec
        torch.manual_seed(0)
        default = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with torch.device(self.device):
                model = AutoModelForCausalLM.from_config(self.config, dtype=dtype, attn_implementation="sdpa")
                heads = RetainingHeads(HeadsConfig.for_backbone(spec, self.name, self.setting.d_hidden))
        finally:
            torch.set_default_dtype(default)
        self.model, self.heads = freeze(model), freeze(heads)
        self.ids = torch.randint(self.config.vocab_size, (self.setting.context,)).tolist()

    def cache(self, policy: str = "locret", **changed: Any) -> BoundedCache:
        """An empty cache of the setting, or of one that is ``changed``."""
        context = changed.pop("context", self.setting.context)
        return BoundedCache(replace(self.setting.run, **changed), policy, self.heads, prompt_length=context)

    def read(
        self, cache: BoundedCache, tokens: int, progress: Callable[[int, int], None] | None = None
    ) -> tuple[float, torch.Tensor]:
        """Seconds of a prefill, and its logits. Peaks of memory begin anew before it. Without replays where its ``progress`` is
        timed: the clock of a part of a chunk does not tick in a graph."""
        free(self.device)
        began = time.perf_counter()
        with attach(self.model):
            logits = prefill(self.model, self.ids[:tokens], cache, progress, graph=None if progress is None else False)
        wait(self.device)
        return time.perf_counter() - began, logits

    def compile(self, policy: str = "locret") -> None:
        """Read a short prompt, once: kernels are compiled for the sizes of a prefill before it is timed."""
        if policy not in self.warm:
            tokens = short(self.setting)
            self.read(self.cache(policy, context=tokens), tokens)
            self.warm.add(policy)

    def whole(self, policy: str = "locret") -> float:
        """Seconds of the whole prompt, measured once; Locret's cache is kept."""
        if policy not in self.seconds:
            self.after = None
            self.compile(policy)
            cache = self.cache(policy)
            self.seconds[policy], logits = self.read(cache, self.setting.context)
            if policy == "locret":
                self.after, self.cache_bytes = (cache, logits), cache.nbytes
                self.share = self.floor(self.setting.context) / self.seconds[policy]
        return self.seconds[policy]

    def floor(self, tokens: int, budget: int | None = None) -> float:
        """Seconds that the floating-point operations of a prefill take at the ceiling."""
        budget = self.setting.budget if budget is None else budget
        return operations(self.config, replace(self.setting.with_run(budget=budget), context=tokens)) / self.flops

    def expected(self, policy: str = "locret") -> float:
        """Seconds that ``whole`` will take, from earlier measurements; 0 if it was measured itself."""
        if policy in self.seconds:
            return 0.0
        work = self.floor(self.setting.context) + self.floor(short(self.setting))  # and the short one before it
        first = self.seconds.get("locret") or COMPILING + work / self.share
        if policy == "locret":
            return first
        known = [s for name, s in self.seconds.items() if name != "locret"]
        return self.expected() + COMPILING + max(known, default=1.5 * first)


def operations(config: Any, setting: Setting) -> float:
    """Floating-point operations of a prefill: projections and MLP, attention of each chunk over budget and itself, heads."""
    backbone, tokens = BackboneSizes.of(config), setting.context
    spec, tables = backbone.spec, config.vocab_size * config.hidden_size * (1 if config.tie_word_embeddings else 2)
    pairs = 0.0
    for start in range(0, tokens, setting.chunk):
        T = min(setting.chunk, tokens - start)
        pairs += T * min(start, setting.budget) + T * (T + 1) / 2
    attention = 4 * spec.n_layers * spec.n_heads * spec.head_dim * pairs
    return attention + 2 * tokens * (backbone.parameters - tables + head_parameters(spec, setting.width))


def bytes_read(config: Any, dtype: str, rows: int) -> int:
    """Bytes that a decoded token must read: the weights, of input embeddings one row at most, and keys and values."""
    backbone = BackboneSizes.of(config)
    spec, table = backbone.spec, 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    return ITEM_BYTES[dtype] * (
        backbone.parameters - table + 2 * spec.n_layers * spec.n_kv_heads * spec.head_dim * rows
    )


def attention(run: Run) -> str:
    """Operators of attention: of a chunk over cached rows, and of one token."""
    spec, dtype, steady = (
        BackboneSizes.of(run.config).spec,
        getattr(torch, run.setting.dtype),
        run.setting.schedule.steady,
    )
    heads = spec.n_heads, spec.n_kv_heads
    backend = backend_for(None, run.device, spec.head_dim, dtype, heads, steady)
    token = "ragged_decode" if backend.kernels == "triton" else "sdpa"
    return f"{backend.reads_by(run.device, dtype, spec.head_dim, heads)}; one token: {token}"


def wait(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free(device: torch.device) -> None:
    """Give back what earlier measurements held; peaks begin anew."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    wait(device)


class HostEvent:
    """``torch.cuda.Event`` on a device without a stream: by the host's clock."""

    def record(self) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, end: HostEvent) -> float:
        return 1e3 * (end.at - self.at)


class Mark(NamedTuple):
    """A point in the device's stream, in the place of a clock reading."""

    event: Any

    def __sub__(self, earlier: Mark) -> Elapsed:
        return Elapsed([(earlier.event, self.event)])


class Elapsed(NamedTuple):
    """Seconds between marks, known once the device has passed them: adding them up waits for nothing."""

    pairs: list[tuple[Any, Any]]

    def __add__(self, more: Elapsed) -> Elapsed:  # type: ignore[override]
        return Elapsed(self.pairs + more.pairs)

    def __radd__(self, nothing: float) -> Elapsed:
        return self

    def seconds(self) -> float:
        return sum(begin.elapsed_time(end) for begin, end in self.pairs) / 1e3


@contextmanager
def stream_clock(device: torch.device) -> Iterator[Callable[[], Mark]]:
    """The cache's counters count device time: their clock sets marks in the stream, so the prefill runs as it does without."""

    def clock() -> Mark:
        event = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else HostEvent()
        event.record()
        return Mark(event)

    timed = [m for name, m in sys.modules.items() if name.startswith("locret_kit.cache.") and "time" in vars(m)]
    with ExitStack() as patched:
        for module in timed:
            patched.enter_context(mock.patch.object(module, "time", SimpleNamespace(perf_counter=clock)))
        yield clock


def check(run: Run) -> Iterator[Figure]:
    """The gate: operations against references at the model's heads, and logits against the model's own forward.

    Raises:
        RuntimeError: the logits do not agree. An operation that does not is in ``run.wrong``, and in a row of its own.
    """
    spec = BackboneSizes.of(run.config).spec
    at = Shape(spec.n_heads, spec.n_kv_heads, spec.head_dim, 1024, 256, prompt=2048, answer=64)
    for case in cases(run.name, at if run.device.type == "cuda" else bench.TINY, run.device):
        try:
            bench.gate(case)
        except FAILURES as error:
            run.wrong.add(case.function)
            yield Figure(f"{case.operation} against its reference", None, "", f"wrong: {first_line(error)}")
    tokens = min(256, run.setting.context)
    cache = run.cache(budget=tokens, chunk=64, context=tokens, stabilizers=None, local_len=None)
    mine = run.read(cache, tokens)[1]
    with torch.inference_mode():
        piece = torch.tensor([run.ids[:tokens]], device=run.device)
        theirs = run.model(input_ids=piece, logits_to_keep=1).logits[0, -1].float()
    error = float((mine - theirs).norm() / theirs.norm())
    yield Figure("logits with nothing evicted, error", error, "of their size", f"below 0.1 passes; {tokens} tokens")
    if not error < 0.1:
        run.wrong.add("logits")
        raise RuntimeError(f"logits with nothing evicted are off by {error:.2g} of their size")


def short(setting: Setting) -> int:
    """Tokens of a short prefill that ends with a few chunks over a full cache, the last of them as long as the whole prompt's."""
    return (setting.budget // setting.chunk + 6) * setting.chunk + setting.context % setting.chunk


class Chunks(NamedTuple):
    """Chunks of a prefill that begin with a full cache."""

    seconds: float
    """Seconds on the device from the end of the chunk before them."""
    took: list[float]
    """Seconds of scoring, selecting and compacting."""
    first: int
    """Tokens before these chunks."""
    tokens: int
    """Tokens of these chunks."""


def chunks_of(run: Run) -> Chunks:
    """Times of the chunks of a short prefill, without the tail: after that nothing is evicted."""
    cache, fields = run.cache(context=short(run.setting)), ("score_s", "select_s", "compact_s")
    tokens = cache.schedule.body or 0
    # Tokens read, when, and what the three took since the mark before.
    marks: list[tuple[int, Mark, list[Elapsed | float]]] = []

    with stream_clock(run.device) as clock:

        def note(done: int, total: int) -> None:
            marks.append((done, clock(), [getattr(cache.counters, name) for name in fields]))
            for name in fields:
                setattr(cache.counters, name, 0.0)

        seconds = run.read(cache, tokens, note)[0]
    if not run.seconds:
        run.share = run.floor(tokens) / seconds
    (first, begin, _), *full = [mark for mark in marks if mark[0] >= run.setting.budget + run.setting.chunk]
    took = [sum(e.seconds() for *_, three in full if isinstance(e := three[i], Elapsed)) for i in range(3)]
    return Chunks((full[-1][1] - begin).seconds(), took, first, full[-1][0] - first)


def shares(run: Run) -> Iterator[Figure]:
    """Device time of scoring, selecting and compacting over chunks that begin with a full cache, in passes of its own: of the
    fastest, since the device waits wherever the host is held up."""
    names = ("scoring", "selecting", "compacting")
    run.compile()
    total, took, first, tokens = min((chunks_of(run) for _ in range(PASSES)), key=lambda chunks: chunks.seconds)
    said = f"{tokens} tokens after {first}, on the device, the fastest of {PASSES} passes"
    s, heads = run.setting, head_parameters(BackboneSizes.of(run.config).spec, run.setting.width)
    least = 200 * s.context * heads / operations(run.config, s)
    for name, part in zip(names, took, strict=True):
        aside = f"{said}; the heads' products are {least:.2g}% of all operations" if name == "scoring" else said
        yield Figure(f"share of prefill in {name}", 100 * part / total, "%", aside)
    yield Figure("share of prefill in all three", 100 * sum(took) / total, "%", said)
    products = 2 * tokens * heads / run.flops
    beyond = max(0.0, sum(took) - products) / total
    aside = f"{said}; the products at the matmul ceiling take {100 * products / total:.2g}%"
    yield Figure("share of prefill in all three beyond the heads' products", 100 * beyond, "%", aside)


def prefilling(run: Run) -> Iterator[Figure]:
    """Speed against the floor, memory against the plan."""
    seconds, tokens = run.whole(), run.setting.context
    most = torch.cuda.max_memory_allocated(run.device) if run.device.type == "cuda" else None
    planned = plan_inference(BackboneSizes.of(run.config), run.setting).peak
    work = f"{run.floor(tokens) * run.flops / tokens / 1e9:.4g} GFLOP per token"
    yield Figure("prefill", tokens / seconds, "tokens/s")
    yield Figure("prefill, of the floating-point floor", 100 * run.share, "%", work)
    yield Figure("peak memory, planned", planned / 2**30, "GiB")
    if most is None:
        yield Figure("peak memory, allocated", None, "GiB", "not measured: no CUDA device's allocator here")
        return
    yield Figure("peak memory, allocated", most / 2**30, "GiB")
    yield Figure("peak memory, reserved", torch.cuda.max_memory_reserved(run.device) / 2**30, "GiB")
    yield Figure("peak memory, allocated against planned", most / planned, "times")


def decoding(run: Run) -> Iterator[Figure]:
    """A token at a full cache: after the whole prompt, and after ``BEHIND`` tokens or the fewest that fill the cache."""
    s = run.setting
    contexts = (s.context, min(s.context, BEHIND if s.budget < BEHIND else s.budget + 2 * s.chunk))
    took: dict[tuple[int, str], float] = {}
    for context in dict.fromkeys(contexts):
        if context == s.context:
            if run.after is None:  # another measurement needed the room
                run.seconds.pop("locret", None)
            run.whole()
            (cache, logits), run.after = run.after, None
        else:
            cache = run.cache(context=context)
            logits = run.read(cache, context)[1]
        for form in ("dynamic", "graph"):
            name, rows = f"decode after {context} tokens, {form}", max(cache.kept_rows)
            try:
                seconds = took[context, form] = per_token(run, cache, logits, form == "graph")
            except FAILURES as error:
                yield Figure(name, None, "ms/token", f"not measured: {first_line(error)}")
                continue
            yield Figure(name, 1e3 * seconds, "ms/token", f"{rows} rows per head")
            if context == s.context:
                floor = bytes_read(run.config, s.dtype, rows) / run.bandwidth
                share, least = 100 * floor / seconds, f"{1e3 * floor:.4g} ms"
                yield Figure(f"decode at a full cache, {form}, of the copy floor", share, "%", least)
    for form in ("dynamic", "graph"):
        if len(times := [took[c, form] for c in dict.fromkeys(contexts) if (c, form) in took]) == 2:
            name = f"decode after the whole prompt against a short one, {form}"
            yield Figure(name, times[0] / times[1], "times", f"{contexts[0]} and {contexts[1]} tokens")


def products(run: Run) -> Iterator[Figure]:
    """Matrix products of a token in separate launches (cuBLAS), in one, and in one with PDL; mean over all layers."""
    if run.device.type != "cuda":
        return
    layers = [stages_of(layer, None) for layer in dense(run.model).layers]
    for what, stages in zip(LayerStages._fields, zip(*layers, strict=True), strict=True):
        nbytes = sum(weight.nbytes for weight in stages[0].weights)
        for form, seconds in timings(stages, "triton").items():
            yield Figure(
                f"a token's products, {what}: {form}", 1e6 * seconds, "us", f"{nbytes / seconds / 1e9:.0f} GB/s"
            )


def per_token(run: Run, cache: BoundedCache, logits: torch.Tensor, graph: bool) -> float:
    """Median seconds of a decoded token. Raises ValueError where a graph is wanted and not possible."""
    clock: list[float] = []
    with attach(run.model):
        for _ in decode(
            run.model, cache, logits, prompt=(), max_new_tokens=WARM + TIMED, sampling=Sampling(), stop=frozenset(),
            graph=graph,
        ):  # fmt: skip
            clock.append(time.perf_counter())
    return statistics.median(b - a for a, b in pairwise(clock[WARM - 1 :]))


def peer(policy: str, run: Run) -> Iterator[Figure]:
    """Prefill of another policy in the same setting."""
    yield Figure(f"prefill of {policy} against locret", run.whole(policy) / run.whole(), "times")


def full_attention(run: Run) -> Iterator[Figure]:
    """transformers' own forward of the same tokens, without a cap: the whole prompt at once, so that SDPA needs no mask and
    takes its fastest kernel, or in chunks where that does not fit."""
    mine, tokens = run.whole(), run.setting.context
    run.after = None
    if run.device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(1.0, run.device.index)

    @torch.inference_mode()
    def forward(piece: int, total: int) -> tuple[float, int]:
        free(run.device)
        cache: Any = DynamicCache()
        began = time.perf_counter()
        for start in range(0, total, piece):
            ids = torch.tensor([run.ids[start : min(start + piece, total)]], device=run.device)
            run.model(input_ids=ids, **{CACHE: cache}, use_cache=True, logits_to_keep=1)
        wait(run.device)
        return time.perf_counter() - began, sum(x.keys.nbytes + x.values.nbytes for x in cache.layers)

    forward(min(tokens, 4096), min(tokens, 4096))
    try:
        found, how = forward(tokens, tokens), "in one forward"
    except torch.OutOfMemoryError:
        found = None  # and again only after this block, where nothing holds what the first try held
    if found is None:
        found, how = forward(run.setting.chunk, tokens), f"in pieces of {run.setting.chunk}"
    seconds, held = found
    yield Figure("full attention, prefill", tokens / seconds, "tokens/s", f"{how}, no cap")
    yield Figure("full attention, cache", held / 2**30, "GiB")
    yield Figure("prefill against full attention", seconds / mine, "times faster")
    yield Figure("cache against full attention", held / run.cache_bytes, "times smaller")
