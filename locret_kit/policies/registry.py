"""Names of parts and policies; packages and files of a user's bring more.

They are found when one is first asked for: in ``methods/``, one file per method, and in installed packages
(``locret_kit.registry``).
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from fractions import Fraction
from functools import cache
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from pkgutil import iter_modules
from typing import Annotated, ClassVar, TypedDict, TypeVar, cast, dataclass_transform

import torch
from annotated_types import Ge
from torch import Tensor

from ..cis import SmoothL1
from ..naming import first_line, prefixed_errors
from ..registry import Registry, load_installed
from ..validation import annotations_of
from . import WHOLE, Policy, base, methods, rounded, rounded_on_device

UNTRAINED = ("compactor", "snapkv")
"""Policies of a backbone without heads, the default first: of those that need no training, it finds most (docs/howto/choose.md),
and the other one takes any decoder and any cache."""
KINDS = ("score", "scope", "allocation", "selection", "merge", "recall", "prefill_mask", "sparse", "reread")
"""Kinds of a policy's parts, in the grammar's order. A training's losses and sources are parts too, of the kinds 'loss'
and 'source'."""
T = TypeVar("T")


class Parts(TypedDict, total=False):
    """Parts of a policy, by the names of ``Policy``'s fields."""

    score: base.Score
    scopes: tuple[base.Scope, ...]
    allocation: base.Allocation
    selection: base.Selection
    merge: base.Merge
    recall: base.Recall
    prefill_mask: base.PrefillMask
    sparse: base.Sparse
    reread: base.Reread


@dataclass(frozen=True)
class Parameter:
    """A parameter of a part or of a named policy."""

    default: object
    """``dataclasses.MISSING`` where it must be given."""
    annotations: tuple[object, ...]
    """A value must satisfy all of them."""


@dataclass(frozen=True)
class NamedPolicy:
    """A named policy: its parts, whose fields are its parameters and whose values are the defaults."""

    name: str
    source: str
    parts: Parts
    base: str
    names: Mapping[str, str | None]
    keeps: str
    keeps_everything: bool

    def parameters(self) -> dict[str, Parameter]:
        """Parameters of the policy, in the order of the parts and of their fields."""
        parameters = {"base": Parameter(self.base, (str,))} if self.base else {}
        for one in self.parts.values():
            for made in one if isinstance(one, tuple) else (one,):
                for key, parameter in parameters_of(type(made)).items():
                    if (name := self.names.get(key, key)) is not None:
                        known = parameters.get(name, Parameter(getattr(made, key), ()))
                        parameters[name] = replace(known, annotations=known.annotations + parameter.annotations)
        return parameters

    def make(self, given: Mapping[str, object], base: Policy | None = None) -> Policy:
        """The policy with the ``given`` parameters; a changed ``base`` where it has one."""

        def changed(made: object) -> object:
            assert is_dataclass(made) and not isinstance(made, type)
            names = {item.name: self.names.get(item.name, item.name) for item in fields(made)}
            return replace(made, **{key: given[name] for key, name in names.items() if name and name in given})

        given_parts = self.parts.items()
        parts = {key: tuple(map(changed, x)) if isinstance(x, tuple) else changed(x) for key, x in given_parts}
        if base is not None:
            source = self.source.replace("{base}", base.source or base.name)
            return replace(base, source=source, **cast(Parts, parts))
        return Policy(self.name, source=self.source, keeps_everything=self.keeps_everything, **cast(Parts, parts))


_parts: dict[str, Registry[type]] = {kind: Registry(kind) for kind in (*KINDS, "loss", "source")}
_policies: Registry[NamedPolicy] = Registry("policy")


@dataclass_transform(frozen_default=True)
def part(kind: str, name: str) -> Callable[[type[T]], type[T]]:
    """Class decorator: the class becomes the part ``name`` of a kind (one of ``KINDS``, 'loss': a ``cis.Loss``, or
    'source': training samples), as in
    ``score=name(...)``, and a frozen dataclass if it is none yet.

    Raises:
        ValueError: another module has the name.
    """

    def add(made: type[T]) -> type[T]:
        whole = made if "__dataclass_fields__" in made.__dict__ else dataclass(frozen=True)(made)
        _parts[kind].add(name, whole, made.__module__)
        return made

    return add


def register(
    name: str,
    source: str,
    parts: Parts,
    *,
    base: str = "",
    names: Mapping[str, str | None] | None = None,
    keeps: str = "",
    keeps_everything: bool = False,
) -> None:
    """Add a named policy. The fields of its parts are its parameters, and the given values are the defaults.

    Args:
        source: the paper, for ``--list-policies``.
        parts: by ``Policy``'s fields, ``{"score": Mine(), "scopes": (Window(),)}``.
        base: default of a parameter ``base``, another policy that ``parts`` modify. ``{base}`` in ``source`` is that
            policy's source.
        names: parameter names that differ from the part's fields, ``{"size": "window"}``; None hides a field.
        keeps: the criterion for keeping a slot, in a few words, for ``--list-policies`` and the page of policies.

    Raises:
        ValueError: another module has registered the name.
    """
    named = NamedPolicy(name, source, parts, base, names or {}, keeps, keeps_everything)
    _policies.add(name, named, sys._getframe(1).f_globals["__name__"])


part("allocation", "uniform")(base.Uniform)
part("selection", "top-k")(base.TopK)
part("loss", "smooth_l1")(SmoothL1)


@cache
def _load() -> None:
    """Import the methods, then what installed packages bring."""
    for module in iter_modules(methods.__path__):
        import_module(f"{methods.__name__}.{module.name}")
    load_installed()


def policies() -> Mapping[str, NamedPolicy]:
    """The named policies, alphabetically.

    Raises:
        ValueError: the entry point of an installed package fails; names it.
    """
    _load()
    return dict(sorted(_policies.items()))


def parts_named(kind: str) -> Mapping[str, type]:
    """The parts of a kind, alphabetically. Raises as ``policies``."""
    _load()
    return dict(sorted(_parts[kind].items()))


def parameters_of(made: type) -> dict[str, Parameter]:
    """The parameters of a part.

    Raises:
        ValueError: an annotation cannot be evaluated.
    """
    with prefixed_errors(f"annotations of {made.__module__}.{made.__qualname__}", Exception):
        annotations = annotations_of(made)
    return {
        item.name: Parameter(
            item.default if item.default_factory is MISSING else item.default_factory(), (annotations[item.name],)
        )
        for item in fields(made)
        if item.init
    }


def load_plugin(text: str) -> None:
    """Import a user's module, or a ``.py`` file, whose names then work. A second time does nothing.

    Raises:
        ValueError: it is not there, or raises; names it.
    """
    _load()  # the kit's names come first, so a plugin cannot take one
    try:
        if not text.endswith(".py"):
            import_module(text)
        elif (path := str(Path(text).resolve(strict=True))) not in sys.modules:
            spec = spec_from_file_location(path, path)
            assert spec is not None and spec.loader is not None
            sys.modules[path] = module_from_spec(spec)
            try:
                spec.loader.exec_module(sys.modules[path])
            except BaseException:
                del sys.modules[path]
                raise
    except (Exception, SystemExit) as error:
        raise ValueError(f"plugin={text!r}: {type(error).__name__}: {first_line(error)}") from error


@part("scope", "sinks")
class Sinks(base.Scope):
    """The first ``n`` tokens of the text, or a fraction of the head's slots. Source: StreamingLLM, arXiv 2309.17453."""

    n: base.Size = 4

    def reserved(self, budget: int, chunk: int, stabilizers: int) -> int:
        return base.wanted_count(self.n, budget)

    @property
    def idle(self) -> bool:
        return not self.n

    def protects(self, slots: base.Slots) -> Tensor:
        """Boolean ``[B, H, S]``: the first tokens of the text."""
        return (slots.positions < base.wanted_count(self.n, slots.keep)) & slots.valid


@part("scope", "window")
class Window(base.Scope):
    """The newest slots: ``size`` of them, or a fraction of the head's slots. Source: H2O, ScissorHands (one half)."""

    size: base.Size = 0.5

    def window(self, budget: int, chunk: int, stabilizers: int) -> int:
        return base.wanted_count(self.size, budget)

    def protects_newest(self, slots: base.Slots) -> int:
        return base.resolve_count(self.size, slots.keep)


@part("scope", "stabilizers")
class Stabilizers(base.Scope):
    """The newest slots, as many as the run says (``--stabilizers``), except at the last eviction of the prompt.
    Source: Locret, section 3.4."""

    most: base.Size = 1.0
    """Maximum number of slots, or fraction of the head's slots."""

    def window(self, budget: int, chunk: int, stabilizers: int) -> int:
        return min(stabilizers, base.resolve_count(self.most, budget))

    def protects_newest(self, slots: base.Slots) -> int:
        return min(slots.stabilizers, base.resolve_count(self.most, slots.keep))


@part("allocation", "pyramid")
class Pyramid(base.Uniform):
    """Low layers get more: layer ``l`` of ``L`` has ``w + hi - l (hi - lo) / (L - 1)`` slots, ``lo = (B - w) /
    beta`` and ``hi = 2 (B - w) - lo``, ``w`` being the protected window. A short prompt cannot fill all of ``hi``;
    the rest goes to the high layers. Numbers are rounded down, and slots missing from the sum go to the largest
    fractions. Source: PyramidKV, arXiv 2406.02069."""

    beta: Annotated[float, Ge(1)] = 20.0

    def layer_budgets(self, budget: int, layers: int, window: int, longest: int | None = None) -> list[int]:
        free = budget - window
        low = free / Fraction(self.beta)
        if longest is not None:
            low = max(low, Fraction(min(free, 2 * free - (longest - window))))
        step = Fraction(2 * (free - low)) / max(1, layers - 1)
        high = 2 * free - low if layers > 1 else Fraction(free)
        return rounded([window + high - layer * step for layer in range(layers)], layers * budget)


@part("allocation", "adaptive")
class Adaptive(base.Uniform):
    """The ``H * B`` best slots of a layer's heads together give each head ``B*_h``; it gets
    ``alpha B*_h + (1 - alpha) B``, ``alpha`` to six decimals. Source: Ada-KV, algorithms 2 and 3 (``alpha`` is its
    safeguard)."""

    alpha: base.Ratio = 0.5
    layout: ClassVar[str] = "ragged"

    def head_budgets(self, scores_BHS: Tensor, protected_BHS: Tensor, valid_BHS: Tensor, keep: int) -> Tensor:
        return shared_out(scores_BHS, protected_BHS, valid_BHS, keep, self.alpha)


@part("allocation", "mass")
class Mass(base.Uniform):
    """Every head of a layer keeps the same share of its attention, as few slots as that takes, ``H * B`` of them together:
    ``B*_h``; it gets ``alpha B*_h + (1 - alpha) B``. What counts as attention is the score's ``log_weight``, so a score that is
    none shares out alike. Source: the code of IndexMem++ (arXiv 2605.25475), which finds the share by bisection."""

    alpha: base.Ratio = 1.0
    layout: ClassVar[str] = "ragged"

    def measured(self, score: base.Score, scores_BHS: Tensor, slots: base.Slots) -> Tensor:
        weight_BHS = score.log_weight(scores_BHS).masked_fill(~slots.valid, float("-inf"))
        return weight_BHS.double().softmax(-1).nan_to_num()

    def head_budgets(self, scores_BHS: Tensor, protected_BHS: Tensor, valid_BHS: Tensor, keep: int) -> Tensor:
        place_BHS = base.rank_of(scores_BHS, protected_BHS, valid_BHS)
        sorted_BHS = torch.empty_like(scores_BHS).scatter_(-1, place_BHS, scores_BHS.masked_fill(~valid_BHS, 0.0))
        # A slot is wanted before all that stand behind a larger share of their own head.
        before_BHS = (sorted_BHS.cumsum(-1) - sorted_BHS).gather(-1, place_BHS)
        return shared_out(-before_BHS, protected_BHS, valid_BHS, keep, self.alpha)


def shared_out(scores_BHS: Tensor, protected_BHS: Tensor, valid_BHS: Tensor, keep: int, alpha: float) -> Tensor:
    """Slots ``[B, H]`` of each head, where the ``H * keep`` best slots of all heads give ``alpha`` of them, and ``keep`` for
    each the rest; ``alpha`` to six decimals."""
    B, H, S = scores_BHS.shape
    # Slot-major, so that of equal scores the newer slot is the better one, in whatever head.
    together = [x.transpose(1, 2).reshape(B, 1, S * H) for x in (scores_BHS, protected_BHS, valid_BHS)]
    place_BHS = base.rank_of(*together).view(B, S, H).transpose(1, 2)
    best_BH, held_BH = ((place_BHS < H * keep) & valid_BHS).sum(-1), valid_BHS.sum(-1)
    part = round(alpha * WHOLE)
    return rounded_on_device(part * best_BH + (WHOLE - part) * keep, held_BH, H * keep)


@dataclass(frozen=True)
class PyramidAdaptive(Adaptive, Pyramid):
    """Pyramid over layers, then adaptive over the heads of each: ``pyramid(beta)+adaptive(alpha)``.
    Source: Ada-KV, section 4 (Ada-Pyramid)."""
