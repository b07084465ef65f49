"""Types and bounds of settings, written once as annotations: ``chunk: Annotated[int, Ge(1)]``. No torch.

pydantic checks; it is imported with the first check, so that reading a schema (``--help``) stays fast.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields
from functools import cache
from numbers import Integral, Real
from types import UnionType
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Protocol, TypeVar, Union, get_args, get_origin
from typing import get_type_hints as hints_of

from annotated_types import Ge, Gt, Interval, Le, Lt, MinLen

from .naming import nearest

if TYPE_CHECKING:
    from pydantic import TypeAdapter

_WORDS = {int: "an integer", float: "a number", str: "a text", bool: "true or false"}
BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
_BEYOND = ("greater_than_equal", "greater_than", "less_than_equal", "less_than", "too_short")

NAME = "{name}"
"""The name of what is checked, in a validator's own words."""


class Schema(Protocol):
    """A dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Field[object]]]


S = TypeVar("S", bound=Schema)


@dataclass(frozen=True)
class Description:
    """Metadata of an annotation: the words for what it allows, in place of those made from its type and bounds."""

    words: str


@cache
def annotations_of(schema: type[Schema]) -> dict[str, object]:
    """``{field: annotation}`` of a dataclass, bounds included."""
    hints = hints_of(schema, include_extras=True)
    return {item.name: hints[item.name] for item in fields(schema)}


def checked(name: str, annotation: object, value: object) -> object:
    """The value; an integer as a float where the annotation asks for one, and a number of numpy's as Python's.

    Raises:
        ValueError: wrong type or out of bounds; says name, value and what is allowed, and suggests the nearest choice.
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
        ValueError: as ``checked``.
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
    """What is annotated, or the members of a union; of other types nothing."""
    kind, nested = get_origin(annotation), get_args(annotation)
    return nested[:1] if kind is Annotated else nested if kind in (Union, UnionType) else ()
