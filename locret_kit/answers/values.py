"""Values of arguments: the types that a tool's JSON schema names, and texts that models write without quotes."""

from __future__ import annotations

import ast
import json
from contextlib import suppress
from decimal import Decimal

Schema = dict[str, object]
"""A schema or another object of JSON."""
KINDS = {
    str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object", type(None): "null",
}  # fmt: skip
"""Types of values -> their names in a JSON schema."""


def nested(value: object, *names: str) -> object:
    """The value within objects, by its names from the outside in; None where there is none."""
    for name in names:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def properties_of(schema: Schema) -> Schema:
    """The schemas of arguments by name."""
    return known if isinstance(known := schema.get("properties"), dict) else {}


def resolved(schema: object, root: Schema, depth: int = 8) -> Schema:
    """A schema, or what its reference to a definition of ``root`` leads to; empty where it is none."""
    if not isinstance(schema, dict) or not isinstance(name := schema.get("$ref"), str) or not depth:
        return schema if isinstance(schema, dict) else {}
    return resolved(nested(root, *name.split("/")[1:]), root, depth - 1)


def types_of(schema: object, root: Schema, seen: set[int] | None = None) -> set[str]:
    """Names of the types that a schema says; none where it says nothing."""
    one, seen = resolved(schema, root), seen or set()
    if id(one) in seen:
        return set()
    seen.add(id(one))
    said, values = one.get("type", []), one.get("enum", [one["const"]] if "const" in one else [])
    types = {str(name) for name in (said if isinstance(said, list) else [said])}
    types |= {KINDS[type(value)] for value in (values if isinstance(values, list) else ()) if not types}
    for name in ("anyOf", "oneOf", "allOf"):
        choices = one.get(name)
        types.update(*(types_of(inner, root, seen) for inner in (choices if isinstance(choices, list) else ())))
    return types | ({"null"} if one.get("nullable") else set())


def typed(text: str, types: set[str]) -> object:
    """The value of an argument that is written without quotes: of its types, else the text as it is."""
    for read in (json.loads, ast.literal_eval) if types - {"string"} else ():
        with suppress(ValueError, SyntaxError, LookupError, TypeError, RecursionError, MemoryError, ArithmeticError):
            value = read(text.strip())
            json.dumps(value, allow_nan=False)
            if isinstance(value, float) and "number" not in types and value.is_integer():
                value = int(Decimal(text.strip()))  # a float has no integer beyond 2^53 exactly
            if types & {KINDS[type(value)], "number" if type(value) is int else ""} - {"string"}:
                return value
    return text
