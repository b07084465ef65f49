"""Settings of a bounded run: every choice beside the backbone, the heads and the policy. No torch.

This is the only list of their names: the cache, the schedule, plans, reports, evaluation rows and all commands take a
``RunSettings``, extend one or flatten one.

Types and bounds of settings are written once, as annotations: ``chunk: Annotated[int, Ge(1)]``. pydantic checks; it is imported
with the first check, so that reading a schema (``--help``) stays fast.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, asdict, dataclass, fields
from functools import cache
from numbers import Integral, Real
from types import UnionType
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Protocol, TypeVar, Union, get_args, get_origin
from typing import get_type_hints as hints_of

from annotated_types import Ge, Gt, Interval, Le, Lt, MinLen, Predicate

from .naming import nearest, parse_bytes

if TYPE_CHECKING:
    from pydantic import TypeAdapter

_WORDS = {int: "an integer", float: "a number", str: "a text", bool: "true or false"}
BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
_BEYOND = ("greater_than_equal", "greater_than", "less_than_equal", "less_than", "too_short")

NAME = "{name}"
"""Placeholder for the setting's name in a validator's message."""
Thoughts = Literal["evicted", "dropped", "pinned"]
"""Handling of thoughts in a bounded cache: evicted like other tokens, dropped when the turn ends, or pinned."""


class Schema(Protocol):
    """A dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Field[object]]]


S = TypeVar("S", bound=Schema)


@dataclass(frozen=True)
class Description:
    """Metadata of an annotation: a description of the allowed values. It replaces the words derived from type and
    bounds."""

    words: str


@cache
def annotations_of(schema: type[Schema]) -> dict[str, object]:
    """``{field: annotation}`` of a dataclass, bounds included."""
    hints = hints_of(schema, include_extras=True)
    return {item.name: hints[item.name] for item in fields(schema)}


def checked(name: str, annotation: object, value: object) -> object:
    """The value, checked. Integers become floats if the annotation is a float, and numpy numbers become Python's.

    Raises:
        ValueError: wrong type or out of bounds. The message has the name, the value, the allowed values and the
            nearest choice.
    """
    from pydantic import ValidationError

    if isinstance(value, Real) and not isinstance(value, bool):
        value = int(value) if isinstance(value, Integral) else float(value)
    try:
        return _adapter(annotation).validate_python(value)
    except ValueError as error:  # another one than pydantic's at an integer of more digits than Python converts
        reasons = error.errors() if isinstance(error, ValidationError) else []
    if reasons and reasons[-1]["type"] == "value_error":  # a validator's own words
        raise ValueError(str(reasons[-1]["ctx"]["error"]).replace(NAME, name))
    near = nearest(str(value), map(str, choices(annotation))) if isinstance(value, str) else ""
    beyond = any(reason["type"] in _BEYOND and not any(type(x) is int for x in reason["loc"]) for reason in reasons)
    quoted = isinstance(value, str) and _fits_as_number(annotation, value)
    said = (near and f".{near}") + (f": {value!r} is a text, not a number" if quoted else "")
    raise ValueError(f"{name}={shown(value)} must be {allowed(annotation, bounds_alone=beyond)}{said}")


def _fits_as_number(annotation: object, text: str) -> bool:
    """Whether the number that a text spells is allowed."""
    for number in (int, float):
        try:
            _adapter(annotation).validate_python(number(text))
            return True
        except ValueError:  # pydantic's too
            continue
    return False


def shown(value: object) -> str:
    """A value as a message names it: in one line, not longer than that, and nothing that moves a terminal's cursor."""
    try:
        text = " ".join(str(value).split())
    except ValueError:  # Python writes no integer of more than 4,300 digits
        text = "(an integer of thousands of digits)"
    text = text if len(text) <= 100 else f"{text[:60]}..."
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


@cache
def _adapter(annotation: object) -> TypeAdapter[object]:
    from pydantic import ConfigDict, TypeAdapter

    made: type[object] = annotation  # type: ignore[assignment]
    return TypeAdapter(made, config=ConfigDict(allow_inf_nan=False, strict=True))


def check(settings: Schema) -> None:
    """Check every field of a frozen dataclass, for its ``__post_init__``.

    Raises:
        ValueError: a field is not of its type, or out of its bounds.
    """
    for name, annotation in annotations_of(type(settings)).items():
        object.__setattr__(settings, name, checked(name, annotation, getattr(settings, name)))


def made(schema: type[S], given: Mapping[str, object], what: str = "setting", *, whole: bool = False) -> S:
    """An instance of a dataclass from ``given`` values.

    Args:
        whole: defaults stand in for nothing.

    Raises:
        ValueError: an unknown or a missing name, or a value out of bounds; suggests the nearest name.
    """
    known = annotations_of(schema)
    for name in given:
        if name not in known:
            raise ValueError(f"unknown {what} {name!r}.{nearest(name, known)} There are: {', '.join(known)}.")
    for item in fields(schema):
        if (whole or item.default is item.default_factory is MISSING) and item.name not in given:
            raise ValueError(f"{item.name}=... is missing")
    return schema(**given)


def allowed(annotation: object, *, bounds_alone: bool = False) -> str:
    """Words for the values that an annotation allows: ``an integer, at least 1``; or without the type: ``at least 1``."""
    metadata, bounds = list(metadata_of(annotation)), []
    for item in metadata:
        if isinstance(item, Description):
            return item.words
        if isinstance(item, MinLen):
            bounds.append("not empty")
        if isinstance(item, Ge | Gt | Le | Lt | Interval):
            limits = {name: getattr(item, name, None) for name in BOUNDS}
            bounds += [f"{BOUNDS[name]} {limit}" for name, limit in limits.items() if limit is not None]
    names = choices(annotation)
    kinds = [] if names else [_kind(kind) for kind in parts(annotation) if kind is not type(None)]
    words = ["one of: " + ", ".join(map(str, names))] if names else [" or ".join(kinds)]
    if bounds_alone and bounds:
        words = []
    return ", ".join([*words, *([" and ".join(bounds)] if bounds else [])])


def _kind(kind: object) -> str:
    if get_origin(kind) is list:
        (item,) = get_args(kind)
        if names := choices(item):
            return f"a list out of [{','.join(map(str, names))}]"
        each = f", each {allowed(item, bounds_alone=True)}" if any(metadata_of(item)) else ""
        return f"a list of {'names, such as [a,b]' if str in parts(item) else 'numbers, such as [1,2]'}{each}"
    return _WORDS.get(kind, str(kind)) if isinstance(kind, type) else str(kind)


def choices(annotation: object) -> list[object]:
    """The values of a ``Literal`` within an annotation."""
    return [value for kind in parts(annotation) if get_origin(kind) is Literal for value in get_args(kind)]


def parts(annotation: object) -> Iterator[object]:
    """The alternatives of an annotation, without metadata."""
    nested = _inside(annotation)
    if not nested:
        yield annotation
    for part in nested:
        yield from parts(part)


def metadata_of(annotation: object) -> Iterator[object]:
    if get_origin(annotation) is Annotated:
        yield from get_args(annotation)[1:]
    for part in _inside(annotation):
        yield from metadata_of(part)


def _inside(annotation: object) -> tuple[object, ...]:
    """The annotated type, or the members of a union. Other types have no parts."""
    kind, nested = get_origin(annotation), get_args(annotation)
    return nested[:1] if kind is Annotated else nested if kind in (Union, UnionType) else ()


BUDGET, CHUNK = 1024, 512
"""Default slots and tokens, if neither the user nor the heads set them."""
INT32_MAX = 2**31 - 1
SCHEMES = ("compact", "clipped", "original")
PROTECTED = ("first", "system", "markers")
"""Names that ``protect`` may have."""
FIRST = 4
"""Number of first tokens, which get much attention whatever they say. Source: StreamingLLM, arXiv 2309.17453."""
SMOOTH_L1 = "smooth_l1"
"""The loss of training where no other is named."""
PUBLISHED = ("budget", "chunk", "stabilizers", "local_len", "positions")
"""Settings that heads are published with."""

Slots = Annotated[int, Interval(ge=1, le=INT32_MAX)]
Count = Annotated[int, Interval(ge=0, le=INT32_MAX)]
Share = Annotated[float, Interval(gt=0, le=1)]
Budget = Annotated[
    Slots | Share,
    Description("at least 1 slot (at most 2147483647), or with a point a share of the prompt, above 0 and at most 1.0"),
]


def read_positions(text: str) -> tuple[str, int | None]:
    """The name of a position scheme, and its span: ``compact``, ``original``, ``clipped`` or ``clipped(span)``.

    Raises:
        ValueError: another name, or a span that is missing its meaning.
    """
    match = re.fullmatch(r"(\w+)(?:\((\d+)\))?", text)
    if not match or match[1] not in SCHEMES or (match[2] and match[1] != "clipped"):
        known = "compact, original, clipped or clipped(SPAN)"
        raise ValueError(f"positions={text!r} must be {known}.{nearest(text.split('(')[0], SCHEMES)}")
    if match[2] and (len(match[2]) > 10 or int(match[2]) > INT32_MAX):
        raise ValueError(f"positions={text!r}: the span must be at most {INT32_MAX} tokens")
    return match[1], int(match[2]) if match[2] else None


def is_positions(text: str) -> bool:
    """Whether a position scheme is known. Raises ValueError with those that are."""
    return bool(read_positions(text))


def read_protect(text: str | None) -> frozenset[str]:
    """The names in ``protect``: of 'first', 'system' and 'markers' some, joined by +; none of them for 'none' or None.

    Raises:
        ValueError: another name, with the nearest.
    """
    names = frozenset() if text in (None, "none") else frozenset(text.split("+"))
    for name in sorted(names.difference(PROTECTED)):
        known = f"none, or joined by + some of: {', '.join(PROTECTED)}"
        raise ValueError(f"protect={text!r}: {name!r} is unknown; it must be {known}.{nearest(name, PROTECTED)}")
    return names


def is_protect(text: str) -> bool:
    """Whether all that is to be protected is known. Raises ValueError with what may be."""
    return bool(read_protect(text)) or text == "none"


def is_word(text: str) -> bool:
    """Whether a text may be the name of a plugin's part. Whether the part exists is checked when it is used."""
    return text.isidentifier()


def is_size(text: str) -> bool:
    """Whether a text is a number of bytes. Raises ValueError with the setting's name and the reason."""
    return parse_bytes(text, NAME) > 0


Bytes = Annotated[str, Predicate(is_size)]
Word = Annotated[str, Predicate(is_word)]


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Settings of the cache. None means the heads' published value, or else the default.

    Raises:
        ValueError: wrong type or out of bounds; has the setting's name, its value and the bound.
    """

    budget: Budget | None = None
    """Slots per key/value head and layer, everything included. A number with a point, such as 0.1, is a share of the
    prompt. Default: the heads', or 1024. locret-infer, locret-read and locret-chat use a quarter of the text if that
    is more, limited by window and memory."""
    chunk: Slots | None = None
    """Prefill chunk: tokens read between evictions. Default: the heads', or 512."""
    stabilizers: Count | None = None
    """Newest slots that are never evicted during prefill. They are part of the budget. Default: the heads' share of
    the budget, or an eighth of it."""
    local_len: Count | None = None
    """Last prompt tokens that are never evicted before decoding. Default: the heads', or 64; fewer for small
    budgets."""
    positions: Annotated[str, Predicate(is_positions)] | None = None
    """Positions for RoPE: 'compact' (a slot's rank in the cache), 'original' (its position in the text) or
    'clipped(SPAN)' (in between). Default: the heads', or compact if the architecture allows it."""
    protect: Annotated[str, Predicate(is_protect)] | None = None
    """Tokens that no policy may evict: 'first' (the first 4 tokens), 'system' (the system prompt), 'markers' (the
    chat template's own tokens around messages), or several, as in 'first+system'. Default: none."""
    kv_bits: Literal[8, 4, 2] | Word | None = None
    """Bits per stored key or value: 8 (floating point, one scale per head), 4 or 2 (newest rows are not quantised);
    or a plugin's codec. Default: the model's dtype."""
    one_shot: bool = False
    """Evict once, after the whole prompt, instead of after every chunk."""
    decode_every: Slots | None = None
    """Decoded tokens between evictions. Default: only when the buffers are full."""
    seed: Annotated[int, Interval(ge=0, lt=2**32)] = 0
    """Seed of random policies and of sampling."""
    backend: Literal["reference", "triton", "cpu"] | Word | None = None
    """Implementation of the kernels, or a plugin's backend. Default: triton on CUDA in half precision, cpu (C++) on
    a CPU with a compiler, otherwise reference."""

    def __post_init__(self) -> None:
        check(self)

    @classmethod
    def of(cls, given: Mapping[str, object]) -> RunSettings:
        """Settings from names and values.

        Raises:
            ValueError: as the class; an unknown name, with the nearest one.
        """
        return made(RunSettings, given)

    @property
    def run(self) -> RunSettings:
        """Settings of a run alone, without those of a derived class."""
        return RunSettings(**{item.name: getattr(self, item.name) for item in fields(RunSettings)})

    @property
    def portable(self) -> dict[str, object]:
        """The settings by name, in the form of a file. The last one exists only in files of earlier versions."""
        return {**asdict(self), "store_bits": None}

    def resolved(self, published: Mapping[str, object], prompt_length: int | None) -> Resolved:
        """Settings of one prompt.

        Published stabilizers keep their share of the budget; the published tail gets shorter with it, never longer. The
        one-shot form has the prompt as its one chunk and holds nothing back.

        Args:
            published: the settings that the heads were published with.
            prompt_length: tokens of the prompt; None where it is not known yet.

        Raises:
            ValueError: a share of the prompt, or one_shot, without ``prompt_length``.
        """
        theirs = RunSettings.of({name: published.get(name) for name in PUBLISHED})
        asked = self.budget or theirs.budget or BUDGET
        if prompt_length is None and isinstance(asked, float):
            raise ValueError(f"budget={asked} is a share of the prompt: pass prompt_length=")
        if prompt_length is None and self.one_shot:
            raise ValueError("one_shot=True needs prompt_length: the prompt is its one chunk")
        budget = max(1, int(asked * (prompt_length or 0))) if isinstance(asked, float) else asked
        factor = budget / theirs.budget if theirs.budget else 1.0
        chunk = self.chunk or theirs.chunk or CHUNK
        stabilizers, local_len = self.stabilizers, self.local_len
        if stabilizers is None:
            stabilizers = budget // 8 if theirs.stabilizers is None else int(theirs.stabilizers * factor)
        if local_len is None:
            local_len = min(64, budget // 4) if theirs.local_len is None else int(theirs.local_len * min(1.0, factor))
        if self.one_shot:
            chunk, stabilizers, local_len = prompt_length or 1, 0, 0
        return Resolved(
            **asdict(self.run)
            | {"budget": budget, "chunk": chunk, "stabilizers": stabilizers, "local_len": local_len}
            | {"positions": self.positions or theirs.positions}
            | {"share": asked if isinstance(asked, float) else getattr(self, "share", None)}
        )


@dataclass(frozen=True, kw_only=True)
class Resolved(RunSettings):
    """Settings of one prompt: nothing that counts slots or tokens is left open."""

    budget: Slots = BUDGET
    """Slots of a key/value head in one layer."""
    chunk: Slots = CHUNK
    stabilizers: Count = 0
    local_len: Count = 0
    share: Share | None = None
    """The budget as a share of the prompt, where it was given so."""


TOKENS_PER_SLOT = 8
"""Tokens for each slot beyond which few facts of a text are found again (docs/tutorials/read.md)."""


def too_few(budget: int, tokens: int) -> str | None:
    """Words where a text has more tokens than ``TOKENS_PER_SLOT`` for each slot."""
    if tokens <= TOKENS_PER_SLOT * budget:
        return None
    wanted = -(-tokens // TOKENS_PER_SLOT)
    step = 10 ** max(0, len(str(wanted)) - 2)
    return (
        f"{budget:,} slots for {tokens:,} tokens, 1 in {tokens // budget}: facts need about 1 in {TOKENS_PER_SLOT}: "
        f"--budget {-(-wanted // step) * step}"
    )
