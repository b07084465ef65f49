"""Validation of dataclasses by the annotations of their fields, with errors in a user's words. No torch.

Types and bounds are written once: ``chunk: Annotated[int, Ge(1)]``. pydantic checks; it is imported with the first check, so that
reading a schema (``--help``) stays fast.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields
from functools import cache
from numbers import Integral, Real
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from annotated_types import DocInfo, MinLen

from .naming import nearest

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from pydantic import TypeAdapter

TYPE_WORDS: dict[object, str] = {int: "an integer", float: "a number", str: "a text", bool: "true or false"}
BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
OUT_OF_BOUNDS = {"greater_than_equal", "greater_than", "less_than_equal", "less_than", "too_short"}
"""pydantic's names for errors of a value of the right type."""
NAME = "{name}"
"""Placeholder for the setting's name in a validator's message."""

Description = DocInfo
"""Metadata of an annotation: words for the allowed values, in place of those derived from type and bounds."""
S = TypeVar("S", bound="DataclassInstance")


@cache
def annotations_of(schema: type[DataclassInstance]) -> dict[str, object]:
    """``{field: annotation}`` of a dataclass, bounds included."""
    hints = get_type_hints(schema, include_extras=True)
    return {item.name: hints[item.name] for item in fields(schema)}


def validate(name: str, annotation: object, value: object) -> object:
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
    beyond = any(reason["type"] in OUT_OF_BOUNDS and int not in map(type, reason["loc"]) for reason in reasons)
    message = f"{name}={display(value)} must be {type_words(annotation, bounds_alone=beyond)}"
    if isinstance(value, str):
        named = choices(annotation)
        if {int, float, bool} & {*alternatives(annotation), *map(type, named)} and not isinstance(scalar(value), str):
            message += f": {value!r} is a text"
        elif near := nearest(value, map(str, named)):
            message += f".{near}"
    raise ValueError(message)


@cache
def _adapter(annotation: object) -> TypeAdapter[object]:
    from pydantic import ConfigDict, TypeAdapter

    return TypeAdapter(annotation, config=ConfigDict(allow_inf_nan=False, strict=True))  # type: ignore[arg-type]


def validate_fields(instance: DataclassInstance) -> None:
    """Validate every field of a dataclass, frozen or not, for its ``__post_init__``.

    Raises:
        ValueError: a field is not of its type, or out of its bounds.
    """
    for name, annotation in annotations_of(type(instance)).items():
        object.__setattr__(instance, name, validate(name, annotation, getattr(instance, name)))


def build(schema: type[S], given: Mapping[str, object], what: str = "setting", *, whole: bool = False) -> S:
    """An instance of a dataclass from ``given`` values.

    Args:
        what: what a name is, in the message. whole: no field may be missing, even one with a default.

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


def scalar(text: str) -> object:
    """The number or boolean of a text, or the text itself."""
    try:
        return int(text) if text.lstrip("+-").isdecimal() and len(text) <= 300 else float(text)
    except ValueError:
        return {"true": True, "false": False}.get(text, text)


def display(value: object) -> str:
    """A value in one line of a message: cut to 60 characters if it is long, without what moves a terminal's cursor."""
    try:
        text = " ".join(str(value).split())
    except ValueError:  # Python writes no integer of more than 4,300 digits
        text = "(an integer of thousands of digits)"
    text = text if len(text) <= 100 else f"{text[:60]}..."
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def type_words(annotation: object, *, bounds_alone: bool = False) -> str:
    """Words for the values that an annotation allows: ``an integer, at least 1``; or without the type: ``at least 1``."""
    metadata, names = metadata_of(annotation), choices(annotation)
    for item in metadata:
        if isinstance(item, Description):
            return item.documentation
    limits = ((words, getattr(item, name, None)) for item in metadata for name, words in BOUNDS.items())
    bounds = [f"{words} {limit}" for words, limit in limits if limit is not None]
    bounds += ["not empty" for item in metadata if isinstance(item, MinLen)]
    kinds = " or ".join(_kind_words(kind) for kind in alternatives(annotation) if kind is not type(None))
    kinds = f"one of: {', '.join(map(str, names))}" if names else kinds
    return ", ".join(filter(None, ["" if bounds and bounds_alone else kinds, " and ".join(bounds)]))


def _kind_words(kind: object) -> str:
    if get_origin(kind) is not list:
        return TYPE_WORDS.get(kind, str(kind))
    (item,) = get_args(kind)
    each = f", each {type_words(item, bounds_alone=True)}" if metadata_of(item) else ""
    return f"a list of {'names, such as [a,b]' if str in alternatives(item) else 'numbers, such as [1,2]'}{each}"


def choices(annotation: object) -> list[object]:
    """The values of a ``Literal`` within an annotation."""
    return [value for kind in alternatives(annotation) if get_origin(kind) is Literal for value in get_args(kind)]


def alternatives(annotation: object) -> list[object]:
    """The alternatives of an annotation, without metadata."""
    return [part for part in _parts(annotation) if get_origin(part) not in (Annotated, Union, UnionType)]


def metadata_of(annotation: object) -> list[object]:
    """The metadata of an annotation and of its alternatives."""
    return [item for part in _parts(annotation) for item in getattr(part, "__metadata__", ())]


def _parts(annotation: object) -> Iterator[object]:
    """An annotation and all annotations within it: the annotated type, the members of a union."""
    yield annotation
    kind, inner = get_origin(annotation), get_args(annotation)
    for part in inner[:1] if kind is Annotated else inner if kind in (Union, UnionType) else ():
        yield from _parts(part)
