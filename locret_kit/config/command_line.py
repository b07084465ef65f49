"""One reader for the options of every command: ``--key value``, ``--key=value`` or ``key=value``, in any order. No torch."""

from __future__ import annotations

import operator
import re
from collections import deque
from collections.abc import Iterator, Mapping
from itertools import chain, repeat
from pathlib import Path

from ..validation import checked, metadata_of, parts
from .schema import Command, Option, Repeatable, T, UsageError, build, help_of, options_of, refuse_gone, typed, unknown
from .yaml_values import nested, read_yaml, values_of


def read(command: Command[T], argv: list[str]) -> T | None:
    """The options that the words of a command line give; None after ``--help``, ``--help all``, ``--version`` or
    ``--print-config``, which it answers on stdout.

    Raises:
        UsageError: an unknown option, suggests the nearest; one without a value, or given twice.
        ValueError: a value of a wrong type or out of bounds; a file that cannot be read.
    """
    if {"-h", "--help"} & set(argv):
        print(help_of(command, argv))
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
    """dict[str, object] by option, those of a ``--config`` file below those of the command line."""
    known = options_of(command.schema) | {"config": Option(str, None, Command, "")}
    texts: dict[str, list[str]] = {}
    for name, text in _pairs(command, known, argv):
        refuse_gone(command.gone, name, text)
        if name not in known:
            meant = command.positional and any(word.partition("=")[0] == name for word in argv)  # such as "E=mc2?"
            raise UsageError(unknown(name, known) + "; a text with = in it stands behind --" * bool(meant))
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
