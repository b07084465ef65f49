"""The recipes folder, and ``locret-train recipe=NAME key=value ...`` read into a training configuration. No torch."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import resources
from pathlib import Path

from ..backbones.gguf import bare_name
from ..files import read_yaml
from ..naming import nearest
from .schema import Command, UsageError, Values, assemble, given_by, values_of
from .train_options import TrainConfig

AUTO = "auto"
"""The recipe of a model that is named without one."""
CHOSEN = ("heads.d_hidden", "data.max_tokens")
"""Keys that a recipe may let the device choose."""
Choose = Callable[[Values, Sequence[str]], Values]
"""Makes values of keys from all others."""
LONGEST, LONGEST_ON_CPU = 10240, 2048
"""Tokens of a sample: the paper's, and the demo's, whose steps take seconds on a CPU."""


@dataclass(frozen=True)
class Recipe:
    """A YAML file of settings, with those of its base."""

    name: str
    values: Values
    """Values by dotted key."""
    choose: tuple[str, ...] = ()
    """Keys of ``CHOSEN`` that depend on the device if they are not given."""


def with_recipe(given: Values, choose: Choose | None = None) -> Values:
    """The recipe's values, and the ``given`` ones over them; those that it lets the device choose are left to ``choose``.

    Raises:
        ValueError: no recipe, an unknown one, or no backbone.
    """
    if not given.get("recipe"):
        if not given.get("backbone.model"):
            raise UsageError(
                f"recipe=NAME is missing, or model=NAME for recipe={AUTO}; known recipes: {', '.join(known_recipes())}"
            )
        given = {"out": f"runs/{bare_name(str(given['backbone.model']))}", **given, "recipe": AUTO}
    recipe = read_recipe(str(given["recipe"]))
    values = recipe.values | given
    if not values.get("backbone.model"):
        raise ValueError(f"recipe={recipe.name} names no model: add backbone.model=NAME (a Hub id or a folder)")
    names = [name for name in recipe.choose if name not in values]
    return values | (choose(values, names) if choose is not None and names else {})


def choose_for_device(values: Values, names: Sequence[str]) -> Values:
    """Values for the model and the device that training runs on; says on stderr which.

    Raises:
        ValueError: no such model. FileNotFoundError: no configuration.
    """
    from ..backbones.load import load_config, pick_device
    from ..planning.backbone_sizes import BackboneSizes, choose_width

    cfg = assemble(TrainConfig, values)
    config = load_config(cfg.backbone.model, cfg.backbone.revision)
    on_card = pick_device("cpu" if cfg.trainer.accelerator == "cpu" else None).type == "cuda"
    longest = LONGEST if on_card else LONGEST_ON_CPU
    chosen: Values = {
        "heads.d_hidden": choose_width(BackboneSizes.of(config)),
        "data.max_tokens": min(longest, getattr(config, "max_position_embeddings", longest)),
    }
    chosen = {name: chosen[name] for name in names}
    words = " ".join(f"{name}={value}" for name, value in chosen.items())
    print(f"{cfg.backbone.model} on {'a GPU' if on_card else 'this CPU'}: chose {words}", file=sys.stderr)
    return chosen


MAIN = "backbone.model out data.sources data.max_tokens heads.d_hidden optim.steps optim.lr trainer.devices resume"
TRAIN = Command(
    "locret-train",
    TrainConfig,
    "recipe=NAME [key=value ...]\n       locret-train model=NAME [key=value ...]",
    ("recipe", *MAIN.split()),
    aliases={"model": "backbone.model"},
    complete=partial(with_recipe, choose=choose_for_device),
)


def load_config(argv: list[str]) -> TrainConfig:
    """The validated configuration of ``recipe=NAME key=value ...``, with arguments in any order.

    The recipe overrides the schema's defaults, and the other arguments override the recipe. Nothing is chosen for a
    device.
    """
    return assemble(TrainConfig, with_recipe(given_by(TRAIN, argv)))


def known_recipes() -> list[str]:
    """Names of the shipped recipes."""
    return sorted(file.stem for file in recipes_folder().glob("*.yaml"))


def read_recipe(recipe: str, below: tuple[str, ...] = ()) -> Recipe:
    """A shipped recipe, or the YAML file at a path. Missing values come from its ``base: NAME``.

    Raises:
        ValueError: no such recipe, invalid content, or a circle of bases.
    """
    path = Path(recipe) if recipe.endswith((".yaml", ".yml")) else recipes_folder() / f"{recipe}.yaml"
    if not recipe.endswith((".yaml", ".yml")) and recipe not in (known := known_recipes()):
        raise ValueError(f"recipe={recipe} is unknown; known: {', '.join(known)}.{nearest(recipe, known)}")
    if recipe in below:
        raise ValueError(f"base={recipe} in recipe {below[-1]!r} leads back to itself: {' -> '.join((*below, recipe))}")
    tree, where = read_yaml(path, f"recipe={recipe}"), f" in recipe {path.stem!r}"
    if "recipe" in tree:
        raise ValueError(f"recipe{where} must not be set there: it is the recipe's own name")
    base, choose = tree.pop("base", None), tree.pop("choose", None)
    if not isinstance(base, str | None):
        raise ValueError(f"base={base!r}{where} must be a recipe's name")
    if choose is not None and not (isinstance(choose, list) and set(map(str, choose)) <= set(CHOSEN)):
        raise ValueError(f"choose={choose}{where} must be a list of some of: {', '.join(CHOSEN)}")
    low = Recipe(path.stem, {}) if base is None else read_recipe(base, (*below, recipe))
    chosen = low.choose if choose is None else tuple(choose)
    return Recipe(path.stem, low.values | values_of(TRAIN, tree, where), chosen)


def recipes_folder() -> Path:
    """The folder of the recipes that ship."""
    try:
        return Path(str(resources.files("locret_recipes")))
    except ModuleNotFoundError:  # not installed: run from a checkout
        return Path(__file__).resolve().parents[2] / "recipes"
