"""The recipes folder, and ``recipe=NAME key=value ...`` read into a training configuration.

Light, as ``config`` is; an unknown recipe or key is a one-line ValueError that suggests the nearest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from importlib import resources
from pathlib import Path
from typing import Any, get_args, get_type_hints

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from ..cli.command import pairs_of
from ..naming import first_line, nearest
from .train import TrainConfig

USAGE = """usage: locret-train recipe=NAME [key=value ...]

  locret-train recipe=smollm2-135m optim.steps=200 out=runs/mine
  locret-train recipe=phi3-mini data.sources=[path/to/records.jsonl]

Keys that are not given are the recipe's, then the defaults. An unknown key or recipe is an error that names the nearest;
--help lists the keys."""


def load_config(argv: list[str]) -> TrainConfig:
    """The validated configuration of ``recipe=NAME key=value ...``; arguments may come in any order.

    Defaults are the schema's, the recipe overrides them, and the other arguments override the recipe.
    """
    given = pairs_of(argv, "optim.lr=1e-4")
    if not given.get("recipe"):
        raise ValueError(f"recipe=NAME is missing; known recipes: {', '.join(known_recipes())}")
    name, values = read_recipe(given.pop("recipe"))
    schema = dict(leaves(TrainConfig))
    config = OmegaConf.structured(TrainConfig)
    config.recipe = name
    for key, value in values.items():
        _assign(config, schema, key, value, where=f" in recipe {name!r}")
    for key, text in given.items():
        _assign(config, schema, key, _parse(key, text, schema.get(key)))
    if OmegaConf.is_missing(config.backbone, "model") or not config.backbone.model:
        raise ValueError(f"recipe={name} names no model: add backbone.model=NAME (a Hub id or a folder)")
    try:
        result = OmegaConf.to_object(config)
    except OmegaConfBaseException as error:  # an interpolation such as ${no.such.key}
        raise ValueError(first_line(error)) from error
    assert isinstance(result, TrainConfig)
    result.validate()
    return result


def known_recipes() -> list[str]:
    """Names of the recipes that ship."""
    return sorted(file.stem for file in recipes_folder().glob("*.yaml"))


def read_recipe(recipe: str) -> tuple[str, dict[str, Any]]:
    """``(name, {dotted key: value})`` of a recipe that ships, or of the YAML file at a path."""
    if recipe.endswith((".yaml", ".yml")):
        path, name = Path(recipe), Path(recipe).stem
    else:
        path, name = recipes_folder() / f"{recipe}.yaml", recipe
        if recipe not in known_recipes():
            known = known_recipes()
            raise ValueError(f"recipe={recipe} is unknown; known: {', '.join(known)}.{nearest(recipe, known)}")
    try:
        loaded = OmegaConf.create(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"recipe={recipe} cannot be read: {error.strerror}") from error
    except (YAMLError, UnicodeDecodeError, OmegaConfBaseException) as error:
        raise ValueError(f"recipe={recipe} is not valid YAML: {' '.join(str(error).split())}") from error
    if not OmegaConf.is_dict(loaded):
        raise ValueError(f"recipe={recipe} must hold sections of key: value")
    return name, dict(_flatten(OmegaConf.to_container(loaded)))


def recipes_folder() -> Path:
    """Where the recipes that ship lie."""
    try:
        return Path(str(resources.files("locret_recipes")))
    except ModuleNotFoundError:  # not installed: run from a checkout
        return Path(__file__).resolve().parents[2] / "recipes"


def _parse(key: str, text: str, expected: Any) -> Any:
    """A string field takes the text as it is (a revision such as 12e4 is no number); others are YAML."""
    if expected is str or (_is_optional(expected) and str in get_args(expected)):
        return None if text == "null" and _is_optional(expected) else text
    try:
        return OmegaConf.to_container(OmegaConf.create(f"value: {text}"))["value"]  # type: ignore[call-overload,index]
    except (YAMLError, OmegaConfBaseException) as error:
        raise ValueError(f"{key}={text} is not a valid value: {first_line(error)}") from error


def _assign(config: Any, schema: dict[str, Any], key: str, value: Any, where: str = "") -> None:
    if key not in schema:
        inside = [leaf for leaf in schema if leaf.startswith(f"{key}.")]
        if inside:
            raise ValueError(f"{key}{where} is a section; its fields: {', '.join(inside)}")
        raise ValueError(f"unknown key {key!r}{where}.{_suggest(key, list(schema))}")
    if key == "recipe":
        raise ValueError(f"recipe{where} must not be set there: it is the recipe's own name")
    problem = ValueError(f"{key}={value}{where} must be {_type_name(schema[key])}")
    if isinstance(value, bool):  # no field is one, and OmegaConf would take true for the number 1
        raise problem
    try:
        OmegaConf.update(config, key, value)
    except OmegaConfBaseException as error:
        raise problem from error


def _suggest(key: str, known: list[str]) -> str:
    """The nearest key: one of the same name elsewhere, else one of its section, else any; or the section's fields."""
    section, _, name = key.rpartition(".")
    same_name = [leaf for leaf in known if leaf.endswith(f".{name}")]
    inside = [leaf for leaf in known if section and leaf.startswith(f"{section}.")]
    if inside and not same_name and not nearest(name, [leaf.rpartition(".")[2] for leaf in inside]):
        return f" Fields of {section}: {', '.join(inside)}."
    return nearest(same_name[0] if same_name else key, inside or known)


def leaves(schema: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """``(dotted key, type)`` of every field that is not a section."""
    hints = get_type_hints(schema)
    for item in fields(schema):
        if is_dataclass(hints[item.name]):
            yield from leaves(hints[item.name], f"{prefix}{item.name}.")
        else:
            yield prefix + item.name, hints[item.name]


def _flatten(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _is_optional(expected: Any) -> bool:
    return type(None) in get_args(expected)


def _type_name(expected: Any) -> str:
    names = {int: "an integer", float: "a number", str: "a string"}
    if _is_optional(expected):
        return f"{_type_name(get_args(expected)[0])} or null"
    if expected in names:
        return names[expected]
    return "a list of " + {float: "numbers, such as [1,2]", str: "strings, such as [a,b]"}[get_args(expected)[0]]
