"""Options of a command from a dataclass: their help, and their values from a command line and from YAML.

An option's type and bounds are its field's annotation, and the docstring under the field is its help. A field that
is a dataclass is a section with dotted names. Fields in ``HIDDEN`` are no options. A command line has ``--key
value``, ``--key=value`` or ``key=value``, in any order. No torch.
"""

from __future__ import annotations

import ast
import inspect
import operator
import re
import shutil
import textwrap
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import cache
from itertools import chain, pairwise, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar, get_args, get_origin

from ..naming import nearest, split_outside
from ..settings import annotations_of, checked, choices, metadata_of, parts

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")
Values = dict[str, object]
REQUIRED = object()


class UsageError(ValueError):
    """Arguments that are no options of the command."""


class Repeatable:
    """Metadata of a list whose option is repeated for each item. Commas belong to the item."""


@dataclass(frozen=True)
class Command(Generic[T]):
    """A command's name, options and help."""

    name: str
    schema: type[T]
    usage: str
    """Usage and examples, for ``--help``."""
    main: tuple[str, ...] = ()
    """Options that ``--help`` shows, in order, at most ten; () shows all."""
    notes: str = ""
    """Text below the usage of ``--help all``."""
    positional: tuple[str, ...] = ()
    """Options that positional arguments set, in order; the last takes all remaining ones."""
    short: Mapping[str, str] = field(default_factory=dict)
    """Options by short flag, such as ``{"-o": "--out"}``."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Options by alias."""
    gone: Mapping[str, str] = field(default_factory=dict)
    """Removed options, sections and values (``name=value``), and their replacements."""
    complete: Callable[[Values], Values] = dict
    """Function that completes the given values before the options are built."""


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
            owner = next(kind for kind in schema.__mro__ if item.name in inspect.get_annotations(kind))
            options[item.name] = Option(annotation, REQUIRED if default is MISSING else default, owner, item.name)
    return options


@cache
def docstrings(schema: type) -> dict[str, str]:
    """Docstrings of the annotated fields of a class and its bases, on one line each."""
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
    """Build the dataclass from values by option; other fields keep their defaults.

    Raises:
        ValueError: an option without a default is missing, or the schema refuses the values.
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
    """Raise ValueError for the first of these options that was given: it ``has no effect``, with the reason."""
    known = options_of(type(options))
    for name in names:
        if (value := getattr(options, name)) != known[name].default:
            flag = name.replace("_", "-")
            shown = value[0] if isinstance(value, list) else value
            words = f"--{'' if value else 'no-'}{flag}" if isinstance(value, bool) else f"--{flag} {shown}"
            raise ValueError(f"{words} has no effect {why}")


COMMON_OPTIONS = {
    "config": "FILE  read options from a YAML file; the command line overrides them",
    "print-config": "print every option as it would be used, as YAML that --config reads",
    "version": "print the version",
    "help": "[all]  print this; with all, every option",
}
HEAD = 26
"""Width in columns of an option's name and value in the short help."""


def short_help(command: Command[T]) -> str:
    """Usage, examples and the main options, each with the first sentence of its help and its default."""
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
    """Usage, examples, and every option with its type, help and default, in groups."""
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
    """Width of the terminal in columns, from 60 to 120."""
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
    """An option and its value, in the form of a command line."""
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


def read(command: Command[T], argv: list[str]) -> T | None:
    """The options that the words of a command line give; None after ``--help``, ``--help all``, ``--version`` or
    ``--print-config``, which it answers on stdout.

    Raises:
        UsageError: an unknown option, suggests the nearest; one without a value, or given twice.
        ValueError: a value of a wrong type or out of bounds; a file that cannot be read.
    """
    if {"-h", "--help"} & set(argv):
        print(full_help(command) if "all" in argv else short_help(command))
        return None
    if "--version" in argv:
        from .. import __version__

        print(f"{command.name} {__version__}")
        return None
    printing = "--print-config" in argv
    values = command.complete(given_by(command, [word for word in argv if word != "--print-config"]))
    options = build(command.schema, values)
    if printing:
        import yaml

        tree = {name: operator.attrgetter(name)(options) for name in options_of(command.schema)} | {
            name: values[name] for name in ("recipe",) if name in values
        }
        print(yaml.safe_dump(nested(tree), sort_keys=False, allow_unicode=True, default_flow_style=None), end="")
        return None
    return options


def given_by(command: Command[T], argv: list[str]) -> dict[str, object]:
    """Values by option. The command line overrides a ``--config`` file."""
    known = options_of(command.schema) | {"config": Option(str, None, Command, "")}
    texts: dict[str, list[str]] = {}
    for name, text in _pairs(command, known, argv):
        refuse_gone(command.gone, name, text)
        if name not in known:
            meant = command.positional and any(word.partition("=")[0] == name for word in argv)  # such as "E=mc2?"
            raise UsageError(unknown(name, known) + "; put a text with = in it after --" * bool(meant))
        texts.setdefault(name, []).append(text)
    values: dict[str, object] = {}
    for name, words in texts.items():
        annotation = known[name].annotation
        if any(isinstance(item, Repeatable) for item in metadata_of(annotation)):
            values[name] = checked(name, annotation, words)
            continue
        if len(words) > 1:
            raise UsageError(f"{name} is given twice: {name}={words[0]} and {name}={words[1]}")
        if not words[0].strip():
            raise ValueError(f"{name} is empty: give it a value, or leave it out")
        values[name] = checked(name, annotation, typed(annotation, words[0]))
    if file := values.pop("config", None):
        below = values_of(command, read_yaml(Path(str(file)), f"config={file}"), f" in config={file}")
        values = below | values
    return values


def _pairs(command: Command[T], known: Mapping[str, Option], argv: list[str]) -> Iterator[tuple[str, str]]:
    rest, switches = deque(argv), {name for name, option in known.items() if bool in parts(option.annotation)}
    places = chain(command.positional, repeat(command.positional[-1])) if command.positional else repeat("")
    while rest:
        word = rest.popleft()
        word = command.short.get(word, word)
        if word == "--" and command.positional:
            yield from zip(places, rest, strict=False)  # places never end
            return
        dashes = word.startswith("--")
        if re.fullmatch(r"-[A-Za-z][\w-]*", word):
            more = ". Put arguments that begin with a dash after --" if command.positional else ""
            raise UsageError(f"unknown option {word!r}: names have two dashes{more}")
        if not dashes and not re.match(r"[A-Za-z_][\w.-]*=", word):
            if not command.positional:
                numbers = (f"{name}={option.default}" for name, option in known.items() if type(option.default) is int)
                raise UsageError(
                    f"argument {word!r} must be --key value or key=value, such as {next(numbers, 'key=1')}"
                )
            yield next(places), word
            continue
        name, equals, text = word[2 * dashes :].partition("=")
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
    """Message for an unknown name. It suggests the nearest option: with the same last name elsewhere, in its
    section, or any. For a section it lists the fields."""
    inside = [leaf for leaf in known if leaf.startswith(f"{name}.")]
    if inside:
        return f"{name}{where} is a section; its fields: {', '.join(inside)}"
    section, _, last = name.rpartition(".")
    same = [leaf for leaf in known if leaf.endswith(f".{last}")]
    beside = [leaf for leaf in known if section and leaf.startswith(f"{section}.")]
    if beside and not same and not nearest(last, [leaf.rpartition(".")[2] for leaf in beside]):
        return f"unknown key {name!r}{where}. Fields of {section}: {', '.join(beside)}."
    near = nearest(same[0] if same else name, beside or known)
    return f"unknown key {name!r}{where}.{near} --help all lists the options"


def refuse_gone(gone: Mapping[str, str], name: str, value: object, where: str = "") -> None:
    """Raise UsageError for a removed name, section or ``name=value``, with its replacement."""
    for word in (name, name.partition(".")[0], f"{name}={value}"):
        if word in gone:
            shown = f"--{word.replace('_', '-')}" if word == name and word.isidentifier() else word
            raise UsageError(f"{shown}{where} was removed: {gone[word]}")


def typed(annotation: object, text: str) -> object:
    """A text as a value of an annotation's type, unchecked. ``null`` is None if the annotation allows it."""
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
    """The number or boolean of a text, or the text itself."""
    if re.fullmatch(r"[+-]?\d{1,300}", text):
        return int(text)
    try:
        return float(text)
    except ValueError:
        return {"true": True, "false": False}.get(text, text)


def split_list(text: str) -> list[str]:
    """The items of ``[a,b]`` or ``a,b``; commas within parentheses belong to an item: ``kvcrush(base=h2o,anchor=mean)``."""
    inside = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    return [item for part in split_outside(inside, ",") if (item := part.strip("\"'"))]


def read_yaml(path: Path, said: str) -> Values:
    """Read a YAML file of ``name: value``.

    Raises:
        ValueError: it cannot be read, is no YAML or holds something else; the message begins with ``said``.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        """Refuses duplicate keys and aliases."""

        def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
            if self.check_event(yaml.AliasEvent):
                raise yaml.YAMLError("aliases are not read")
            return super().compose_node(parent, index)

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[object, object]:
            names = [key.value for key, _ in node.value if isinstance(key.value, str)]
            if twice := [name for name in names if names.count(name) > 1]:
                raise yaml.YAMLError(f"{twice[0]} occurs twice")
            return super().construct_mapping(node, deep)

    try:
        loaded = yaml.load(path.read_text(encoding="utf-8"), Loader)
    except OSError as error:
        raise ValueError(f"{said} cannot be read: {error.strerror}") from error
    except RecursionError:
        raise ValueError(f"{said} is not valid YAML: it is nested too deeply") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: an integer of thousands of digits, wrong UTF-8
        raise ValueError(f"{said} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(loaded, dict):
        raise ValueError(f"{said} must hold sections of key: value")
    return loaded


def values_of(command: Command[T], tree: Values, where: str) -> Values:
    """Checked values by option, from the content of a YAML file.

    Raises:
        ValueError: an unknown name, or a value of a wrong type or out of bounds.
        UsageError: a removed name, section or value.
    """
    known, values = options_of(command.schema), Values()
    for name, value in flattened(tree).items():
        refuse_gone(command.gone, name, value, where)
        if name not in known:
            raise ValueError(unknown(name, known, where))
        kinds = list(parts(known[name].annotation))
        if isinstance(value, str) and str not in kinds:  # such as 1e-4, which YAML takes for a text
            value = typed(known[name].annotation, value)
        elif str in kinds and type(value) in (int, float):
            value = str(value)
        try:
            values[name] = checked(name, known[name].annotation, value)
        except ValueError as error:
            raise ValueError(str(error).replace(" must be", f"{where} must be", 1)) from None
    return values


def flattened(tree: Mapping[str, object], prefix: str = "") -> Values:
    """``{dotted name: value}`` of sections."""
    values: Values = {}
    for key, value in tree.items():
        values |= flattened(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return values


def nested(values: Mapping[str, object]) -> Values:
    """Sections of dotted names."""
    tree: Values = {}
    for name, value in values.items():
        *sections, last = name.split(".")
        at = tree
        for section in sections:
            at = at.setdefault(section, {})  # type: ignore[assignment]
        at[last] = value
    return tree
