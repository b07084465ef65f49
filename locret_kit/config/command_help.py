"""Help of a command: usage, examples, and every option with its type, meaning and default. No torch."""

from __future__ import annotations

import inspect
import shutil
import textwrap

from ..validation import choices, parts
from .schema import REQUIRED, Command, Option, T, docstrings, options_of

COMMON_OPTIONS = {
    "config": "FILE  read options from a YAML file; those of the command line come before them",
    "print-config": "print every option as it would be used, as YAML that --config reads",
    "version": "print the version",
    "help": "print this",
}


def help_of(command: Command[T]) -> str:
    """Usage, examples, and every option with its type, meaning and default, in groups, as wide as the terminal."""
    width = max(60, min(shutil.get_terminal_size().columns, 120))
    lines = [command.usage.strip()]
    for title, known in groups_of(command):
        lines.append(f"\n{textwrap.fill(title, width)}:")
        lines += [_line(name, option, width) for name, option in known.items()]
    lines.append("\nEvery command:")
    lines += [f"  --{name} {meaning}" for name, meaning in COMMON_OPTIONS.items()]
    lines.append("\n--key value, --key=value and key=value are the same, in any order; - and _ are alike in names.")
    return "\n".join(lines)


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


def _line(name: str, option: Option, width: int) -> str:
    flag, meaning = name.replace("_", "-"), docstrings(option.owner).get(option.field, "")
    if bool in parts(option.annotation):
        head, default = f"--{flag}, --no-{flag}", "yes" if option.default else "no"
    else:
        names = choices(option.annotation)
        head = f"--{flag} " + ("|".join(map(str, names)) if names else name.rpartition(".")[2].upper())
        default = f"[{','.join(map(str, option.default))}]" if isinstance(option.default, list) else str(option.default)
    if option.default is REQUIRED:
        meaning += " Required."
    elif option.default is not None:
        meaning += f" (default: {default})"
    indent = " " * 6
    return f"  {head}\n" + textwrap.fill(meaning, width, initial_indent=indent, subsequent_indent=indent)
