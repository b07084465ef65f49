"""Decoding with fixed shapes: a step whose kernels, sizes and addresses never change, so that a CUDA graph can replay it.

A step appends one token to every layer and attends to its rows. How many rows there are, and where in the text the token
stands, are numbers on the device: rows are written at an index, and attention masks by length. When a layer is full is
known to the host, since every head of a layer holds as many rows: a step that evicts is a graph of its own.
Host-side counts follow every step, so decoding may change to the dynamic form and back after any token.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..backbones.rope import rotate
from ..backbones.weight_bits import weight_bits_of
from ..cache.bounded import BoundedCache
from ..cache.decoding import RowRotation, VarlenRows, decode_rows
from ..cache.eviction import count_eviction
from ..cache.view import slots_of
from ..naming import first_line
from ..policies.base import Slots

WARM = 2
"""Steps before the first capture: kernels are compiled and workspaces allocated in them."""
MOST_GRAPHS = 4
"""Captured forms of a step; a form beyond them runs without a graph."""
READS = frozenset(
    {
        "_local_scalar_dense", "item", "is_nonzero", "equal", "allclose", "nonzero", "nonzero_numpy", "argwhere",
        "masked_select", "bincount", "_unique", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive",
    }
)  # fmt: skip
"""Operators whose result, or its shape, the host waits for; inference mode shows the composed ones as they are called."""


def reason_against(model: Any, cache: BoundedCache) -> str | None:
    """Why this cache cannot be decoded with fixed shapes; None where it can, as far as settings tell."""
    policy = cache.policy
    if cache.ropes is None:
        return "this architecture has no adapter, so the backbone rotates by positions of the host"
    if len({parameter.device for parameter in model.parameters()}) > 1:
        return "the backbone lies on several devices"
    if weight_bits_of(model) == 8:
        return "weights of 8 bits, whose products make the host look for large activations"
    if cache.kv_bits is not None:
        return f"kv_bits={cache.kv_bits}: rows are quantised when the host says"
    for flag, why in (
        (policy.ragged, "heads of different lengths, which the host lays out"),
        (policy.keeps_everything, "buffers that grow"),
        (policy.needs_logits, "scores from the backbone's logits"),
        (policy.merge is not None, "merging, head by head"),
    ):
        if flag:
            return f"policy={policy.name!r} has {why}"
    if any(rows.state for rows in cache.bounded):
        return f"the score of policy={policy.name!r} keeps tensors of its own between tokens"
    return None


@dataclass(frozen=True)
class Cut:
    """A layer that is cut before or after a token: everything that its kernels' shapes depend on."""

    layer: int
    rows: int
    keep: int
    fresh: int
    """Tokens since the layer's last eviction; 0 for a layer with a window, where nothing asks."""


Cuts = tuple[Cut, ...]


@cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of all captures on a device: PyTorch's own is one for all devices, on that of the first capture. cuBLAS keeps a
    workspace for every stream, so there is one only."""
    return torch.cuda.Stream(device)


class HostReads(TorchDispatchMode):
    """Collects the names of operators that make the host wait for the device, or that copy between the two."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if name in READS or _shape_is_read(name, args, kwargs):
            self.found.add(name)
        if len({x.device.type for x in tree_leaves((args, kwargs, out)) if isinstance(x, Tensor)}) > 1:
            self.found.add(f"{name} between host and device")
        return out


def _shape_is_read(name: str, args: Any, kwargs: Any) -> bool:
    """Whether an operator that mostly runs ahead has arguments for which the host must know numbers on the device."""
    if name in ("index", "index_put", "index_put_"):
        return any(isinstance(x, Tensor) and x.dtype in (torch.bool, torch.uint8) for x in args[1])
    if name == "repeat_interleave":
        return any(isinstance(x, Tensor) for x in args[-1:]) and kwargs.get("output_size") is None
    return name == "where" and len(args) == 1


class StaticDecoder:
    """``decoder(token)`` gives the logits ``[V]`` behind a token, as the dynamic forward does.

    On CUDA a form of the step that has run before is captured, then replayed; elsewhere the very same function runs as it
    is. ``reason`` says why nothing (more) is captured, once that is known; the caller then decodes dynamically.

    Args:
        model: attached, and bound to the cache.
        cache: one that ``reason_against`` has nothing against, after its prompt. Batch 1.
    """

    def __init__(self, model: Any, cache: BoundedCache) -> None:
        self.model, self.cache = model, cache
        self.reason: str | None = None
        self.captures = model.device.type == "cuda"
        self.cuts_captured = True
        """Whether evictions are inside the graphs: unless the policy's make the host wait."""
        self.graphs: dict[tuple[Cuts, Cuts], tuple[Any, Tensor]] = {}
        self.ran: dict[tuple[Cuts, Cuts], int] = {}
        self._held: list[Any] = []
        """Tables of rotation that graphs read: a dynamic forward in between would free them."""
        with torch.inference_mode(False):
            self.ids = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
            self.seen = torch.full((), cache.get_seq_length(), device=model.device)
            self.length_L = torch.tensor(cache.kept_rows, device=model.device)
            self.flats = [rows.flat() for rows in cache.bounded]
            self.tables = {
                layer: self._table(layer) for layer, rows in enumerate(cache.bounded) if cache.rotates_rows(rows)
            }

    def _table(self, layer: int) -> tuple[Tensor, Tensor]:
        """cos and sin of every place a row of the layer may have; equal ones are made once."""
        cache = self.cache
        assert cache.ropes is not None and cache.places.span is not None
        rope, size = cache.ropes[layer], max(cache.places.span, cache.bounded[layer].capacity)
        return cache.tables.between(rope, 0, size, cache.bounded[layer].keys)

    # ---- a token -------------------------------------------------------------------------------------------------

    def __call__(self, token: int) -> Tensor:
        self.ids.fill_(token)
        form = self._cuts()
        if self.cuts_captured or form == ((), ()):
            return self._run(*form).clone()
        before, after = form
        self._cut_all(before)
        logits = self._run((), ()).clone()
        self._cut_all(after)
        return logits

    def _cuts(self) -> tuple[Cuts, Cuts]:
        """Which layers must be cut to make room for a token, and which are due after it."""
        before, after = [], []
        for layer, rows in enumerate(self.cache.bounded):
            held, fresh, budget = rows.rows, rows.since_eviction, self.cache.budgets[layer]
            if held == rows.capacity:
                keep = budget if rows.window is None else rows.window - 1
                before.append(Cut(layer, held, keep, fresh if rows.window is None else 0))
                held, fresh = keep, 0
            due = None if rows.window else self.cache.schedule.keep_at(rows.seen + 1, held + 1, budget)
            if due is not None:
                after.append(Cut(layer, held + 1, due, fresh + 1))
        return tuple(before), tuple(after)

    def _run(self, before: Cuts, after: Cuts) -> Tensor:
        """One form of the step: as it is at first, then captured, then replayed."""
        form = before, after
        if form in self.graphs:
            graph, logits = self.graphs[form]
            graph.replay()
            self._count(before, after)
            return logits
        ran = self.ran[form] = self.ran.get(form, 0) + 1
        warm = sum(self.ran.values()) > WARM
        if self.captures and self.reason is None and warm and ran > 1 and len(self.graphs) < MOST_GRAPHS:
            try:
                self.graphs[form] = self._captured(before, after)
            except RuntimeError as error:  # nothing of it has run: the token is still to come
                self.reason = f"its capture failed: {first_line(error)}"
            else:
                self._held.append(self.cache.tables.made())
                return self._run(before, after)
        with HostReads() as reads:
            logits = self._step(before, after)
        self._count(before, after)
        self._judge(reads.found, bool(before or after))
        return logits

    def _captured(self, before: Cuts, after: Cuts) -> tuple[Any, Tensor]:
        """A graph of the step, which does not run yet, and where its logits will be."""
        graph, device = torch.cuda.CUDAGraph(), self.model.device
        pool = next((first.pool() for first, _ in self.graphs.values()), None)
        form: dict[str, Any] = dict(pool=pool, stream=capture_stream(device), capture_error_mode="thread_local")
        # A capture that fails leaves PyTorch on its stream: the outer block brings back the one before.
        before_it = torch.cuda.stream(torch.cuda.current_stream(device))
        with torch.cuda.device(device), before_it, torch.cuda.graph(graph, **form):
            logits = self._step(before, after)
        return graph, logits

    def _judge(self, found: set[str], cut: bool) -> None:
        """What a step that reads from the device means for graphs; the very first one prepares what later ones need not."""
        if not found or sum(self.ran.values()) < WARM:
            return
        if cut and self.cuts_captured:
            self.cuts_captured = False
            return
        self.reason = f"a token of policy={self.cache.policy.name!r} makes the host wait ({', '.join(sorted(found))})"

    # ---- what is captured: no count of the host changes here --------------------------------------------------------

    def _step(self, before: Cuts, after: Cuts) -> Tensor:
        for cut in before:
            self._cut(cut)
        self.cache.stepping = self._attend
        try:
            out = self.model(input_ids=self.ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        finally:
            self.cache.stepping = None
        self.seen += 1
        self.length_L += 1
        for cut in after:
            self._cut(cut)
        return out.logits[0, -1].float()

    def _attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of the newest token ``[B, Q, 1, D]``, which becomes a row."""
        cache, rows = self.cache, self.cache.bounded[layer]
        assert cache.ropes is not None and cache.backend is not None
        score_BHT = cache.entry_scores(layer, rows, self.seen, q, k, v)
        rows.remember(q)
        turn = None
        if layer in self.tables:
            turn = RowRotation(*self.tables[layer], cache.places.span or 0, self.seen + 1)
        else:
            cos, sin = cache.ropes[layer].tables(self.seen[None], q.dtype)
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        length_1 = self.length_L[layer : layer + 1]
        rows.put(length_1, k, v, score_BHT, self.seen.int())
        statistics = cache.statistics if rows.window is None else ()
        return decode_rows(q, self._flat(layer, length_1 + 1), rows.scaling, cache.backend, statistics, turn)

    def _flat(self, layer: int, length_1: Tensor) -> VarlenRows:
        """The rows that a token sees, as many as the device says."""
        flat, rows = self.flats[layer], self.cache.bounded[layer]
        if rows.window is not None:
            seen_1 = length_1.clamp(max=rows.window)
            flat = replace(flat, starts_BH=flat.starts_BH + (length_1 - seen_1))
            length_1 = seen_1
        return replace(flat, lengths_BH=length_1.expand_as(flat.starts_BH), longest=rows.capacity)

    def _cut(self, cut: Cut) -> None:
        """Cut a layer as ``evict`` does, with what depends on the text's length taken from the device."""
        rows, policy = self.cache.bounded[cut.layer], self.cache.policy
        host = rows.rows, rows.since_eviction, rows.seen
        rows.rows, rows.since_eviction = cut.rows, cut.fresh
        try:
            if rows.window is not None:
                rows.drop_oldest(cut.keep)
            else:
                slots = self._slots(cut)
                rows.seen = self.seen  # type: ignore[assignment]  # what keys and queries are rotated by: no number of now
                scores_BHS = policy.score.score_slots(slots)
                rows.set_entry_scores(slots.entry_scores)
                rows.keep(policy.choose(slots, scores_BHS), cut.keep)
        finally:
            rows.rows, rows.since_eviction, rows.seen = host
        self.length_L[cut.layer].fill_(cut.keep)

    def _slots(self, cut: Cut) -> Slots:
        """What the policy sees; the text's length and what follows from it are the device's."""
        cache, span = self.cache, self.cache.places.span
        slots = slots_of(cache, cut.layer, cut.keep, min(cache.schedule.stabilizers, cut.keep))
        held_BH = slots.valid.sum(-1)
        next_BH = self.seen.expand_as(held_BH) if span is None else torch.maximum(held_BH, self.seen.clamp(max=span))
        stats = dict(slots.stats)
        if "count" in stats:
            stats["count"] = (self.seen - slots.positions).float()
        seen: Any = self.seen
        return replace(slots, seen=seen, next_position=next_BH, stats=stats)

    # ---- what the host knows -----------------------------------------------------------------------------------------

    def _count(self, before: Cuts, after: Cuts) -> None:
        """Bring the host's counts up to a step that was launched."""
        for cut in before:
            self._note(cut)
        for rows in self.cache.bounded:
            rows.count(1)
        for cut in after:
            self._note(cut)

    def _note(self, cut: Cut) -> None:
        rows = self.cache.bounded[cut.layer]
        rows.rows = cut.keep
        if rows.window is None:
            rows.since_eviction = 0
            count_eviction(self.cache, rows, rows.positions.shape[:2].numel() * (cut.rows - cut.keep))

    def _cut_all(self, cuts: Cuts) -> None:
        """Cut layers outside of any graph."""
        began = time.perf_counter()
        for cut in cuts:
            self._cut(cut)
            self._note(cut)
        self.cache.counters.select_s += time.perf_counter() - began
