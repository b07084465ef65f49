"""Options of a command, as a dataclass states them; and values from the words of a command line. No torch.

Types and bounds of an option are its field's annotation, the docstring under the field is its help, and a field that is a
dataclass is a section with dotted names. A field of ``HIDDEN`` is no option.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Generic, TypeVar, get_args, get_origin

from ..naming import nearest
from ..validation import annotations_of, choices, parts

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")
Values = dict[str, object]
REQUIRED = object()


class UsageError(ValueError):
    """Words that are no options of the command."""


class Repeatable:
    """Metadata of a list whose option is given once for each item, commas and all."""


@dataclass(frozen=True)
class Command(Generic[T]):
    """A command's name, options and help."""

    name: str
    schema: type[T]
    usage: str
    """Usage and examples, for ``--help``."""
    main: tuple[str, ...] = ()
    """The options that ``--help`` shows, in order, ten at most; () for all, where a command has no more."""
    notes: str = ""
    """Text below the usage of ``--help all``."""
    positional: tuple[str, ...] = ()
    """The options that bare words are, in order; the last takes the rest of them."""
    short: Mapping[str, str] = field(default_factory=dict)
    """Options by short flag, such as ``{"-o": "--out"}``."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Options by another name that stands for them."""
    gone: Mapping[str, str] = field(default_factory=dict)
    """Options, sections and values (``name=value``) that there were, and what does their work."""
    complete: Callable[[Values], Values] = dict
    """Values to build the options from, made of those that are given."""


@dataclass(frozen=True)
class Option:
    """A field of a schema, or of a section of it."""

    annotation: object
    default: object
    owner: type
    field: str


@cache
def options_of(schema: type[DataclassInstance]) -> dict[str, Option]:
    """Options by name, dotted within sections, in the schema's order."""
    options: dict[str, Option] = {}
    for item in fields(schema):
        annotation = annotations_of(schema)[item.name]
        if isinstance(annotation, type) and is_dataclass(annotation):
            options |= {f"{item.name}.{name}": option for name, option in options_of(annotation).items()}
        elif item.name not in getattr(schema, "HIDDEN", ()):
            default = item.default if item.default_factory is MISSING else item.default_factory()
            owner = next(kind for kind in schema.__mro__ if item.name in vars(kind).get("__annotations__", {}))
            options[item.name] = Option(annotation, REQUIRED if default is MISSING else default, owner, item.name)
    return options


@cache
def docstrings(schema: type) -> dict[str, str]:
    """The string under each annotated field, of the class and of those that it extends, on one line each."""
    texts: dict[str, str] = {}
    for kind in filter(is_dataclass, reversed(schema.__mro__)):
        (made,) = ast.parse(inspect.getsource(kind)).body
        assert isinstance(made, ast.ClassDef)
        for above, below in pairwise(made.body):
            match above, below:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    texts[name] = " ".join(text.split())
    return texts


def build(schema: type[T], values: Values, prefix: str = "") -> T:
    """The dataclass from values by option; the others have their defaults.

    Raises:
        ValueError: an option without a default is missing, or what the schema itself refuses.
    """
    given: Values = {}
    for item in fields(schema):
        annotation, name = annotations_of(schema)[item.name], f"{prefix}{item.name}"
        if isinstance(annotation, type) and is_dataclass(annotation):
            given[item.name] = build(annotation, values, f"{name}.")
        elif name in values:
            given[item.name] = values[name]
        elif item.default is MISSING and item.default_factory is MISSING:
            raise UsageError(f"{name}=... is missing")
    return schema(**given)


def refuse(options: DataclassInstance, names: Iterable[str], why: str) -> None:
    """Raise ValueError for the first of these options that was given: it ``has no effect``, and why."""
    known = options_of(type(options))
    for name in names:
        if (value := getattr(options, name)) != known[name].default:
            flag = name.replace("_", "-")
            shown = value[0] if isinstance(value, list) else value
            words = f"--{'' if value else 'no-'}{flag}" if isinstance(value, bool) else f"--{flag} {shown}"
            raise ValueError(f"{words} has no effect {why}")


def unknown(name: str, known: Mapping[str, Option], where: str = "") -> str:
    """Words for a name that is no option: the nearest of the same name elsewhere, else of its section, else any; or the
    section's fields."""
    inside = [leaf for leaf in known if leaf.startswith(f"{name}.")]
    if inside:
        return f"{name}{where} is a section; its fields: {', '.join(inside)}"
    section, _, last = name.rpartition(".")
    same = [leaf for leaf in known if leaf.endswith(f".{last}")]
    beside = [leaf for leaf in known if section and leaf.startswith(f"{section}.")]
    if beside and not same and not nearest(last, [leaf.rpartition(".")[2] for leaf in beside]):
        return f"unknown key {name!r}{where}. Fields of {section}: {', '.join(beside)}."
    near = nearest(same[0] if same else name, beside or known)
    return f"unknown key {name!r}{where}.{near} --help all lists what there is"


def refuse_gone(gone: Mapping[str, str], name: str, value: object, where: str = "") -> None:
    """Raise UsageError for a name, a section or a ``name=value`` that there is no more; says what does its work."""
    for word in (name, name.partition(".")[0], f"{name}={value}"):
        if word in gone:
            shown = f"--{word.replace('_', '-')}" if word == name and word.isidentifier() else word
            raise UsageError(f"{shown}{where} is no option any more: {gone[word]}")


def typed(annotation: object, text: str) -> object:
    """A text as a value of an annotation's type, unchecked; ``null`` where that is allowed."""
    kinds, text = list(parts(annotation)), text.strip()
    if text == "null" and type(None) in kinds:
        return None
    for kind in kinds:
        if get_origin(kind) is list:
            return [typed(get_args(kind)[0], item) for item in split_list(text)]
    if known := {str(choice): choice for choice in choices(annotation)}:
        return known.get(text, text)
    return text if str in kinds else scalar(text)


def scalar(text: str) -> object:
    """The number or truth value that a text writes, or the text."""
    if re.fullmatch(r"[+-]?\d{1,300}", text):
        return int(text)
    try:
        return float(text)
    except ValueError:
        return {"true": True, "false": False}.get(text, text)


def split_list(text: str) -> list[str]:
    """The items of ``[a,b]`` or ``a,b``; commas within parentheses belong to an item: ``kvcrush(base=h2o,anchor=mean)``."""
    items, depth = [""], 0
    for character in text[1:-1] if text.startswith("[") and text.endswith("]") else text:
        depth += (character in "([") - (character in ")]")
        if character == "," and not depth:
            items.append("")
        else:
            items[-1] += character
    return [item for part in items if (item := part.strip().strip("\"'"))]
