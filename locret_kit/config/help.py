"""``--help`` of the commands that take ``key=value``: every key of a schema, its default and the docstring under it."""

from __future__ import annotations

import ast
import inspect
import shutil
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from itertools import pairwise
from typing import Any, get_type_hints

from omegaconf import MISSING as REQUIRED

INDENT = 6


def help_of(usage: str, schema: type) -> str:
    """The usage, and ``key=default`` with what the key means below it, in the schema's order, as wide as the terminal."""
    width = max(60, min(shutil.get_terminal_size().columns, 120))
    pad = " " * INDENT
    return f"{usage}\n\nKeys with their defaults:\n\n" + "\n".join(
        f"  {key}={default}\n" + textwrap.fill(meaning, width, initial_indent=pad, subsequent_indent=pad)
        for key, default, meaning in keys_of(schema)
    )


def keys_of(schema: type, prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """``(dotted key, default as it would be typed, meaning)`` of every field; a key without a default has ``...``."""
    hints, meanings = get_type_hints(schema), _docstrings(schema)
    for item in fields(schema):
        if is_dataclass(hints[item.name]):
            yield from keys_of(hints[item.name], f"{prefix}{item.name}.")
        else:
            yield prefix + item.name, _typed(item), meanings.get(item.name, "")


def _typed(item: Field) -> str:
    value: Any = item.default if item.default_factory is MISSING else item.default_factory()
    if value is MISSING or value == REQUIRED:
        return "..."
    if isinstance(value, list):
        return f"[{','.join(map(str, value))}]"
    return {"None": "null", "True": "true", "False": "false"}.get(str(value), str(value))


def _docstrings(schema: type) -> dict[str, str]:
    """The string under each annotated field, of the class and of those that it extends, on one line each."""
    found: dict[str, str] = {}
    for kind in filter(is_dataclass, reversed(schema.__mro__)):
        (made,) = ast.parse(inspect.getsource(kind)).body
        assert isinstance(made, ast.ClassDef)
        for above, below in pairwise(made.body):
            match above, below:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    found[name] = " ".join(text.split())
    return found
