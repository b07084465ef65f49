"""The recipes folder, and ``locret-train recipe=NAME key=value ...`` read into a training configuration. No torch."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from ..naming import nearest
from .command_line import given_by
from .schema import Command, UsageError, Values, build
from .train_config import TrainConfig
from .yaml_values import read_yaml, values_of

USAGE = """usage: locret-train recipe=NAME [key=value ...]

  locret-train recipe=smollm2-135m optim.steps=200 out=runs/mine
  locret-train recipe=phi3-mini data.sources=[path/to/records.jsonl]

Keys that are not given are the recipe's, then the defaults. An unknown key or recipe is an error that names the nearest;
--help lists the keys."""


def with_recipe(given: Values) -> Values:
    """The recipe's values, and the ``given`` ones over them.

    Raises:
        ValueError: no recipe, an unknown one, or no backbone.
    """
    if not given.get("recipe"):
        raise UsageError(f"recipe=NAME is missing; known recipes: {', '.join(known_recipes())}")
    name, values = read_recipe(str(given["recipe"]))
    values |= given
    if not values.get("backbone.model"):
        raise ValueError(f"recipe={name} names no model: add backbone.model=NAME (a Hub id or a folder)")
    return values


TRAIN = Command("locret-train", TrainConfig, USAGE, complete=with_recipe)


def load_config(argv: list[str]) -> TrainConfig:
    """The validated configuration of ``recipe=NAME key=value ...``; arguments may come in any order.

    Defaults are the schema's, the recipe overrides them, and the other arguments override the recipe.
    """
    return build(TrainConfig, with_recipe(given_by(TRAIN, argv)))


def known_recipes() -> list[str]:
    """Names of the recipes that ship."""
    return sorted(file.stem for file in recipes_folder().glob("*.yaml"))


def read_recipe(recipe: str) -> tuple[str, Values]:
    """``(name, {dotted key: value})`` of a recipe that ships, or of the YAML file at a path."""
    path = Path(recipe) if recipe.endswith((".yaml", ".yml")) else recipes_folder() / f"{recipe}.yaml"
    if not recipe.endswith((".yaml", ".yml")) and recipe not in (known := known_recipes()):
        raise ValueError(f"recipe={recipe} is unknown; known: {', '.join(known)}.{nearest(recipe, known)}")
    tree = read_yaml(path, f"recipe={recipe}")
    if "recipe" in tree:
        raise ValueError(f"recipe in recipe {path.stem!r} must not be set there: it is the recipe's own name")
    return path.stem, values_of(TrainConfig, tree, f" in recipe {path.stem!r}")


def recipes_folder() -> Path:
    """The folder of the recipes that ship."""
    try:
        return Path(str(resources.files("locret_recipes")))
    except ModuleNotFoundError:  # not installed: run from a checkout
        return Path(__file__).resolve().parents[2] / "recipes"
