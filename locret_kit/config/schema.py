"""Options of a command from a dataclass: their help, and their values from a command line and from YAML.

An option's type and bounds are its field's annotation, and the docstring under the field is its help. A field that
is a dataclass is a section with dotted names. Fields in ``HIDDEN`` are no options. A command line has ``--key
value``, ``--key=value`` or ``key=value``, in any order. No torch.
"""

from __future__ import annotations

import ast
import inspect
import re
import shutil
import textwrap
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import cache, cached_property
from itertools import chain, groupby, pairwise, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar, get_args, get_origin

from .. import __version__
from ..files import read_yaml
from ..naming import nearest, split_outside
from ..validation import alternatives, annotations_of, choices, metadata_of, scalar, validate

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")
Values = dict[str, object]
Idle = Iterator[tuple[Iterable[str], str]]
"""Options without effect, and the reasons."""


class UsageError(ValueError):
    """Arguments that are no options of the command."""


class Repeatable:
    """Metadata of a list whose option is repeated for each item. Commas belong to the item."""


@dataclass(frozen=True)
class Command(Generic[T]):
    """A command's name, options and help."""

    name: str
    schema: type[T]
    """Its docstring is the description and the examples of ``--help``."""
    synopsis: str = "[--key value | key=value ...]"
    """Arguments, for the line of the usage."""
    main: tuple[str, ...] = ()
    """Options that ``--help`` shows, in order, at most ten; () shows all."""
    notes: str = ""
    """Text below the usage of ``--help all``."""
    positional: tuple[str, ...] = ()
    """Options that positional arguments set, in order; the last takes all remaining ones."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Options by alias."""
    complete: Callable[[Values], Values] = dict
    """Function that completes the given values before the options are built."""
    idle: Callable[[T], Idle] = lambda options: iter(())
    """Function that names the options without effect beside the others. One that is given is an error."""

    @property
    def usage(self) -> str:
        """Usage, description and examples."""
        return f"usage: {self.name} {self.synopsis}\n\n{inspect.cleandoc(self.schema.__doc__ or '')}"


@dataclass(frozen=True)
class Option:
    """A field of a schema, or of a section of it."""

    name: str
    annotation: object
    default: object = None
    """``MISSING`` where it must be given."""
    owner: type = Command
    """The class that annotates the field."""

    @property
    def is_switch(self) -> bool:
        """Whether its value may be left out."""
        return bool in alternatives(self.annotation)

    @property
    def is_repeatable(self) -> bool:
        """Whether it is repeated for each item, which may hold commas."""
        return any(isinstance(item, Repeatable) for item in metadata_of(self.annotation))

    @cached_property
    def help(self) -> str:
        """The docstring under the field, on one line."""
        return docstrings(self.owner).get(self.name.rpartition(".")[2], "")

    @property
    def flags(self) -> tuple[str, ...]:
        """The option and its value, in the form of a command line; of a switch both forms, that which changes something first."""
        flag, names = self.name.replace("_", "-"), choices(self.annotation)
        if self.is_switch:
            return (f"--no-{flag}", f"--{flag}") if self.default else (f"--{flag}", f"--no-{flag}")
        return (f"--{flag} " + ("|".join(map(str, names)) or self.name.rpartition(".")[2].upper()),)

    def read(self, value: object, where: str = "") -> object:
        """A valid value from a text, or from a value of YAML.

        Raises:
            ValueError: a wrong type or out of bounds; ``where`` follows the name in the message.
        """
        if type(value) in (str, int, float):  # in YAML 1e-4 is a text, and a name may be a number
            value = [str(value)] if self.is_repeatable else typed(self.annotation, str(value))
        try:
            return validate(self.name, self.annotation, value)
        except ValueError as error:
            raise ValueError(str(error).replace(" must be", f"{where} must be", 1)) from None


@cache
def options_of(schema: type[DataclassInstance], prefix: str = "") -> dict[str, Option]:
    """Options by name, dotted within sections, in the schema's order."""
    options: dict[str, Option] = {}
    for item in fields(schema):
        annotation, name = annotations_of(schema)[item.name], f"{prefix}{item.name}"
        if isinstance(annotation, type) and is_dataclass(annotation):
            options |= options_of(annotation, f"{name}.")
        elif item.name not in getattr(schema, "HIDDEN", ()):
            default = item.default if item.default_factory is MISSING else item.default_factory()
            owner = next(kind for kind in schema.__mro__ if item.name in inspect.get_annotations(kind))
            options[name] = Option(name, annotation, default, owner)
    return options


@cache
def docstrings(schema: type) -> dict[str, str]:
    """Docstrings of the annotated fields of a class and its bases, on one line each."""
    texts: dict[str, str] = {}
    for kind in filter(is_dataclass, reversed(schema.__mro__)):
        (definition,) = ast.parse(inspect.getsource(kind)).body
        assert isinstance(definition, ast.ClassDef)
        for above, below in pairwise(definition.body):
            match above, below:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    texts[name] = " ".join(text.split())
    return texts


def assemble(schema: type[T], values: Values, prefix: str = "") -> T:
    """Build the dataclass from values by option; other fields keep their defaults.

    Raises:
        ValueError: an option without a default is missing, or the schema refuses the values.
    """
    given: Values = {}
    for item in fields(schema):
        annotation, name = annotations_of(schema)[item.name], f"{prefix}{item.name}"
        if isinstance(annotation, type) and is_dataclass(annotation):
            given[item.name] = assemble(annotation, values, f"{name}.")
        elif name in values:
            given[item.name] = values[name]
        elif item.default is item.default_factory is MISSING:
            raise UsageError(f"{name}=... is missing")
    return schema(**given)


def refuse(options: DataclassInstance, names: Iterable[str], why: str) -> None:
    """Raise ValueError for the first of these options that was given: it ``has no effect``, with the reason."""
    for name in names:
        value, option = getattr(options, name), options_of(type(options))[name]
        if value != option.default:
            first = value[0] if isinstance(value, list) else value
            switch = option.is_switch and option.flags[not (value or option.default)]
            words = switch or f"--{name.replace('_', '-')} {first}"
            raise ValueError(f"{words} has no effect {why}")


COMMON_OPTIONS = {
    "config": "FILE  read options from a YAML file; the command line overrides them",
    "print-config": "print every option as it would be used, as YAML that --config reads",
    "version": "print the version",
    "help": "[all]  print this; with all, every option",
}


def help_of(command: Command[T], *, everything: bool = False) -> str:
    """Usage, examples, and the main options with the first sentence of their help; or every option, in groups."""
    known, column = options_of(command.schema), 6 if everything else 26
    main, width = command.main or tuple(known), max(60, min(shutil.get_terminal_size().columns, 120))
    lines = [command.usage, *(["", command.notes] if everything and command.notes else [])]
    for title, options in groups_of(command) if everything else [("", [known[name] for name in main])]:
        lines += ["", textwrap.fill(f"{title}:", width)] if title else [""]
        for option in options:
            head = f"  {', '.join(option.flags if everything else option.flags[:1])}  ".ljust(column)
            words = option.help
            if everything:
                lines.append(head.rstrip())
                head = " " * column
            else:
                first, *others = re.split(r"(?<=\.) (?=[A-Z])", words)
                words = " ".join([first, *(text for text in others if text.startswith("Default:"))]).rstrip(".")
            if option.default is MISSING:
                words += " (required)"
            elif not option.is_switch and option.default not in (None, []):
                words += f" (default: {option.default})".replace("'", "")
            lines += textwrap.wrap(words, width, initial_indent=head, subsequent_indent=" " * column)
    if not everything:
        more = f"--help all: {len(known) - len(main)} more options. " if len(main) < len(known) else ""
        return "\n".join([*lines, "", f"{more}--config FILE, --print-config, --version: in every command."])
    common = (f"  --{name} {meaning}" for name, meaning in COMMON_OPTIONS.items())
    forms = "--key value, --key=value and key=value are the same, in any order; - and _ are alike in names."
    return "\n".join([*lines, "", "Every command:", *common, "", forms])


def groups_of(command: Command[T]) -> list[tuple[str, list[Option]]]:
    """Titles of groups of options with their options, in the order of the help."""
    order = {kind: place for place, kind in enumerate(command.schema.__mro__)}
    options = sorted(options_of(command.schema).values(), key=lambda option: order.get(option.owner, -1))
    groups = [(owner.__doc__ or "", [*group]) for owner, group in groupby(options, key=lambda option: option.owner)]
    return [(inspect.cleandoc(title).partition("\n")[0].rstrip("."), group) for title, group in groups]


def read(command: Command[T], argv: list[str]) -> T | None:
    """The options that the words of a command line give; None after ``--help``, ``--help all``, ``--version`` or
    ``--print-config``, which it answers on stdout.

    Raises:
        UsageError: an unknown option, suggests the nearest; one without a value, or given twice.
        ValueError: a value of a wrong type or out of bounds; one without effect; a file that cannot be read.
    """
    if {"-h", "--help"} & {*argv}:
        print(help_of(command, everything="all" in argv))
        return None
    if "--version" in argv:
        print(f"{command.name} {__version__}")
        return None
    values = command.complete(given_by(command, [word for word in argv if word != "--print-config"]))
    options = assemble(command.schema, values)
    if "--print-config" not in argv:
        for names, why in command.idle(options):
            refuse(options, names, why)
        return options
    import yaml

    tree = tree_of(options) | {name: values[name] for name in ("recipe",) if name in values}
    print(yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, default_flow_style=None), end="")
    return None


def tree_of(options: DataclassInstance) -> Values:
    """Values of options by name, those of a section in a tree of their own."""
    tree: Values = {}
    for item in fields(options):
        if item.name not in getattr(options, "HIDDEN", ()):
            value = getattr(options, item.name)
            tree[item.name] = tree_of(value) if is_dataclass(type(value)) else value
    return tree


def given_by(command: Command[T], argv: list[str]) -> Values:
    """Values by option. The command line overrides a ``--config`` file."""
    known = {**options_of(command.schema), "config": Option("config", str)}
    texts: dict[str, str | list[str]] = {}
    for name, text in _pairs(command, known, argv):
        if name not in known:
            meant = command.positional and any(word.partition("=")[0] == name for word in argv)  # such as "E=mc2?"
            raise UsageError(unknown(name, known) + "; put a text with = in it after --" * bool(meant))
        if known[name].is_repeatable:
            texts[name] = [*texts.get(name, ()), text]
            continue
        if name in texts:
            raise UsageError(f"{name} is given twice: {name}={texts[name]} and {name}={text}")
        if not text.strip():
            raise ValueError(f"{name} is empty: give it a value, or leave it out")
        texts[name] = text
    values = {name: known[name].read(text) for name, text in texts.items()}
    if file := values.pop("config", None):
        return values_of(command, read_yaml(Path(str(file)), f"config={file}"), f" in config={file}") | values
    return values


def _pairs(command: Command[T], known: Mapping[str, Option], argv: list[str]) -> Iterator[tuple[str, str]]:
    """Names and texts of a command line; a name may be unknown."""
    rest, switches = deque(argv), {name for name, option in known.items() if option.is_switch}
    places = chain(command.positional, repeat(command.positional[-1] if command.positional else ""))
    while rest:
        word = rest.popleft()
        word = "--out" if word == "-o" and {"file", "out"} <= known.keys() else word
        if word == "--" and command.positional:
            yield from zip(places, rest, strict=False)  # places never end
            return
        if re.fullmatch(r"-[A-Za-z][\w-]*", word):
            more = ". Put arguments that begin with a dash after --" if command.positional else ""
            raise UsageError(f"unknown option {word!r}: names have two dashes{more}")
        if not re.match(r"--|[A-Za-z_][\w.-]*=", word):
            if not command.positional:
                example = f"{next(iter(known))}=VALUE"
                raise UsageError(f"argument {word!r} must be --key value or key=value, such as {example}")
            yield next(places), word
            continue
        name, equals, text = word.removeprefix("--").partition("=")
        name = name.replace("-", "_")
        name = command.aliases.get(name, name)
        if not equals and name in switches:
            text = rest.popleft() if rest and rest[0] in ("true", "false") else "true"
        elif not equals and name.startswith("no_") and name[3:] in switches:
            name, text = name[3:], "false"
        elif not equals and name in known:
            if not rest or re.match(r"--[a-z][\w.-]*(=|$)", rest[0]):
                raise UsageError(f"{word} needs a value: {word} VALUE or {name}=VALUE")
            text = rest.popleft()
        yield name, text


def unknown(name: str, known: Mapping[str, Option], where: str = "") -> str:
    """Message for an unknown name. It suggests the option of the same last name in a section, or the nearest. For a section it
    lists the fields."""
    if inside := [leaf for leaf in known if leaf.startswith(f"{name}.")]:
        return f"{name}{where} is a section; its fields: {', '.join(inside)}"
    same = [leaf for leaf in known if leaf.endswith(f".{name.rpartition('.')[2]}")]
    return f"unknown key {name!r}{where}.{nearest(same[0] if same else name, known)} --help all lists the options"


def typed(annotation: object, text: str) -> object:
    """A text as a value of an annotation's type, unchecked. ``null`` is None if the annotation allows it. A list is
    ``[a,b]`` or ``a,b``; commas within parentheses or quotes belong to an item. Blanks around a text are its own."""
    kinds, given, text = alternatives(annotation), text, text.strip()
    if text == "null" and type(None) in kinds:
        return None
    for kind in kinds:
        if get_origin(kind) is list:
            inside = text[1:-1] if text.startswith("[") and text.endswith("]") else text
            items = (part.strip("\"'") for part in split_outside(inside, ","))
            return [typed(get_args(kind)[0], item) for item in items if item]
    known = {str(choice): choice for choice in choices(annotation)}
    return known.get(text, text) if known else given if str in kinds else scalar(text)


def values_of(command: Command[T], tree: Values, where: str) -> Values:
    """Valid values by option, from the content of a YAML file.

    Raises:
        ValueError: an unknown name, or a value of a wrong type or out of bounds.
    """
    known, values = options_of(command.schema), flattened(tree)
    for name in values:
        if name not in known:
            raise ValueError(unknown(name, known, where))
    return {name: known[name].read(value, where) for name, value in values.items()}


def flattened(tree: Mapping[str, object], prefix: str = "") -> Values:
    """``{dotted name: value}`` of sections."""
    values: Values = {}
    for key, value in tree.items():
        values |= flattened(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return values
