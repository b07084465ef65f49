"""The recipes folder, and ``locret-train recipe=NAME key=value ...`` read into a training configuration. No torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import resources
from pathlib import Path

from ..backbones.gguf import bare_name
from ..files import read_yaml
from ..naming import nearest, show
from .schema import Command, UsageError, Values, assemble, given_by, refuse_removed, values_of
from .train_options import TrainConfig

AUTO = "auto"
"""The recipe of a model that is named without one."""
CHOSEN = ("heads.d_hidden", "data.max_tokens", "data.batch")
"""Keys that a recipe may let the device choose."""
Choose = Callable[[Values, Sequence[str]], Values]
"""Makes values of keys from all others."""


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
    """Values for the device that training runs on; says on stderr which, and why.

    Raises:
        ValueError: no such model, or nothing that fits the device. FileNotFoundError: no configuration.
    """
    import torch

    from ..backbones.load import load_config, pick_device, pick_dtype
    from ..planning import fitting_settings as fitting
    from ..planning.inference_plan import BackboneSizes

    cfg = assemble(TrainConfig, values)
    device = pick_device("cpu" if cfg.trainer.accelerator == "cpu" else None)
    on_card = device.type == "cuda"
    memory = torch.cuda.get_device_properties(device).total_memory if on_card else machine_memory()
    config = load_config(cfg.backbone.model, cfg.backbone.revision)
    backbone = BackboneSizes.of(config)
    dtype = str(pick_dtype(cfg.backbone.dtype, device)).removeprefix("torch.")
    width = cfg.heads.d_hidden if "heads.d_hidden" in values else fitting.choose_width(backbone)
    longest = fitting.LONGEST if on_card else fitting.LONGEST_ON_CPU
    longest = min(longest, getattr(config, "max_position_embeddings", longest))
    setting = fitting.TrainSetting(longest, dtype=dtype, d_hidden=width, weight_bits=cfg.backbone.weight_bits)
    tokens = cfg.data.max_tokens if "data.max_tokens" in values else None
    batch = cfg.data.batch if "data.batch" in values else None
    step = fitting.choose_step(
        backbone, setting, memory - fitting.RESERVE, tokens=tokens, batch=batch, samples=cfg.optim.accumulate
    )
    chosen: Values = dict(zip(CHOSEN, (width, step.tokens, step.batch), strict=True))
    words = " ".join(f"{name}={chosen[name]}" for name in names)
    where = torch.cuda.get_device_name(device) if on_card else "this CPU"
    print(
        f"{cfg.backbone.model} ({backbone.parameters / 1e9:.2f}e9 parameters, {dtype}) on {where} ({show(memory)}): chose "
        f"{words}; a step is planned at {show(fitting.plan_training(backbone, step).peak)}",
        file=sys.stderr,
    )
    return {name: chosen[name] for name in names}


def machine_memory() -> int:
    """Bytes of the memory of the machine, or of this container."""
    from ..planning.fitting_settings import container_limit

    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(whole, container_limit() or whole)


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
    refuse_removed(TRAIN, "recipe", recipe)
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
    return Recipe(
        path.stem, low.values | values_of(TRAIN, tree, where), low.choose if choose is None else tuple(choose)
    )


def recipes_folder() -> Path:
    """The folder of the recipes that ship."""
    try:
        return Path(str(resources.files("locret_recipes")))
    except ModuleNotFoundError:  # not installed: run from a checkout
        return Path(__file__).resolve().parents[2] / "recipes"
