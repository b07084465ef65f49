"""YAML files as values of options, and back. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ..validation import checked, parts
from .schema import Command, T, Values, options_of, refuse_gone, typed, unknown


def read_yaml(path: Path, said: str) -> Values:
    """A YAML file of ``name: value``.

    Raises:
        ValueError: it cannot be read, is no YAML or holds something else; begins with ``said``.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        """Refuses what would not be read as it is written: keys that are there twice, and aliases."""

        def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
            if self.check_event(yaml.AliasEvent):
                raise yaml.YAMLError("aliases are not read")
            return super().compose_node(parent, index)

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[object, object]:
            names = [key.value for key, _ in node.value if isinstance(key.value, str)]
            if twice := [name for name in names if names.count(name) > 1]:
                raise yaml.YAMLError(f"{twice[0]} is there twice")
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
    """Checked values by option, of what a YAML file holds.

    Raises:
        ValueError: an unknown name, or a value of a wrong type or out of bounds.
        UsageError: a name, a section or a value that there is no more.
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
