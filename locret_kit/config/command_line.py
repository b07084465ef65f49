"""One reader for the options of every command: ``--key value``, ``--key=value`` or ``key=value``, in any order; and their help.
No torch."""

from __future__ import annotations

import inspect
import operator
import re
import shutil
import textwrap
from collections import deque
from collections.abc import Iterator, Mapping
from itertools import chain, repeat
from pathlib import Path

from ..validation import checked, choices, metadata_of, parts
from .schema import (
    REQUIRED,
    Command,
    Option,
    Repeatable,
    T,
    UsageError,
    Values,
    build,
    docstrings,
    options_of,
    refuse_gone,
    typed,
    unknown,
)
from .yaml_values import nested, read_yaml, values_of

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


def given_by(command: Command[T], argv: list[str]) -> Values:
    """Values by option, those of a ``--config`` file below those of the command line."""
    known = options_of(command.schema) | {"config": Option(str, None, Command, "")}
    texts: dict[str, list[str]] = {}
    for name, text in _pairs(command, known, argv):
        refuse_gone(command.gone, name, text)
        if name not in known:
            meant = command.positional and any(word.partition("=")[0] == name for word in argv)  # such as "E=mc2?"
            raise UsageError(unknown(name, known) + "; a text with = in it stands behind --" * bool(meant))
        texts.setdefault(name, []).append(text)
    values: Values = {}
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
        below = values_of(command.schema, read_yaml(Path(str(file)), f"config={file}"), f" in config={file}")
        values = below | values
    return values


def _pairs(command: Command[T], known: Mapping[str, Option], argv: list[str]) -> Iterator[tuple[str, str]]:
    rest = deque(argv)
    places = chain(command.positional, repeat(command.positional[-1])) if command.positional else repeat("")
    while rest:
        word = rest.popleft()
        word = command.short.get(word, word)
        if word == "--" and command.positional:
            yield from zip(places, rest, strict=False)  # places never end
            return
        dashes = word.startswith("--")
        if re.fullmatch(r"-[A-Za-z][\w-]*", word):
            more = ". What begins with one goes after --" if command.positional else ""
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
        if not equals and _is_switch(known, name):
            text = rest.popleft() if rest and rest[0] in ("true", "false") else "true"
        elif not equals and name.startswith("no_") and _is_switch(known, name[3:]):
            name, text = name[3:], "false"
        elif not equals and name in known:
            if not rest or re.match(r"--[a-z][\w.-]*(=|$)", rest[0]):
                raise UsageError(f"{word} needs a value: {word} VALUE or {name}=VALUE")
            text = rest.popleft()
        yield name, text


def _is_switch(known: Mapping[str, Option], name: str) -> bool:
    return name in known and bool in parts(known[name].annotation)
