"""A bound cache as a file: everything that it needs to go on exactly, and everything that must be the same where it does.

Identity is by content: the backbone by its configuration and a fingerprint of its weights, retaining heads by theirs, the
rotation by the frequencies that were chosen. A file whose parts differ from what is at hand is refused with the first
difference in words.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
from annotated_types import Interval
from torch import Tensor

from locret_kernels.provenance import versions

from ..backbones.identity import NAMES, fingerprint, first_difference, identity_of
from ..backbones.spec import AttentionLayer, text_config
from ..naming import blaming, first_line
from ..policies.grammar import parse_policy, parts_of
from ..policies.policy import Policy
from ..policies.registry import parts_named
from ..settings import INT32_MAX, Resolved, StoreSettings
from ..validation import check, made, shown
from .bounded import BoundedCache
from .context import CacheCounters, Context
from .file import Record, read, write
from .geometry.schedule import Schedule
from .pins import pins_of
from .storage.rows import STATE, BoundedLayer

if TYPE_CHECKING:
    from ..heads import RetainingHeads

Count = Annotated[int, Interval(ge=0, le=INT32_MAX)]
CREATED = "%Y-%m-%dT%H:%M:%SZ"
MOST_PINS = 1024
"""Ranges of pinned positions in a file: each costs a pass over the rows."""
REREAD = "reread_positions"
"""Name of the tensor of positions that are read again; absent where none are."""
HIDDEN = "last_hidden"
STATES = "states."
"""Prefix of the tensors of layers that are no attention, see ``backbones.states``."""
APART = "document."
"""Prefix of the tensors that are not the cache's."""
FINITE = (
    "keys",
    "values",
    "store.index",
    "tail_keys",
    "tail_values",
    "key_step",
    "key_zero",
    "value_step",
    "value_zero",
)
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class Saved:
    """The record of a saved cache, beside its tensors.

    Raises:
        ValueError: a field of another type or out of its bound; it is named.
    """

    version: int
    kit: str
    created: str
    """Date and time, UTC."""
    model: dict[str, object]
    """See ``backbones.identity``."""
    heads: str | None
    """Fingerprint of the retaining heads."""
    policy: str
    parts: dict[str, str]
    """The policy in full, every parameter written out."""
    pool: str | None
    """Fingerprint of the weights with which a policy merges."""
    settings: dict[str, object]
    ropes: list[dict[str, object]] | None
    """See ``rotations``."""
    dtype: str
    batch: Annotated[int, Interval(ge=1, le=1)]
    """A cache takes one text."""
    prompt_length: Count | None
    counters: dict[str, int | float | str]
    layers: list[dict[str, int | float]]
    """Counts of each layer."""
    pins: list[list[Count]]
    """Positions that are never evicted: pairs of start and end, ascending, with a gap between any two."""
    document: dict[str, object] | None
    """What was read, see ``documents``."""

    def __post_init__(self) -> None:
        check(self)
        with blaming("created", ValueError):
            time.strptime(self.created, CREATED)
        for name in NAMES:
            if not isinstance(self.model.get(name), str | None):
                raise ValueError(f"model.{name}={shown(self.model[name])} must be a text or null")
        if len(self.pins) > MOST_PINS:
            raise ValueError(f"pins: {len(self.pins)} ranges must be at most {MOST_PINS}")
        if (
            any(len(pin) != 2 for pin in self.pins)
            or [[*pin] for pin in pins_of((a, b) for a, b in self.pins)] != self.pins
        ):
            raise ValueError(
                f"pins={shown(self.pins)} must be pairs of start and end, ascending, apart from each other"
            )
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype={shown(self.dtype)} must be one of: {', '.join(DTYPES)}")

    @classmethod
    def of(cls, record: Record, where: object) -> Saved:
        """The record of a file. Raises ValueError that begins with ``where``."""
        with blaming(f"{where}", ValueError, TypeError):
            return made(cls, record, "field", whole=True)

    @property
    def resolved(self) -> Resolved:
        """The run settings; the backend is chosen anew, and where recall stores is said at hand."""
        with blaming("settings", ValueError):
            return replace(made(Resolved, {**vars(StoreSettings()), **self.settings}, whole=True), backend=None)


@dataclass(frozen=True)
class Origin:
    """Where the numbers of a cache come from, by content. To make one reads all weights of the heads: a server makes it once."""

    model: dict[str, object]
    heads: str | None

    @classmethod
    def of(cls, model: Any, heads: RetainingHeads | None) -> Origin:
        """Of a backbone and retaining heads."""
        return cls(identity_of(model), cls.of_heads(heads))

    @staticmethod
    def of_heads(heads: RetainingHeads | None) -> str | None:
        """Identity of retaining heads."""
        return None if heads is None else heads.fingerprint

    def of_cache(self, cache: BoundedCache) -> Origin:
        """Of a cache, which may be scored without the heads."""
        return self if cache.heads is not None else replace(self, heads=None)


def save_cache(
    cache: BoundedCache, path: str | Path, document: Record | None = None, more: Mapping[str, Tensor] | None = None,
    check: Callable[[], object] | None = None,
) -> str:  # fmt: skip
    """Write a cache to ``path``; the digest of what was written.

    Args:
        document: further fields of the record; plain JSON values. more: further tensors. check: see ``file.write``.

    Raises:
        ValueError: an interrupt left rows half written, or the policy cannot be written in the grammar.
        OSError: the file cannot be written; the one that was there is whole.
    """
    record, tensors = export(cache)
    return write(Path(path), {**record, "document": document}, {**tensors, **(more or {})}, check)


def export(cache: BoundedCache, origin: Origin | None = None) -> tuple[Record, dict[str, Tensor]]:
    """The record and the tensors of a cache, in logical order; ``origin`` where it is known. Raises ValueError as
    ``save_cache``."""
    cache.refuse_interrupted()
    ctx = cache.context
    if ctx.policy.keeps_everything and ctx.settings.kv_bits is not None and cache.schedule.prompt_length is None:
        raise ValueError(
            f"policy={cache.policy.name!r} in {ctx.settings.kv_bits} bits is saved with a prompt_length= alone"
        )
    try:
        parts = parts_of(cache.policy)
    except KeyError as error:
        raise ValueError(
            f"policy={cache.policy.name!r} has a part that is not registered, so no file can name it"
        ) from error
    # Counts go into the record, rows into the body: "layers.0.keys" and so on.
    tensors: dict[str, Tensor] = {}
    layers = []
    for number, rows in enumerate(cache.bounded):
        counts, held = rows.export()
        held |= {} if rows.store is None else rows.store.export()
        layers.append(counts)
        tensors |= {f"layers.{number}.{name}": tensor for name, tensor in held.items()}
    if cache.states is not None:
        tensors |= cache.states.tensors()
    if cache.last_hidden is not None:
        tensors[HIDDEN] = cache.last_hidden
    if cache.reread_positions:
        tensors[REREAD] = torch.tensor(cache.reread_positions, dtype=torch.int32)
    if len(cache.pins) > MOST_PINS:
        raise ValueError(f"pins: {len(cache.pins)} ranges must be at most {MOST_PINS} in a file")
    known = (origin or Origin.of(ctx.model, cache.heads)).of_cache(cache)
    record: Record = {
        "kit": versions("locret_kit")["locret_kit"],
        "created": time.strftime(CREATED, time.gmtime()),
        "model": known.model,
        "heads": known.heads,
        "policy": cache.policy.name,
        "parts": parts,
        "pool": _pool(cache.policy),
        "settings": cache.settings.portable,
        "ropes": rotations(ctx),
        "dtype": str(ctx.model.dtype).removeprefix("torch."),
        "batch": 1,
        "prompt_length": cache.schedule.prompt_length,
        "counters": asdict(cache.counters),
        "layers": layers,
        "pins": [list(pin) for pin in cache.pins],
    }
    return record, tensors


def _pool(policy: Policy) -> str | None:
    weights: Any = getattr(policy.merge, "weights", None)
    return None if weights is None else fingerprint(weights.parameters())


def rotations(ctx: Context) -> list[dict[str, object]] | None:
    """The frequencies (radians per token) that were chosen, their factor, and the layers that share them. None where the
    backbone rotates."""
    if ctx.ropes is None:
        return None
    # Layers that share a rotation share the object: Gemma-3 has two of them.
    layers: dict[int, list[int]] = {}
    for layer, rope in enumerate(ctx.ropes):
        layers.setdefault(id(rope), []).append(layer)
    shared = {id(rope): rope for rope in ctx.ropes}
    return [
        {"layers": layers[key], "scaling": float(rope.scaling), "inv_freq": rope.inv_freq.float().tolist()}
        for key, rope in shared.items()
    ]


def load_cache(
    path: str | Path,
    model: Any,
    heads: RetainingHeads | str | Path | None = None,
    policy: str | Policy | None = None,
    *,
    force: bool = False,
    store: StoreSettings | None = None,
) -> BoundedCache:
    """The cache that ``save_cache`` wrote, on the device of ``model``, with the backend chosen anew.

    Args:
        heads: those that the cache was made with, where its policy scores with retaining heads.
        policy: the same policy as a value, where the grammar does not know it or it names a folder.
        force: take rows of a narrower dtype than the model's.
        store: where recall stores here, and how much; what has no room there is left out. Default: in memory, all of it.

    Raises:
        OSError: there is no such file, or no memory for the cache. ValueError: the file is damaged, or the first difference to
            what is at hand.
    """
    record, tensors = read(Path(path))
    own = {name: tensor for name, tensor in tensors.items() if not name.startswith(APART)}
    return restore(Saved.of(record, path), own, model, heads, policy, where=str(path), force=force, store=store)


def restore(
    saved: Saved,
    tensors: Mapping[str, Tensor],
    model: Any,
    heads: RetainingHeads | str | Path | None = None,
    policy: str | Policy | None = None,
    *,
    where: str,
    force: bool = False,
    store: StoreSettings | None = None,
    origin: Origin | None = None,
) -> BoundedCache:
    """A cache from its record and tensors, every one of which is checked first. Arguments and errors as in ``load_cache``;
    ``origin`` where it is known."""
    with blaming(where, ValueError):
        cache = BoundedCache(
            replace(saved.resolved, **vars(store or StoreSettings())),
            _policy(saved, policy),
            heads,
            prompt_length=saved.prompt_length,
        )  # nothing is allocated yet
        # The same model under another name or revision is the same: those two are for people.
        known = (origin or Origin.of(model, cache.heads)).of_cache(cache)
        here: dict[str, object] = {
            "model": known.model | {name: saved.model.get(name) for name in NAMES},
            "parts": parts_of(cache.policy),
            "heads": known.heads,
            "pool": _pool(cache.policy),
        }
        _refuse({name: getattr(saved, name) for name in here}, here)
        # Frequencies are chosen by the prompt's length, so they are known once the cache is bound.
        cache.bind(model)
        _refuse({"ropes": saved.ropes}, {"ropes": rotations(cache.context)})
        _refuse(
            {"settings": saved.settings}, {"settings": cache.settings.portable | {"backend": saved.settings["backend"]}}
        )
        # A narrower dtype fits a wider one without a change; the other way would round rows that were never rounded.
        stored, wanted = DTYPES[saved.dtype], model.dtype
        if stored != wanted and not (force and torch.promote_types(stored, wanted) == wanted):
            wider = torch.promote_types(stored, wanted) == wanted
            raise ValueError(
                f"dtype: {saved.dtype} in the file, {str(wanted).removeprefix('torch.')} here"
                + (": --force takes rows of a narrower dtype as they are" if wider else "")
            )
        _fill(cache, saved, tensors, where)
    return cache


def _policy(saved: Saved, given: str | Policy | None) -> Policy:
    if isinstance(given, Policy):
        return given
    pools = {name for name, kind in parts_named("merge").items() if hasattr(kind, "weights")}
    if given is None and (saved.pool is not None or pools.intersection(re.findall(r"[\w-]+", saved.policy))):
        raise ValueError(
            f"policy={shown(saved.policy)} has its pool in a folder of the machine that wrote the file: pass policy="
        )
    policy = parse_policy(given or saved.policy)
    if given is None and getattr(policy.sparse, "patterns", None) is not None:
        raise ValueError(
            f"policy={shown(saved.policy)} has its patterns in a file of the machine that wrote it: pass policy="
        )
    return policy


def _refuse(there: dict[str, Any], here: dict[str, Any]) -> None:
    if found := first_difference(there, here):
        raise ValueError(found)


def _fill(cache: BoundedCache, saved: Saved, tensors: Mapping[str, Tensor], where: str) -> None:
    """Check the tensors against the record, then take them. Errors as in ``load_cache``."""
    ctx = cache.context
    spec, dtype = ctx.spec, DTYPES[saved.dtype]
    if len(saved.layers) != len(cache.bounded):
        raise ValueError(f"layers: {len(saved.layers)} in the file, {len(cache.bounded)} here")
    if len({counts.get("seen") for counts in saved.layers}) != 1:
        raise ValueError("layers have seen different numbers of tokens")
    with blaming("counters", ValueError):
        check(counters := made(CacheCounters, saved.counters, "counter", whole=True))
    # Tensors by layer: "layers.3.keys" is held[3]["keys"]. A number of many digits is no layer.
    held: list[dict[str, Tensor]] = [{} for _ in saved.layers]
    for name, tensor in tensors.items():
        layer = re.fullmatch(r"layers\.(0|[1-9]\d{0,5})\.(.+)", name)
        if layer and int(layer[1]) < len(held):
            held[int(layer[1])][layer[2]] = tensor
        elif name not in (REREAD, HIDDEN) and not name.startswith(STATES):
            raise ValueError(f"{shown(name)}: no such tensor")
    states = _states(ctx, tensors, dtype, seen=bool(saved.layers[0]["seen"]))
    # First pass: every layer is checked against shapes that take no memory ([B, H, 0, D] on no device).
    for number, (rows, counts) in enumerate(zip(cache.bounded, saved.layers, strict=True)):
        with blaming(f"layers.{number}", ValueError):
            _check_counts(rows, counts, ctx.policy.keeps_everything)
            rows.measure(*spec.layers[number].empty(dtype, "meta"))
            _check_layout(rows, counts, held[number], ctx, spec.layers[number])
            _check_values(rows, counts, held[number])
    reread = _reread(ctx.schedule, tensors.get(REREAD))
    hidden = tensors.get(HIDDEN)
    if ctx.policy.needs_logits and saved.layers[0]["seen"]:
        _check_tensor(HIDDEN, hidden, (dtype,), (1, 1, text_config(ctx.model).hidden_size))
    elif hidden is not None:
        raise ValueError(f"{HIDDEN}: no such tensor")
    # Second pass: all is known to fit together, so buffers are made and filled.
    try:
        torch.empty(_room(cache.bounded, saved.layers), dtype=torch.uint8, device=ctx.model.device)
    except RuntimeError as error:  # of this machine, not of the file
        budget, chunk = (saved.settings[name] for name in ("budget", "chunk"))
        raise OSError(f"{where}: budget={budget}, chunk={chunk} do not fit into memory: {first_line(error)}") from error
    for number, (rows, counts) in enumerate(zip(cache.bounded, saved.layers, strict=True)):
        mine = held[number]
        # Rows in the model's dtype; scores are float32 whatever the dtype is.
        wide = {n: x.to(ctx.model.dtype) if x.dtype == dtype and n != "scores" else x for n, x in mine.items()}
        k_BH0D, v_BH0D = spec.layers[number].empty(ctx.model.dtype, ctx.model.device)
        rows.restore(counts, wide, k_BH0D, v_BH0D)
        if rows.store is not None:
            rows.store.restore(wide, k_BH0D, v_BH0D)
    vars(cache.counters).update(vars(counters))
    if cache.states is not None:
        cache.states.fill(states, ctx.model.device)
    cache.reread_positions = reread
    cache.pin_all(saved.pins)
    if hidden is not None:
        cache.last_hidden = hidden.to(ctx.model.device, ctx.model.dtype, copy=True)


def _states(ctx: Context, tensors: Mapping[str, Tensor], dtype: torch.dtype, *, seen: bool) -> dict[str, Tensor]:
    """The states of layers that are no attention, each as the backbone has it. Raises ValueError for others."""
    found = {name: tensor for name, tensor in tensors.items() if name.startswith(STATES)}
    sizes = {size.name: size for size in ctx.spec.state_sizes} if seen else {}
    for name, size in sizes.items():
        _check_tensor(name, found.get(name), (size.dtype or dtype,), size.shape)
        if not found[name].isfinite().all():
            raise ValueError(f"{name} must be finite")
    if extra := found.keys() - sizes.keys():
        raise ValueError(f"{shown(min(extra))}: no such tensor")
    return {
        name: tensor if sizes[name].dtype is not None else tensor.to(ctx.model.dtype) for name, tensor in found.items()
    }


def _room(layers: Sequence[BoundedLayer], stated: Sequence[Mapping[str, float]]) -> int:
    """Bytes of the rows' buffers, about: those of layers that are full."""
    full = [
        rows.exported({**counts, "rows": rows.capacity}, [], 0).values() if counts["seen"] else ()
        for rows, counts in zip(layers, stated, strict=True)
    ]
    return sum(prod(shape) * dtype.itemsize for layer in full for dtype, shape in layer)


def _reread(schedule: Schedule, stored: Tensor | None) -> list[int]:
    """The positions that are read again, of the prompt, ascending; the tail's are the last of them."""
    if stored is None:
        return []
    if stored.dtype != torch.int32 or stored.dim() != 1:
        raise ValueError(f"{REREAD} must be one axis of int32")
    total = schedule.prompt_length or 0
    _check_ascending(REREAD, stored, 0, total)
    found, tail = stored.tolist(), list(range(schedule.body or 0, total))
    if found[len(found) - len(tail) :] != tail:
        raise ValueError(f"{REREAD} must end with the prompt's last {len(tail)} tokens")
    return found


def _check_ascending(name: str, x: Tensor, low: int, end: int, first: Tensor | None = None) -> None:
    """Raise ValueError unless numbers are from ``low`` to ``end - 1`` and grow along the last axis, but for those at ``first``,
    where another head begins."""
    if x.numel() and not (low <= x.min() and x.max() < end):
        raise ValueError(f"{name} must be from {low} to {end - 1}")
    # Ragged rows lie head after head: where the next head begins, positions start again.
    falls = x[..., 1:] <= x[..., :-1]
    if first is not None:
        falls[first[(first > 0) & (first < len(x))] - 1] = False
    if falls.any():
        raise ValueError(f"{name} must be ascending")


def _check_counts(rows: BoundedLayer, counts: Mapping[str, float], keeps_everything: bool) -> None:
    """Raise ValueError for counts that no such layer has."""
    # The layer is empty yet, so its own counts are the names that there must be.
    known = rows.export()[0]
    for name in known:
        value = counts.get(name)
        whole = name != "scaling"
        if whole and not (type(value) is int and 0 <= value <= INT32_MAX):
            raise ValueError(f"{name}={shown(value)} must be an integer, at least 0 and at most {INT32_MAX}")
        if not whole and not (isinstance(value, int | float) and 0 < value < 2**31):
            raise ValueError(f"{name}={shown(value)} must be a number above 0")
    if extra := counts.keys() - known.keys():
        raise ValueError(f"{shown(min(extra))}: no such count")
    seen = int(counts["seen"])
    most = {"rows": seen if keeps_everything else min(seen, rows.capacity), "since_eviction": seen, "evictions": seen}
    most |= {name: min(seen, limit) for name, limit in rows.codec.limits().items()}
    for name, limit in most.items():
        if counts[name] > limit:
            raise ValueError(f"{name}={counts[name]} must be at most {limit}")
    if seen and not counts["rows"]:
        raise ValueError("rows=0 must be at least 1")


def _check_layout(
    rows: BoundedLayer, counts: Mapping[str, float], held: Mapping[str, Tensor], ctx: Context, layer: AttentionLayer
) -> None:
    """Raise ValueError where a tensor is missing, has another dtype or shape, or is one too many."""
    lengths: Sequence[int] = []
    if rows.layout.ragged and counts["seen"]:
        stored = held.get("lengths")
        if stored is None or stored.dtype != torch.int64 or tuple(stored.shape) != (rows.layout.H,):
            raise ValueError(f"lengths: must be {rows.layout.H} numbers of int64")
        # Heads may differ, their sum may not.
        if not ((stored >= 0) & (stored <= counts["seen"])).all() or stored.sum() != rows.layout.H * counts["rows"]:
            raise ValueError(
                f"lengths={shown(stored.tolist())} must be at least 0 and make {counts['rows']} rows per head"
            )
        lengths = stored.tolist()
    layout = rows.exported(counts, lengths, layer.n_heads) if counts["seen"] else {}
    if rows.store is not None and layout:
        like = torch.empty(1, rows.layout.H, 0, rows.codec.key_size, dtype=rows.dtype, device="meta")
        layout |= rows.store.layout(held, like, int(counts["seen"]))
    for name, (dtype, shape) in layout.items():
        _check_tensor(name, held.get(name), (dtype,), shape)
    # A score names the axes of its state by letters; one that is not known here takes the size that it has first.
    sizes = {"B": 1, "H": rows.layout.H, "Q": layer.n_heads, "D": rows.codec.key_size}
    kinds = rows.dtype, torch.promote_types(rows.dtype, torch.float32), torch.float32
    memory = ctx.policy.score.memory(int(counts["seen"])) if rows.window is None else {}
    for name, axes in memory.items():
        tensor, wanted = held.get(STATE + name), axes.removesuffix("?")
        if tensor is not None and tensor.dim() == len(wanted):
            sizes |= {axis: size for axis, size in zip(wanted, tensor.shape, strict=True) if axis not in sizes}
        if tensor is not None or wanted == axes:
            _check_tensor(STATE + name, tensor, kinds, tuple(sizes.get(axis, 0) for axis in wanted))
    if extra := held.keys() - layout.keys() - {STATE + name for name in memory}:
        raise ValueError(f"{shown(min(extra))}: no such tensor")


def _check_tensor(name: str, tensor: Tensor | None, kinds: tuple[torch.dtype, ...], shape: tuple[int, ...]) -> None:
    if tensor is None:
        raise ValueError(f"{name}: missing")
    if tensor.dtype not in kinds or tuple(tensor.shape) != shape:
        there = f"{tensor.dtype} {tuple(tensor.shape)}"
        raise ValueError(f"{shown(name)}: {there} in the file, must be {kinds[0]} {shape}")


def _check_values(rows: BoundedLayer, counts: Mapping[str, float], held: Mapping[str, Tensor]) -> None:
    """Raise ValueError for values that no such layer has, or that would be read out of bounds."""
    if not held:
        return
    ends = held["lengths"].cumsum(0) if rows.layout.ragged else None
    _check_ascending("positions", held["positions"], 0, int(counts["seen"]), ends)
    for name in FINITE:
        if name in held and not held[name].isfinite().all():
            raise ValueError(f"{name} must be finite")
    if rows.store is not None:
        rows.store.check(held, torch.empty(0, rows.codec.key_size, dtype=rows.dtype, device="meta"))
    rows.codec.check(held, counts)
