"""A cache filled with the tensors of a file, each of which is checked first: against the record, and the layers that take it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import prod

import torch
from torch import Tensor

from ..backbones.spec import AttentionLayer, text_config
from ..naming import blaming, first_line
from ..settings import INT32_MAX
from ..validation import check, made, shown
from .bounded import BoundedCache
from .context import CacheCounters, Context
from .geometry.schedule import Schedule
from .saved_record import DTYPES, Saved
from .storage.rows import BoundedLayer
from .storage.transfer import STATE, export_rows, exported_shapes, restore_rows

REREAD = "reread_positions"
"""Name of the tensor of positions that are read again; absent where none are."""
HIDDEN = "last_hidden"
STATES = "states."
"""Prefix of the tensors of layers that are no attention, see ``backbones.states``."""
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


def fill(cache: BoundedCache, saved: Saved, tensors: Mapping[str, Tensor], where: str) -> None:
    """Check the tensors against the record, then take them. Errors as in ``load_cache``."""
    ctx = cache.context
    spec, dtype = ctx.spec, DTYPES[saved.dtype]
    if len(saved.layers) != len(cache.bounded):
        raise ValueError(f"layers: {len(saved.layers)} in the file, {len(cache.bounded)} here")
    # As after an interrupt: such a cache is refused when it is saved, so a file that says it is not ours.
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
            if rows.grows:
                rows.layout.capacity = max(rows.capacity, rows.codec.room(held[number]))
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
        restore_rows(rows, counts, wide, k_BH0D, v_BH0D)
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
        exported_shapes(rows, {**counts, "rows": rows.capacity}, 0).values() if counts["seen"] else ()
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
    _check_ascending(REREAD, stored, total)
    found, tail = stored.tolist(), list(range(schedule.body or 0, total))
    if found[len(found) - len(tail) :] != tail:
        raise ValueError(f"{REREAD} must end with the prompt's last {len(tail)} tokens")
    return found


def _check_counts(rows: BoundedLayer, counts: Mapping[str, float], keeps_everything: bool) -> None:
    """Raise ValueError for counts that no such layer has."""
    # The layer is empty yet, so its own counts are the names that there must be.
    known = export_rows(rows)[0]
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


def _check_layout(
    rows: BoundedLayer, counts: Mapping[str, float], held: Mapping[str, Tensor], ctx: Context, layer: AttentionLayer
) -> None:
    """Raise ValueError where a tensor is missing, has another dtype or shape, or is one too many."""
    if rows.layout.ragged and counts["seen"]:
        stored = held.get("lengths")
        if stored is None or stored.dtype != torch.int64 or tuple(stored.shape) != (rows.layout.H,):
            raise ValueError(f"lengths: must be {rows.layout.H} numbers of int64")
        # Heads may differ, their sum may not.
        if not ((stored >= 0) & (stored <= counts["seen"])).all() or stored.sum() != rows.layout.H * counts["rows"]:
            raise ValueError(
                f"lengths={shown(stored.tolist())} must be at least 0 and make {counts['rows']} rows per head"
            )
    layout = exported_shapes(rows, counts, layer.n_heads) if counts["seen"] else {}
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


def _check_values(rows: BoundedLayer, counts: Mapping[str, float], held: Mapping[str, Tensor]) -> None:
    """Raise ValueError for values that no such layer has, or that would be read out of bounds."""
    if not held:
        return
    ends = held["lengths"].cumsum(0) if rows.layout.ragged else None
    _check_ascending("positions", held["positions"], int(counts["seen"]), ends)
    for name in FINITE:
        if name in held and not held[name].isfinite().all():
            raise ValueError(f"{name} must be finite")
    rows.codec.check(held, counts)


def _check_ascending(name: str, x: Tensor, end: int, first: Tensor | None = None) -> None:
    """Raise ValueError unless numbers are from 0 to ``end - 1`` and grow along the last axis, but for those at ``first``,
    where another head begins."""
    if x.numel() and not (x.min() >= 0 and x.max() < end):
        raise ValueError(f"{name} must be from 0 to {end - 1}")
    # Ragged rows lie head after head: where the next head begins, positions start again.
    falls = x[..., 1:] <= x[..., :-1]
    if first is not None:
        falls[first[(first > 0) & (first < len(x))] - 1] = False
    if falls.any():
        raise ValueError(f"{name} must be ascending")


def _check_tensor(name: str, tensor: Tensor | None, kinds: tuple[torch.dtype, ...], shape: tuple[int, ...]) -> None:
    if tensor is None:
        raise ValueError(f"{name}: missing")
    if tensor.dtype not in kinds or tuple(tensor.shape) != shape:
        there = f"{tensor.dtype} {tuple(tensor.shape)}"
        raise ValueError(f"{shown(name)}: {there} in the file, must be {kinds[0]} {shape}")
