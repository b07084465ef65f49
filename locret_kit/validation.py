"""Types and bounds of settings, written once as annotations: ``chunk: Annotated[int, Ge(1)]``. No torch.

pydantic checks and converts; it is imported with the first check, so that reading a schema (``--help``) stays fast.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, fields
from functools import cache
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Interval, Le, Lt, MinLen

from .naming import nearest

_WORDS = {int: "an integer", float: "a number", str: "a text", bool: "true or false"}
_BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}


class Says:
    """Metadata of an annotation: the words for what it allows, in place of those made from its type and bounds."""

    def __init__(self, words: str) -> None:
        self.words = words


@cache
def annotations_of(schema: type) -> dict[str, Any]:
    """``{field: annotation}`` of a dataclass, bounds included."""
    hints = get_type_hints(schema, include_extras=True)
    return {item.name: hints[item.name] for item in fields(schema)}


def checked(name: str, annotation: Any, value: Any) -> Any:
    """The value, converted from text where that is unambiguous.

    Raises:
        ValueError: wrong type or out of bounds; says name, value and what is allowed, and suggests the nearest choice.
    """
    from pydantic import ValidationError

    if isinstance(value, bool) and bool not in _flat(annotation):  # pydantic would take true for the number 1
        raise ValueError(f"{name}={value} must be {allowed(annotation)}")
    try:
        return _adapter(annotation).validate_python(value)
    except ValidationError as error:
        reason = error.errors()[0]
        if reason["type"] == "value_error":  # a validator's own words
            raise ValueError(str(reason["ctx"]["error"])) from None
        near = nearest(str(value), [str(one) for one in choices(annotation)])
        raise ValueError(f"{name}={value} must be {allowed(annotation)}.{near}".removesuffix(".")) from None


@cache
def _adapter(annotation: Any) -> Any:
    from pydantic import ConfigDict, TypeAdapter

    return TypeAdapter(annotation, config=ConfigDict(allow_inf_nan=False))


def check(settings: Any) -> None:
    """Check and convert every field of a frozen dataclass, for its ``__post_init__``.

    Raises:
        ValueError: as ``checked``.
    """
    for name, annotation in annotations_of(settings.__class__).items():
        object.__setattr__(settings, name, checked(name, annotation, getattr(settings, name)))


def made(schema: type, given: dict[str, Any], what: str = "setting") -> Any:
    """An instance of a dataclass from ``given`` values.

    Raises:
        ValueError: an unknown or a missing name, or a value out of bounds; suggests the nearest name.
    """
    known = annotations_of(schema)
    for name in given:
        if name not in known:
            raise ValueError(f"unknown {what} {name!r}.{nearest(name, known)} There are: {', '.join(known)}.")
    for item in fields(schema):
        if item.default is MISSING and item.default_factory is MISSING and item.name not in given:
            raise ValueError(f"{item.name}=... is missing")
    return schema(**given)


def allowed(annotation: Any) -> str:
    """Words for the values that an annotation allows: ``an integer, at least 1``."""
    args, bounds = _flat(annotation), []
    for item in _metadata(annotation):
        if isinstance(item, Says):
            return item.words
        if isinstance(item, MinLen):
            bounds.append(f"of at least {item.min_length}")
        for name, words in _BOUNDS.items():
            limit = getattr(item, name, None) if isinstance(item, Ge | Gt | Le | Lt | Interval) else None
            if limit is not None:
                bounds.append(f"{words} {limit}")
    names = choices(annotation)
    if names:
        kinds = ["one of: " + ", ".join(map(str, names))]
    else:
        kinds = [_kind(kind) for kind in args if kind is not type(None)]
    if bounds and kinds == ["an integer"]:
        kinds = []  # "must be at least 1" says it all
    return " or ".join(kinds) + (", " if kinds and bounds else "") + " and ".join(bounds)


def _kind(kind: Any) -> str:
    if get_origin(kind) in (list, tuple):
        inner = {int: "integers", float: "numbers"}.get(_flat(get_args(kind)[0])[0], "names")
        return f"a list of {inner}, such as [{'1,2' if inner != 'names' else 'a,b'}]"
    return _WORDS.get(kind, str(kind))


def choices(annotation: Any) -> list[Any]:
    """The values of a ``Literal`` within an annotation."""
    return [value for kind in _parts(annotation) if get_origin(kind) is Literal for value in get_args(kind)]


def _flat(annotation: Any) -> list[Any]:
    """The types of an annotation without metadata; those of its choices' values where it has choices."""
    return [
        kind
        for part in _parts(annotation)
        for kind in ({type(value) for value in get_args(part)} if get_origin(part) is Literal else {part})
    ]


def _parts(annotation: Any) -> Iterator[Any]:
    if get_origin(annotation) is Annotated:
        yield from _parts(get_args(annotation)[0])
    elif get_origin(annotation) in (Union, UnionType):
        for part in get_args(annotation):
            yield from _parts(part)
    else:
        yield annotation


def _metadata(annotation: Any) -> Iterator[Any]:
    if get_origin(annotation) is Annotated:
        yield from get_args(annotation)[1:]
        yield from _metadata(get_args(annotation)[0])
    elif get_origin(annotation) in (Union, UnionType):
        for part in get_args(annotation):
            yield from _metadata(part)
