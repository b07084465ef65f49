"""A bound cache as a file: everything that it needs to continue exactly, and everything that must match there.

Identity is by content: the backbone by its configuration and a fingerprint of its weights, retaining heads by theirs, the
rotation by the frequencies that were chosen. A file is refused if a part differs from the model or heads at hand. The
error names the first difference.
"""

from __future__ import annotations

import re
import time
from calendar import timegm
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from locret_kernels.provenance import versions

from ..backbones.identity import NAMES, fingerprint, first_difference, identity_of
from ..backbones.wrapped import unwrapped
from ..heads import RetainingHeads
from ..naming import prefixed_errors
from ..policies import Policy
from ..policies.capabilities import refuse
from ..policies.grammar import parse_policy, parts_of
from ..policies.registry import parts_named
from ..validation import build, display
from . import file
from .bounded import BoundedCache
from .context import Context
from .restore import CREATED, DTYPES, HIDDEN, REREAD, Saved, fill, shape_in_file
from .storage.exports import export_rows

APART = "document."
"""Prefix of the tensors that are not the cache's."""


@dataclass(frozen=True)
class Origin:
    """Model and heads that a cache was computed with, by content. Building it reads all weights of the heads."""

    model: dict[str, object]
    heads: str | None

    @classmethod
    def of(cls, model: PreTrainedModel, heads: RetainingHeads | None) -> Origin:
        """Of a backbone and retaining heads."""
        return cls(identity_of(model), None if heads is None else heads.fingerprint)

    def scored(self, *, by_heads: bool) -> Origin:
        """Of a cache, which may be scored without the heads."""
        return self if by_heads else replace(self, heads=None)


@dataclass(frozen=True)
class CacheFile:
    """A cache as a file holds it.

    Attributes:
        saved: its record. tensors: the cache's. apart: those that are not the cache's; their names begin with ``APART``.
        path: of the file that was read. digest: of its content; both are empty before there is a file.
    """

    saved: Saved
    tensors: Mapping[str, Tensor]
    apart: Mapping[str, Tensor]
    path: str = ""
    digest: str = ""

    @classmethod
    def of(
        cls, cache: BoundedCache, origin: Origin | None = None, *, document: file.Record | None = None,
        apart: Mapping[str, Tensor] | None = None,
    ) -> CacheFile:  # fmt: skip
        """A cache with its tensors in logical order and of their exported shape. They may share its memory.

        Args:
            origin: where it is known. document: further fields of the record; plain JSON values. apart: further tensors.

        Raises:
            ValueError: an interrupt left rows half written, the policy cannot be written in the grammar, or the cache has stages
                besides it.
        """
        cache.state.refuse_interrupted()
        ctx = cache.context
        if ctx.policy.keeps_everything and ctx.settings.kv_bits is not None and cache.schedule.prompt_length is None:
            raise ValueError(
                f"policy={cache.policy.name!r} in {ctx.settings.kv_bits} bits is saved with a prompt_length= alone"
            )
        refuse("file", ctx.subject)
        try:
            parts = parts_of(cache.policy)
        except KeyError as error:
            raise ValueError(
                f"policy={cache.policy.name!r} has a part that is not registered, so no file can name it"
            ) from error
        # Counts go into the record, rows into the body: "layers.0.keys" and so on.
        tensors: dict[str, Tensor] = {}
        layers, own = [], len(replace(ctx.policy, evidence=False).statistics - {"count"})
        for number, rows in enumerate(cache.bounded):
            counts, held = export_rows(rows)
            # What is summed up for a search of passages, the last statistic of each group, ends with its answer.
            if "stats" in held:
                held["stats"] = held["stats"].unflatten(0, (1 + ctx.group, -1))[:, :own].flatten(0, 1)
            if not own:
                held.pop("stats", None)
            held = {name: x.view(shape_in_file(rows, name, x.shape)) for name, x in held.items()}
            held |= {} if rows.store is None else rows.store.export()
            layers.append(counts)
            tensors |= {f"layers.{number}.{name}": tensor for name, tensor in held.items()}
        if cache.state.states is not None and cache.get_seq_length():
            tensors |= cache.state.states.tensors()
        if cache.state.last_hidden is not None:
            tensors[HIDDEN] = cache.state.last_hidden
        if cache.reread_positions:
            tensors[REREAD] = torch.tensor(cache.reread_positions, dtype=torch.int32, device="cpu")
        # By content: names are written for people, fingerprints decide.
        known = (origin or Origin.of(ctx.model, cache.heads)).scored(by_heads=cache.heads is not None)
        saved = Saved(
            version=file.VERSION, kit=versions("locret_kit")["locret_kit"], created=time.strftime(CREATED, time.gmtime()),
            model=known.model, heads=known.heads, policy=cache.policy.name, parts=parts, pool=_pool(cache.policy),
            settings=cache.settings.portable, ropes=rotations(ctx), dtype=str(ctx.model.dtype).removeprefix("torch."),
            batch=1, prompt_length=cache.schedule.prompt_length, counters=asdict(cache.counters), layers=layers,
            pins=[list(pin) for pin in cache.pins], document=document,
        )  # fmt: skip
        return cls(saved, tensors, apart or {})

    @classmethod
    def read(cls, path: str | Path) -> CacheFile:
        """A file, whole. Raises OSError: there is no such file. ValueError: it is damaged, or of a later version."""
        record, tensors, digest = file.read(Path(path))
        saved = cls._saved(record, path)
        apart = {name: tensors.pop(name) for name in [*tensors] if name.startswith(APART)}
        return cls(saved, tensors, apart, str(path), digest)

    @classmethod
    def read_record(cls, path: str | Path) -> CacheFile:
        """A file without its tensors. Errors as ``read``, but the digest is not compared."""
        record = file.read_record(Path(path))
        digest = str(record.pop("digest", ""))
        return cls(cls._saved(record, path), {}, {}, str(path), digest)

    @staticmethod
    def _saved(record: file.Record, path: str | Path) -> Saved:
        with prefixed_errors(str(path), ValueError, TypeError):
            return build(Saved, record, "field", whole=True)

    @staticmethod
    def origin(model: PreTrainedModel, heads: RetainingHeads | None) -> Origin:
        """Origin of the files of this model and these heads. It reads all weights of the heads: a server asks once."""
        return Origin.of(model, heads)

    @property
    def nbytes(self) -> int:
        """Bytes that the file takes, about."""
        tensors = (*self.tensors.values(), *self.apart.values())
        return sum(tensor.nbytes for tensor in tensors) + file.header_bytes(asdict(self.saved), len(tensors))

    @property
    def created(self) -> int:
        """Time of writing, in whole seconds since 1970."""
        return timegm(time.strptime(self.saved.created, CREATED))

    def write(self, path: str | Path, check: Callable[[], object] | None = None) -> str:
        """Write the file and return its digest. ``check`` runs before the file gets its name. Raises OSError, ValueError."""
        return file.write(Path(path), asdict(self.saved), {**self.tensors, **self.apart}, check)

    def check_origin(self, origin: Origin, **more: object) -> None:
        """Raise ValueError where it is not of this model and these heads; ``more``: further fields of the record."""
        # The same model under another name or revision is the same: those two are for people.
        names = {name: self.saved.model.get(name) for name in NAMES}
        self._check(model=origin.model | names, **more, heads=origin.heads)

    def _check(self, **here: object) -> None:
        _refuse({name: getattr(self.saved, name) for name in here}, here)

    def check_settings(self, here: Mapping[str, object]) -> None:
        """Raise ValueError where a run setting is not as ``here``."""
        settings = self.saved.resolved.portable
        _refuse({name: settings[name] for name in here}, dict(here))

    def restore(
        self, model: PreTrainedModel, heads: RetainingHeads | str | Path | None = None, policy: str | Policy | None = None, *,
        force: bool = False, origin: Origin | None = None,
    ) -> BoundedCache:  # fmt: skip
        """The cache, checked before it is allocated. ``load_cache`` describes arguments and errors. ``origin``: if known."""
        model, saved = unwrapped(model), self.saved
        with prefixed_errors(self.path, ValueError):
            # Nothing is allocated yet.
            cache = BoundedCache(saved.resolved, _policy(saved, policy), heads, prompt_length=saved.prompt_length)
            known = (origin or Origin.of(model, cache.heads)).scored(by_heads=cache.heads is not None)
            self.check_origin(known, parts=parts_of(cache.policy))
            self._check(pool=_pool(cache.policy))
            # Frequencies are chosen by the prompt's length, so they are known once the cache is bound.
            cache.bind(model)
            self._check(ropes=rotations(cache.context))
            self._check(settings=cache.settings.portable | {"backend": saved.settings["backend"]})
            # A narrower dtype fits a wider one without a change; the other way would round rows that were never rounded.
            stored, wanted = DTYPES[saved.dtype], model.dtype
            wider = torch.promote_types(stored, wanted) == wanted
            if stored != wanted and not (force and wider):
                raise ValueError(
                    f"dtype: {saved.dtype} in the file, {str(wanted).removeprefix('torch.')} here"
                    + (": --force takes rows of a narrower dtype as they are" if wider else "")
                )
            fill(cache, saved, self.tensors, self.path)
        return cache


def save_cache(cache: BoundedCache, path: str | Path) -> str:
    """Write a cache to one ``.safetensors`` file; returns the digest of the file.

    The file has the kept rows, and fingerprints of model, heads and policy. It has no text: a ``Document`` saves that too.

    Raises:
        ValueError: an interrupt left rows half written, the policy cannot be written in the grammar, or the cache has stages
            besides it.
        OSError: the file cannot be written; the one that was there is whole.
    """
    return CacheFile.of(cache).write(path)


def _pool(policy: Policy) -> str | None:
    weights: nn.Module | None = getattr(policy.merge, "weights", None)
    return None if weights is None else fingerprint(weights.parameters())


def rotations(ctx: Context) -> list[dict[str, object]] | None:
    """The frequencies (radians per token) that were chosen, their factor, and the layers that share them. None where the
    backbone rotates."""
    if ctx.ropes is None:
        return None
    # Layers that share a rotation share the object: Gemma-3 has two of them.
    made = []
    for rope in {id(rope): rope for rope in ctx.ropes}.values():
        layers = [layer for layer, own in enumerate(ctx.ropes) if own is rope]
        made.append({"layers": layers, "scaling": float(rope.scaling), "inv_freq": rope.inv_freq.float().tolist()})
    return made


def load_cache(
    path: str | Path,
    model: PreTrainedModel,
    heads: RetainingHeads | str | Path | None = None,
    policy: str | Policy | None = None,
    *,
    force: bool = False,
) -> BoundedCache:
    """The cache that ``save_cache`` wrote, on the device of ``model``. It continues where the saved one ended.

    Args:
        model: the backbone that the cache was made with; weights are compared.
        heads: the heads that the cache was made with, if its policy scores with heads.
        policy: the cache's policy. Default: that in the file. Give it if it reads a folder or file (trained weights of
            merging, patterns of ``minference``), or belongs to a plugin that is not loaded.
        force: accept rows of a narrower dtype than the model's.

    Raises:
        OSError: there is no such file, or no memory for the cache. ValueError: the file is damaged, or differs from the
            model or heads; names the first difference.
    """
    return CacheFile.read(path).restore(model, heads, policy, force=force)


def _policy(saved: Saved, given: str | Policy | None) -> Policy:
    if isinstance(given, Policy):
        return given
    # Such a part says a path in the grammar, which means nothing on another machine.
    pools = {name for name, kind in parts_named("merge").items() if hasattr(kind, "weights")}
    if given is None and (saved.pool is not None or pools.intersection(re.findall(r"[\w-]+", saved.policy))):
        raise ValueError(
            f"policy={display(saved.policy)} has its pool in a folder of the machine that wrote the file: pass policy="
        )
    policy = parse_policy(given or saved.policy)
    if given is None and getattr(policy.sparse, "patterns", None) is not None:
        raise ValueError(
            f"policy={display(saved.policy)} has its patterns in a file of the machine that wrote it: pass policy="
        )
    return policy


def _refuse(there: dict[str, object], here: dict[str, object]) -> None:
    if found := first_difference(there, here):
        raise ValueError(found)
