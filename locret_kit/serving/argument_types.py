"""Arguments of tools that models write without quotes, as values of their schemas' types."""

from __future__ import annotations

import ast
import json
from contextlib import suppress

from .messages import JsonObject

KINDS = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
    type(None): "null",
}
"""Types of values -> their names in a JSON schema."""


def properties_of(schema: JsonObject) -> JsonObject:
    """The schemas of arguments by name."""
    known = schema.get("properties")
    return known if isinstance(known, dict) else {}


def resolved(schema: object, root: JsonObject, depth: int = 8) -> JsonObject:
    """A schema, or what its reference to a definition of ``root`` leads to; empty where it is none."""
    named = schema.get("$ref") if isinstance(schema, dict) and depth else None
    if not isinstance(named, str):
        return schema if isinstance(schema, dict) else {}
    found: object = root
    for step in named.removeprefix("#").split("/")[1:]:
        found = found.get(step) if isinstance(found, dict) else None
    return resolved(found, root, depth - 1)


def types_of(schema: object, root: JsonObject, seen: set[int] | None = None) -> set[str]:
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
        with suppress(ValueError, SyntaxError, LookupError, TypeError, RecursionError, MemoryError, OverflowError):
            value = read(text.strip())
            json.dumps(value, allow_nan=False)
            if isinstance(value, float) and "number" not in types and value.is_integer():
                value = int(value)
            if types & {KINDS[type(value)], "number" if type(value) is int else ""} - {"string"}:
                return value
    return text
