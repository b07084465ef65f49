"""A bound cache as a file: everything that it needs to go on exactly, and everything that must be the same where it does.

Identity is by content: the backbone by its configuration and a fingerprint of its weights, retaining heads by theirs, the
rotation by the frequencies that were chosen. A file whose parts differ from what is at hand is refused with the first
difference in words.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from locret_kernels.provenance import versions

from ..backbones.identity import NAMES, fingerprint, first_difference, identity_of
from ..backbones.wrapped import unwrapped
from ..naming import blaming
from ..policies.grammar import parse_policy, parts_of
from ..policies.policy import Policy
from ..policies.registry import parts_named
from ..validation import shown
from .bounded import BoundedCache
from .context import Context
from .file import Record, read, write
from .filling import HIDDEN, REREAD, fill
from .saved_record import CREATED, DTYPES, MOST_PINS, Saved
from .storage.transfer import export_rows

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..heads import RetainingHeads

APART = "document."
"""Prefix of the tensors that are not the cache's."""


@dataclass(frozen=True)
class Origin:
    """Where the numbers of a cache come from, by content. To make one reads all weights of the heads: a server makes it once."""

    model: dict[str, object]
    heads: str | None

    @classmethod
    def of(cls, model: PreTrainedModel, heads: RetainingHeads | None) -> Origin:
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
        counts, held = export_rows(rows)
        held |= {} if rows.store is None else rows.store.export()
        layers.append(counts)
        tensors |= {f"layers.{number}.{name}": tensor for name, tensor in held.items()}
    if cache.states is not None and cache.get_seq_length():
        tensors |= cache.states.tensors()
    if cache.last_hidden is not None:
        tensors[HIDDEN] = cache.last_hidden
    if cache.reread_positions:
        tensors[REREAD] = torch.tensor(cache.reread_positions, dtype=torch.int32, device="cpu")
    if len(cache.pins) > MOST_PINS:
        raise ValueError(f"pins: {len(cache.pins)} ranges must be at most {MOST_PINS} in a file")
    # By content: names are written for people, fingerprints decide.
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
    weights: nn.Module | None = getattr(policy.merge, "weights", None)
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
    model: PreTrainedModel,
    heads: RetainingHeads | str | Path | None = None,
    policy: str | Policy | None = None,
    *,
    force: bool = False,
) -> BoundedCache:
    """The cache that ``save_cache`` wrote, on the device of ``model``, with the backend chosen anew.

    Args:
        heads: those that the cache was made with, where its policy scores with retaining heads.
        policy: the same policy as a value, where the grammar does not know it or it names a folder.
        force: take rows of a narrower dtype than the model's.

    Raises:
        OSError: there is no such file, or no memory for the cache. ValueError: the file is damaged, or the first difference to
            what is at hand.
    """
    record, tensors, _ = read(Path(path))
    own = {name: tensor for name, tensor in tensors.items() if not name.startswith(APART)}
    return restore(Saved.of(record, path), own, model, heads, policy, where=str(path), force=force)


def restore(
    saved: Saved,
    tensors: Mapping[str, Tensor],
    model: PreTrainedModel,
    heads: RetainingHeads | str | Path | None = None,
    policy: str | Policy | None = None,
    *,
    where: str,
    force: bool = False,
    origin: Origin | None = None,
) -> BoundedCache:
    """A cache from its record and tensors, which are checked first. Arguments and errors as in ``load_cache``;
    ``origin`` where it is known."""
    model = unwrapped(model)
    with blaming(where, ValueError):
        cache = BoundedCache(
            saved.resolved, _policy(saved, policy), heads, prompt_length=saved.prompt_length
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
        fill(cache, saved, tensors, where)
    return cache


def _policy(saved: Saved, given: str | Policy | None) -> Policy:
    if isinstance(given, Policy):
        return given
    # Such a part says a path in the grammar, which means nothing on another machine.
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


def _refuse(there: dict[str, object], here: dict[str, object]) -> None:
    if found := first_difference(there, here):
        raise ValueError(found)
