"""Values of arguments: the types that a tool's JSON schema names, texts that models write without quotes, and Python's calls."""

import ast
import json
from contextlib import suppress
from decimal import Decimal

import regex

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


def check_json(value: object) -> None:
    """Raise ValueError for a value that JSON in UTF-8 cannot say: NaN, an infinity, half of a surrogate pair. RecursionError: one
    that is nested too deeply."""
    json.dumps(value, ensure_ascii=False, allow_nan=False).encode()


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


def typed(text: str, types: set[str], *, python: bool = True) -> object:
    """The value of an argument that is written without quotes: of its types, else the text as it is.

    Args:
        python: whether a value that may be a text too can be written as Python has it, such as ``None``.
    """
    reads = (json.loads, ast.literal_eval) if python or "string" not in types else (json.loads,)
    for read in reads if types - {"string"} else ():
        with suppress(ValueError, SyntaxError, LookupError, TypeError, RecursionError, MemoryError, ArithmeticError):
            check_json(value := read(text.strip()))
            if isinstance(value, float) and "number" not in types and value.is_integer():
                value = int(Decimal(text.strip()))  # a float has no integer beyond 2^53 exactly
            if types & {KINDS[type(value)], "number" if type(value) is int else ""} - {"string"}:
                return value
    return text


NAME = r"[^\W\d]\w*(?:[-.]\w+)*"
SIGN = regex.compile(
    rf"""(?s)(?P<text>"(?:[^"\\]|\\.)*+"|'(?:[^'\\]|\\.)*+')|(?P<call>{NAME})\s*\(|(?P<key>{NAME})\s*=|(?P<end>\))|"""
    r"(?P<word>True|False|None)\b"
)
"""Parts of Python's calls that JSON writes in another way."""
ESCAPE = regex.compile(
    r"""(?s)\\(?:(?P<same>["\\/bfnrt]|u[\da-fA-F]{4})|x(?P<byte>[\da-fA-F]{2})|(?P<other>.))|(?P<quote>")"""
)
WORDS = {"True": "true", "False": "false", "None": "null"}


def python_calls(text: str) -> list[Schema]:
    """Names and arguments of a list of calls, as Python writes them: ``[depth(place="north", days=3)]``.

    Raises:
        ValueError: it is something else, such as a call with an argument that has no name.
    """

    def escape(found: regex.Match[str]) -> str:
        if found["same"] or found["other"] == "'":
            return found["other"] or found[0]
        return '\\"' if found["quote"] else f"\\u00{found['byte']}" if found["byte"] else f"\\{found[0]}"

    def json_of(found: regex.Match[str]) -> str:
        if found["text"]:
            return f'"{ESCAPE.sub(escape, found[0][1:-1])}"'
        if name := found["call"]:
            return f'{{"name": "{name}", "arguments": {{'
        return f'"{found["key"]}": ' if found["key"] else "}}" if found["end"] else WORDS[found[0]]

    made = json.loads(SIGN.sub(json_of, text), strict=False)
    names = sum(found["call"] is not None for found in SIGN.finditer(text))
    if not isinstance(made, list) or len(made) != names:
        raise ValueError("this is no list of calls")
    return made
