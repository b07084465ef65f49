"""A bound cache as a file: everything that it needs to go on exactly, and everything that must be the same where it does.

Identity is by content: the backbone by its configuration and a fingerprint of its weights, retaining heads by theirs, the
rotation by the frequencies that were chosen. A file whose parts differ from what is at hand is refused with the first
difference in words.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
from annotated_types import Ge, Interval
from torch import Tensor
from typing_extensions import TypedDict

from locret_kernels.provenance import versions

from ..backbones.identity import fingerprint, first_difference, identity_of
from ..naming import blaming
from ..policies.base import Policy
from ..policies.grammar import parse_policy, parts_of
from ..settings import INT32_MAX, Resolved
from ..validation import check, made
from .bounded import BoundedCache
from .context import Context
from .file import Record, read, write
from .storage.rows import STATE, BoundedLayer

if TYPE_CHECKING:
    from ..heads import RetainingHeads

Count = Annotated[int, Interval(ge=0, le=INT32_MAX)]
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Rotation(TypedDict):
    """Frequencies (radians per token) and factor of the layers that share them."""

    layers: list[int]
    scaling: float
    inv_freq: list[float]


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
    ropes: list[Rotation] | None
    dtype: str
    batch: Annotated[int, Ge(1)]
    prompt_length: Count | None
    counters: dict[str, int | float | str]
    layers: list[dict[str, int | float]]
    """Counts of each layer."""
    pins: list[list[Count]] = field(default_factory=list)
    """Positions that are never evicted: pairs of start and end."""
    reread_positions: list[Count] = field(default_factory=list)
    document: dict[str, object] | None = None
    """What was read, see ``documents``."""

    def __post_init__(self) -> None:
        check(self)
        if any(len(pin) != 2 or pin[0] >= pin[1] for pin in self.pins):
            raise ValueError(f"pins={self.pins} must be pairs of a start and an end after it")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype={self.dtype!r} must be one of: {', '.join(DTYPES)}")

    @classmethod
    def of(cls, record: Record, where: object) -> Saved:
        """The record of a file. Raises ValueError that begins with ``where``."""
        with blaming(f"{where}", ValueError, TypeError):
            return made(cls, record, "field")

    @property
    def resolved(self) -> Resolved:
        """The run settings; the backend is chosen anew."""
        return replace(made(Resolved, self.settings), backend=None)


def save(
    cache: BoundedCache, path: str | Path, document: Record | None = None, more: Mapping[str, Tensor] | None = None
) -> None:
    """Write a cache to ``path``.

    Args:
        document: further fields of the record; plain JSON values. more: further tensors.

    Raises:
        ValueError: an interrupt left rows half written, or the policy cannot be written in the grammar.
        OSError: the file cannot be written; the one that was there is whole.
    """
    record, tensors = export(cache)
    write(Path(path), {**record, "document": document}, {**tensors, **(more or {})})


def export(cache: BoundedCache) -> tuple[Record, dict[str, Tensor]]:
    """The record and the tensors of a cache, in logical order. Raises ValueError as ``save``."""
    cache.refuse_interrupted()
    ctx = cache.context
    try:
        parts = parts_of(cache.policy)
    except KeyError as error:
        raise ValueError(
            f"policy={cache.policy.name!r} has a part that is not registered, so no file can name it"
        ) from error
    tensors: dict[str, Tensor] = {}
    layers = []
    for number, rows in enumerate(cache.bounded):
        counts, held = rows.export()
        layers.append(counts)
        tensors |= {f"layers.{number}.{name}": tensor for name, tensor in held.items()}
    if cache.last_hidden is not None:
        tensors["last_hidden"] = cache.last_hidden
    record: Record = {
        "kit": versions("locret_kit")["locret_kit"],
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "model": identity_of(ctx.model),
        "heads": fingerprint(cache.heads.parameters()) if cache.heads is not None else None,
        "policy": cache.policy.name,
        "parts": parts,
        "pool": _pool(cache.policy),
        "settings": asdict(cache.settings),
        "ropes": rotations(ctx),
        "dtype": str(ctx.model.dtype).removeprefix("torch."),
        "batch": cache.bounded[0].B if cache.get_seq_length() else 1,
        "prompt_length": cache.schedule.prompt_length,
        "counters": asdict(cache.counters),
        "layers": layers,
        "pins": [list(pin) for pin in cache.pins],
        "reread_positions": list(cache.reread_positions),
    }
    return record, tensors


def _pool(policy: Policy) -> str | None:
    weights: Any = getattr(policy.merge, "weights", None)
    return None if weights is None else fingerprint(weights.parameters())


def rotations(ctx: Context) -> list[Rotation] | None:
    """The frequencies that were chosen; None where the backbone rotates."""
    if ctx.ropes is None:
        return None
    found: dict[int, Rotation] = {}
    for layer, rope in enumerate(ctx.ropes):
        new = Rotation(layers=[], scaling=float(rope.scaling), inv_freq=rope.inv_freq.float().tolist())
        found.setdefault(id(rope), new)["layers"].append(layer)
    return list(found.values())


def load(
    path: str | Path,
    model: Any,
    heads: RetainingHeads | None = None,
    policy: str | Policy | None = None,
    *,
    force: bool = False,
) -> BoundedCache:
    """The cache that ``save`` wrote, on the device of ``model``, with the backend chosen anew.

    Args:
        heads: those that the cache was made with, where its policy scores with retaining heads.
        policy: the same policy as a value, where the grammar does not know it or it names a folder.
        force: take rows of a narrower dtype than the model's.

    Raises:
        OSError: there is no such file. ValueError: it is damaged, or the first difference to what is at hand.
    """
    record, tensors = read(Path(path))
    return restore(Saved.of(record, path), tensors, model, heads, policy, where=str(path), force=force)


def restore(
    saved: Saved,
    tensors: Mapping[str, Tensor],
    model: Any,
    heads: RetainingHeads | None = None,
    policy: str | Policy | None = None,
    *,
    where: str,
    force: bool = False,
) -> BoundedCache:
    """A cache from its record and tensors, every one of which is checked first. Arguments and errors as in ``load``."""
    with blaming(where, ValueError):
        cache = BoundedCache(
            saved.resolved, _policy(saved, policy), heads, prompt_length=saved.prompt_length
        )  # nothing is allocated yet
        here: dict[str, object] = {
            "model": identity_of(model),
            "heads": fingerprint(heads.parameters()) if cache.heads is not None and heads is not None else None,
            "parts": parts_of(cache.policy),
            "pool": _pool(cache.policy),
        }
        there = {name: getattr(saved, name) for name in here}
        for name in ("name", "revision"):  # for people to read
            there["model"] = {key: value for key, value in there["model"].items() if key != name}
            here["model"] = {key: value for key, value in here["model"].items() if key != name}  # type: ignore[attr-defined]
        _refuse(there, here)
        cache.bind(model)
        _refuse({"rope": saved.ropes}, {"rope": rotations(cache.context)})
        stored, wanted = DTYPES[saved.dtype], model.dtype
        if stored != wanted and not (force and torch.promote_types(stored, wanted) == wanted):
            wider = torch.promote_types(stored, wanted) == wanted
            raise ValueError(
                f"dtype: {saved.dtype} in the file, {str(wanted).removeprefix('torch.')} here"
                + (": --force takes rows of a narrower dtype as they are" if wider else "")
            )
        _fill(cache, saved, tensors)
    return cache


def _policy(saved: Saved, given: str | Policy | None) -> Policy:
    if isinstance(given, Policy):
        return given
    if given is None and saved.pool is not None:
        raise ValueError(f"policy={saved.policy!r} names a folder on the machine that wrote the file: pass policy=")
    return parse_policy(given or saved.policy)


def _refuse(there: dict[str, Any], here: dict[str, Any]) -> None:
    if found := first_difference(there, here):
        raise ValueError(found)


def _fill(cache: BoundedCache, saved: Saved, tensors: Mapping[str, Tensor]) -> None:
    """Check the tensors against the record, then take them."""
    ctx = cache.context
    spec, B, dtype = ctx.spec, saved.batch, DTYPES[saved.dtype]
    if len(saved.layers) != len(cache.bounded):
        raise ValueError(f"layers: {len(saved.layers)} in the file, {len(cache.bounded)} here")
    meta = torch.empty(B, spec.n_kv_heads, 0, spec.head_dim, dtype=dtype, device="meta")
    seen = {counts.get("seen") for counts in saved.layers}
    if len(seen) != 1:
        raise ValueError("layers have seen different numbers of tokens")
    held: list[dict[str, Tensor]] = []
    for number, (rows, counts) in enumerate(zip(cache.bounded, saved.layers, strict=True)):
        name = f"layers.{number}."
        mine = {key.removeprefix(name): tensor for key, tensor in tensors.items() if key.startswith(name)}
        with blaming(name.rstrip("."), ValueError):
            _check_counts(rows, counts, ctx.policy.keeps_everything)
            rows.measure(meta, meta)
            _check_layout(rows, counts, mine, spec.n_heads)
            _check_values(rows, counts, mine)
        held.append(mine)
    k_BH0D = torch.empty(B, spec.n_kv_heads, 0, spec.head_dim, dtype=ctx.model.dtype, device=ctx.model.device)
    for rows, counts, mine in zip(cache.bounded, saved.layers, held, strict=True):
        wide = {n: x.to(ctx.model.dtype) if x.dtype == dtype and n != "scores" else x for n, x in mine.items()}
        rows.restore(counts, wide, k_BH0D, k_BH0D)
    vars(cache.counters).update({name: value for name, value in saved.counters.items() if name in vars(cache.counters)})
    cache.reread_positions = list(saved.reread_positions)
    for start, end in saved.pins:
        cache.pin(start, end)
    if "last_hidden" in tensors:
        cache.last_hidden = tensors["last_hidden"].to(ctx.model.device, ctx.model.dtype)


def _check_counts(rows: BoundedLayer, counts: Mapping[str, float], keeps_everything: bool) -> None:
    """Raise ValueError for counts that no such layer has."""
    for name in rows.export()[0]:
        value = counts.get(name)
        whole = name != "scaling"
        if value is None or isinstance(value, bool) or (whole and not (type(value) is int and 0 <= value <= INT32_MAX)):
            raise ValueError(f"{name}={value} must be {'an integer from 0' if whole else 'a number'}")
    if extra := counts.keys() - rows.export()[0].keys():
        raise ValueError(f"{min(extra)}: no such count")
    most = counts["seen"] if keeps_everything else min(counts["seen"], rows.capacity)
    for name in ("rows", "tail"):
        if counts.get(name, 0) > most:
            raise ValueError(f"{name}={counts[name]} must be at most {most}")


def _check_layout(
    rows: BoundedLayer, counts: Mapping[str, float], held: Mapping[str, Tensor], query_heads: int
) -> None:
    """Raise ValueError where a tensor is missing, has another dtype or shape, or is one too many."""
    lengths: Sequence[int] = []
    if rows.ragged and counts["seen"]:
        stored = held.get("lengths")
        if stored is None or stored.dtype != torch.int64 or stored.dim() != 1:
            raise ValueError("lengths: must be one axis of int64")
        lengths = stored.tolist()
        per_text = [sum(lengths[i * rows.H : (i + 1) * rows.H]) for i in range(rows.B)]
        if min(lengths, default=0) < 0 or any(total != rows.H * counts["rows"] for total in per_text):
            raise ValueError(f"lengths={lengths} must be at least 0 and make {counts['rows']} rows per head")
    layout = rows.layout(counts, lengths, query_heads) if counts["seen"] else {}
    for name, (dtype, shape) in layout.items():
        tensor = held.get(name)
        if tensor is None:
            raise ValueError(f"{name}: missing")
        if tensor.dtype != dtype or tuple(tensor.shape) != shape:
            raise ValueError(f"{name}: {tensor.dtype} {tuple(tensor.shape)} in the file, must be {dtype} {shape}")
    for name in held.keys() - layout.keys():
        if not name.startswith(STATE):
            raise ValueError(f"{name}: no such tensor")
        if not held[name].dim() or held[name].shape[0] != rows.B:
            raise ValueError(f"{name}: {tuple(held[name].shape)} must begin with the batch, {rows.B}")


def _check_values(rows: BoundedLayer, counts: Mapping[str, float], held: Mapping[str, Tensor]) -> None:
    """Raise ValueError for positions or groups that would be read out of bounds."""
    bounds = {"positions": (0, counts["seen"])}
    if "group" in held:
        bounds["group"] = (-1, held["key_step"].shape[2])
    for name, (low, end) in bounds.items() if held else ():
        tensor = held[name]
        if tensor.numel() and not (low <= tensor.min() and tensor.max() < end):
            raise ValueError(f"{name} must be from {low} to {end - 1}")
