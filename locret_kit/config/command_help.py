"""Help of a command: usage, examples, and its main options in a line or two each; or every option. No torch."""

from __future__ import annotations

import inspect
import re
import shutil
import textwrap

from ..validation import choices, parts
from .schema import REQUIRED, Command, Option, T, docstrings, options_of

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


def help_of(command: Command[T], argv: list[str]) -> str:
    """The help that the words of a command line ask for."""
    return full_help(command) if "all" in argv else short_help(command)


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
