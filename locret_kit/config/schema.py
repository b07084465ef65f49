"""Options of a command, as a dataclass states them; their help; and values from the words of a command line. No torch.

Types and bounds of an option are its field's annotation, the docstring under the field is its help, and a field that is a
dataclass is a section with dotted names. A field of ``HIDDEN`` is no option.
"""

from __future__ import annotations

import ast
import inspect
import re
import shutil
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Generic, TypeVar

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


COMMON_OPTIONS = {
    "config": "FILE  read options from a YAML file; those of the command line come before them",
    "print-config": "print every option as it would be used, as YAML that --config reads",
    "version": "print the version",
    "help": "[all]  print this; with all, every option",
}
HEAD = 26
"""Columns of an option's name and value in the short help."""


def short_help(command: Command[T]) -> str:
    """Usage, examples and the main options, each with the first sentence of its meaning and its default."""
    width, known = terminal_width(), options_of(command.schema)
    lines = [command.usage.strip(), ""]
    for name in command.main or known:
        option = known[name]
        first, *others = re.split(r"(?<=\.) (?=[A-Z])", docstrings(option.owner).get(option.field, ""))
        meaning = " ".join([first, *(text for text in others if text.startswith("Default:"))]).rstrip(".")
        default = f" (default: {option.default})" if type(option.default) in (int, float, str) else ""
        head = f"  {_head(name, option)}"
        gap = f"{head:<{HEAD}}" if len(head) < HEAD - 1 else f"{head}  "
        lines += textwrap.wrap(meaning + default, width, initial_indent=gap, subsequent_indent=" " * HEAD)
    rest = len(known) - len(command.main or known)
    more = f"--help all: {rest} more options. " if rest else ""
    lines.append(f"\n{more}--config FILE, --print-config, --version: in every command.")
    return "\n".join(lines)


def full_help(command: Command[T]) -> str:
    """Usage, examples, and every option with its type, meaning and default, in groups."""
    width = terminal_width()
    lines = [command.usage.strip(), *(["", command.notes.strip()] if command.notes else [])]
    for title, known in groups_of(command):
        lines.append(f"\n{textwrap.fill(title, width)}:")
        lines += [_line(name, option, width) for name, option in known.items()]
    lines.append("\nEvery command:")
    lines += [f"  --{name} {meaning}" for name, meaning in COMMON_OPTIONS.items()]
    lines.append("\n--key value, --key=value and key=value are the same, in any order; - and _ are alike in names.")
    return "\n".join(lines)


def terminal_width() -> int:
    """Columns, as wide as the terminal within reason."""
    return max(60, min(shutil.get_terminal_size().columns, 120))


def groups_of(command: Command[T]) -> list[tuple[str, dict[str, Option]]]:
    """Titles of groups of options with their options, in the order of the help."""
    groups: list[tuple[str, dict[str, Option]]] = []
    order = {kind: place for place, kind in enumerate(command.schema.__mro__)}
    for name, option in sorted(options_of(command.schema).items(), key=lambda item: order.get(item[1].owner, -1)):
        title = inspect.cleandoc(option.owner.__doc__ or "").splitlines()[0].rstrip(".")
        if not groups or title != groups[-1][0]:
            groups.append((title, {}))
        groups[-1][1][name] = option
    return groups


def _head(name: str, option: Option) -> str:
    """An option and its value, as a command line has them."""
    flag, names = name.replace("_", "-"), choices(option.annotation)
    if bool in parts(option.annotation):
        return f"--no-{flag}" if option.default else f"--{flag}"
    return f"--{flag} " + ("|".join(map(str, names)) if names else name.rpartition(".")[2].upper())


def _line(name: str, option: Option, width: int) -> str:
    flag, meaning = name.replace("_", "-"), docstrings(option.owner).get(option.field, "")
    if bool in parts(option.annotation):
        head, default = f"--{flag}, --no-{flag}", "yes" if option.default else "no"
    else:
        head = _head(name, option)
        default = f"[{','.join(map(str, option.default))}]" if isinstance(option.default, list) else str(option.default)
    if option.default is REQUIRED:
        meaning += " Required."
    elif option.default is not None:
        meaning += f" (default: {default})"
    indent = " " * 6
    return f"  {head}\n" + textwrap.fill(meaning, width, initial_indent=indent, subsequent_indent=indent)


def help_of(command: Command[T], argv: list[str]) -> str:
    """The help that the words of a command line ask for."""
    return full_help(command) if "all" in argv else short_help(command)
