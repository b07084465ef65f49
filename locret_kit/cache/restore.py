"""The record of a saved cache, and a cache filled with the tensors of a file, whose digest is right.

Dtypes and shapes are checked, and the numbers that index.
"""

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import torch
from annotated_types import Interval
from torch import Tensor

from ..backbones.spec import AttentionLayer, text_config
from ..naming import first_line, prefixed_errors
from ..settings import Count, Resolved
from ..validation import build, display, validate, validate_fields
from .bounded import BoundedCache
from .context import CacheCounters, Context
from .due import Schedule
from .pins import pins_of
from .storage.exports import STATE, exported_shapes, restore_rows, set_counts
from .storage.rows import BoundedLayer

CREATED = "%Y-%m-%dT%H:%M:%SZ"
MOST_PINS = 1024
"""Ranges of pinned positions in a file: each costs a pass over the rows."""
Scaling = Annotated[float, Interval(gt=0, lt=2**31)]
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
REREAD = "reread_positions"
"""Name of the tensor of positions that are read again; absent where none are."""
HIDDEN = "last_hidden"
Expected = dict[str, tuple[tuple[torch.dtype, ...], tuple[int, ...]]]
"""Tensors by name: their allowed dtypes, and the shape."""


@dataclass(frozen=True, kw_only=True)
class Saved:
    """The record of a saved cache, besides its tensors.

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
    """Fingerprint of the weights of a merging policy."""
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
    """Further fields about the text that was read, see ``documents``."""

    def __post_init__(self) -> None:
        # Anybody may have written the file: every field is checked before one is used.
        validate_fields(self)
        with prefixed_errors("created", ValueError):
            time.strptime(self.created, CREATED)
        if len(self.pins) > MOST_PINS or any(len(pin) != 2 for pin in self.pins):
            raise ValueError(f"pins: {len(self.pins)} ranges must be pairs of start and end, at most {MOST_PINS}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype={display(self.dtype)} must be one of: {', '.join(DTYPES)}")

    @property
    def resolved(self) -> Resolved:
        """The run settings; the backend is chosen anew."""
        own = {name: value for name, value in self.settings.items() if name != "store_bits"}
        with prefixed_errors("settings", ValueError):
            return replace(build(Resolved, own, whole=True), backend=None)


def fill(cache: BoundedCache, saved: Saved, tensors: Mapping[str, Tensor], where: str) -> None:
    """Check dtype and shape of the tensors against the record, then take them. Raises ValueError at the first difference."""
    first = (saved.prompt_length or 0) - tensors[REREAD].numel() if REREAD in tensors else 0
    ctx = replace(cache.context, first=first)
    spec, dtype, seen = ctx.spec, DTYPES[saved.dtype], {counts.get("seen") for counts in saved.layers}
    if len(saved.layers) != len(cache.bounded):
        raise ValueError(f"layers: {len(saved.layers)} in the file, {len(cache.bounded)} here")
    # As after an interrupt: such a cache is refused when it is saved, so a file that says it is not ours.
    if len(seen) != 1:
        raise ValueError("layers have seen different numbers of tokens")
    with prefixed_errors("counters", ValueError):
        validate_fields(counters := build(CacheCounters, saved.counters, "counter", whole=True))
    if any(name.endswith(".key_scale") for name in tensors):  # until version 0.1
        raise ValueError("kv_bits=8: its 8-bit floats are no longer read: read the text again, and save it anew")
    # Tensors by layer: "layers.3.keys" is held[3]["keys"]. A number of many digits is no layer.
    held: list[dict[str, Tensor]] = [{} for _ in saved.layers]
    for name, tensor in tensors.items():
        layer = re.fullmatch(r"layers\.(0|[1-9]\d{0,5})\.(.+)", name)
        if layer and int(layer[1]) < len(held):
            held[int(layer[1])][layer[2]] = tensor
    # First pass: every layer is checked against shapes that take no memory ([1, H, 0, D] on no device).
    expected: Expected = {}
    for number, (rows, counts) in enumerate(zip(cache.bounded, saved.layers, strict=True)):
        with prefixed_errors(f"layers.{number}", ValueError):
            _check_counts(rows, counts, ctx.policy.keeps_everything)
            set_counts(rows, counts)
            rows.measure(*spec.layers[number].empty(dtype, "meta"))
            if rows.grows:
                rows.layout.capacity = max(rows.capacity, rows.codec.room(held[number]))
            if rows.seen:
                found = _expected(rows, held[number], ctx, spec.layers[number])
                expected |= {f"layers.{number}.{name}": form for name, form in found.items()}
    if any(seen):
        expected |= {size.name: ((size.dtype or dtype,), size.shape) for size in spec.state_sizes}
        if ctx.policy.score.needs_logits:
            expected[HIDDEN] = (dtype,), (1, 1, text_config(ctx.model).hidden_size)
    if REREAD in tensors:
        expected[REREAD] = (torch.int32,), (tensors[REREAD].numel(),)
    _check_tensors(tensors, expected)
    for number, rows in enumerate(cache.bounded):
        with prefixed_errors(f"layers.{number}", ValueError):
            _check_indices(rows, held[number])
    reread = _reread(ctx.schedule, tensors.get(REREAD))
    # Second pass: all is known to fit together, so buffers are made and filled.
    sized = zip(cache.bounded, spec.layers, strict=True)
    try:
        room = sum(rows.planned_bytes(layer.n_heads) for rows, layer in sized if rows.seen)
        torch.empty(room, dtype=torch.uint8, device=ctx.model.device)
    except RuntimeError as error:  # of this machine, not of the file
        budget, chunk = (saved.settings[name] for name in ("budget", "chunk"))
        raise OSError(f"{where}: budget={budget}, chunk={chunk} do not fit into memory: {first_line(error)}") from error
    devices = ctx.description.devices(ctx.model)
    for number, (rows, counts) in enumerate(zip(cache.bounded, saved.layers, strict=True)):
        shapes = exported_shapes(rows, spec.layers[number].n_heads)
        mine = {n: x.view(shapes[n][1]) if n in shapes else x for n, x in held[number].items()}
        # Rows in the model's dtype; scores are float32 whatever the dtype is.
        wide = {n: x.to(ctx.model.dtype) if x.dtype == dtype and n != "scores" else x for n, x in mine.items()}
        k_1H0D, v_1H0D = spec.layers[number].empty(ctx.model.dtype, devices[number])
        restore_rows(rows, counts, wide, k_1H0D, v_1H0D)
        if rows.store is not None:
            rows.store.restore(wide, k_1H0D, v_1H0D)
    cache.state.set_counters(counters)
    if cache.state.states is not None:
        kinds = {size.name: size.dtype or ctx.model.dtype for size in spec.state_sizes if size.name in tensors}
        cache.state.states.fill({name: tensors[name].to(kind) for name, kind in kinds.items()}, ctx.model.device)
    cache.state.reread_positions = reread
    cache.state.set_pins(pins_of((start, end) for start, end in saved.pins))
    if HIDDEN in tensors:
        cache.state.last_hidden = tensors[HIDDEN].to(ctx.model.device, ctx.model.dtype, copy=True)


def _reread(schedule: Schedule, stored: Tensor | None) -> list[int]:
    """Positions of the prompt that are read again, ascending, from a tensor of shape [N]. The tail's are the last of
    them."""
    if stored is None:
        return []
    total = schedule.prompt_length or 0
    found, tail = stored.tolist(), list(range(schedule.body or 0, total))
    if found != sorted(set(found)) or not all(0 <= position < total for position in found):
        raise ValueError(f"{REREAD} must be from 0 to {total - 1}, ascending")
    if found[len(found) - len(tail) :] != tail:
        raise ValueError(f"{REREAD} must end with the prompt's last {len(tail)} tokens")
    return found


def _check_counts(rows: BoundedLayer, counts: Mapping[str, float], keeps_everything: bool) -> None:
    """Raise ValueError for counts that no such layer has."""
    for name in (*rows.counts(), *counts):
        if name not in rows.counts():
            raise ValueError(f"{display(name)}: no such count")
        validate(name, Scaling if name == "scaling" else Count, counts.get(name))
    seen = int(counts["seen"])
    most = {"rows": seen if keeps_everything else min(seen, rows.capacity), "since_eviction": seen, "evictions": seen}
    for name, limit in most.items():
        if counts[name] > limit:
            raise ValueError(f"{name}={counts[name]} must be at most {limit}")


def _expected(rows: BoundedLayer, held: Mapping[str, Tensor], ctx: Context, layer: AttentionLayer) -> Expected:
    """Dtype and shape of a layer's tensors. Raises ValueError for an impossible store of blocks."""
    shapes = exported_shapes(rows, layer.n_heads).items()
    layout = {name: (dtype, shape_in_file(rows, name, shape)) for name, (dtype, shape) in shapes}
    if rows.store is not None:
        like = torch.empty(1, rows.layout.H, 0, rows.codec.key_size, dtype=rows.dtype, device="meta")
        layout |= rows.store.layout(held, like, rows.seen)
    found: Expected = {name: ((dtype,), shape) for name, (dtype, shape) in layout.items()}
    # A score names the axes of its state by letters; one that is not known here takes the size that it has first.
    sizes = {"B": 1, "H": rows.layout.H, "Q": layer.n_heads, "D": rows.codec.key_size}
    kinds = rows.dtype, torch.promote_types(rows.dtype, torch.float32), torch.float32
    memory = ctx.policy.score.memory(rows.seen - ctx.first) if rows.window is None else {}
    for name, axes in memory.items():
        tensor, wanted = held.get(STATE + name), axes.removesuffix("?")
        if tensor is not None and tensor.dim() == len(wanted):
            sizes |= {axis: size for axis, size in zip(wanted, tensor.shape, strict=True) if axis not in sizes}
        if tensor is not None or wanted == axes:
            found[STATE + name] = kinds, tuple(sizes.get(axis, 0) for axis in wanted)
    return found


def shape_in_file(rows: BoundedLayer, name: str, shape: Sequence[int]) -> tuple[int, ...]:
    """Shape of a layer's tensor in a file, which has an axis of one text unless the rows of all heads lie end to end."""
    if name.startswith(STATE) or (rows.layout.ragged and name != "queries"):
        return tuple(shape)
    axis = int(name == "stats")
    return *shape[:axis], 1, *shape[axis:]


def _check_tensors(tensors: Mapping[str, Tensor], expected: Expected) -> None:
    """Raise ValueError where a tensor is missing, has another dtype or shape, or is one too many."""
    for name in sorted(tensors.keys() | expected.keys()):
        tensor, (kinds, shape) = tensors.get(name), expected.get(name, ((), ()))
        if tensor is None or not kinds:
            raise ValueError(f"{display(name)}: {'missing' if tensor is None else 'no such tensor'}")
        if tensor.dtype not in kinds or tuple(tensor.shape) != shape:
            there = f"{tensor.dtype} {tuple(tensor.shape)}"
            raise ValueError(f"{display(name)}: {there} in the file, must be {kinds[0]} {shape}")


def _check_indices(rows: BoundedLayer, held: Mapping[str, Tensor]) -> None:
    """Raise ValueError for indices out of bounds: positions, lengths ``[H]`` and the codec's. All other numbers
    are the file's own."""
    positions, lengths = held.get("positions"), held.get("lengths")
    if positions is not None and positions.numel() and not (positions.min() >= 0 and positions.max() < rows.seen):
        raise ValueError(f"positions must be from 0 to {rows.seen - 1}")
    if lengths is not None:  # heads may differ, their sum may not
        total = len(lengths) * rows.rows
        if not ((lengths >= 0) & (lengths <= total)).all() or lengths.sum() != total:
            raise ValueError(
                f"lengths={display(lengths.tolist())} must be at least 0 and make {rows.rows} rows per head"
            )
    rows.codec.check(held)
