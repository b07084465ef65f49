"""Trials: settings of several sets of heads that learn from the same forwards. Knows no model, imports no torch."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path

from ..naming import nearest
from .recipes import recipes_folder
from .schema import Values, build
from .train_config import TrainConfig
from .yaml_values import flattened, read_yaml, values_of

OWN = ("heads.", "target.", "loss.", "infer.", "optim.lr", "optim.betas", "optim.weight_decay")
"""Settings that a trial may have by itself: everything else decides what the forwards are, or when they are made."""


def trials_of(config: TrainConfig) -> dict[str, TrainConfig]:
    """The configuration of every trial by name, ``NAME@RATE`` where ``trials.rates`` has learning rates: what would train the
    same heads alone. Without ``trials.file`` the one that is given, named ''.

    Raises:
        ValueError: an unknown trial, a setting that trials share, or what the schema refuses.
    """
    if config.trials.file is None:
        return {"": config}
    path, tree = read_trials(config.trials.file)
    if unknown := [name for name in config.trials.only if name not in tree]:
        raise ValueError(
            f"trials.only={unknown[0]} is unknown; {path.name} has: {', '.join(tree)}.{nearest(unknown[0], tree)}"
        )
    shared = flattened(asdict(config)) | {"trials.file": None, "trials.only": [], "trials.rates": [], "resume": "never"}
    trials: dict[str, TrainConfig] = {}
    for name in config.trials.only or tree:
        own = settings_of(name, tree[name], path)
        rates: dict[str, Values] = {f"{name}@{rate:g}": {"optim.lr": rate} for rate in config.trials.rates}
        for full, rate in (rates or {name: {}}).items():
            try:
                trials[full] = build(TrainConfig, {**shared, **own, **rate, "out": f"{config.out}/{full}"})
            except ValueError as error:
                raise ValueError(f"trial {full}: {error}") from error
    return trials


def read_trials(file: str) -> tuple[Path, dict[str, Values]]:
    """The file of a name in ``recipes/trials``, or at a path, and what it holds by trial."""
    folder = recipes_folder() / "trials"
    path = Path(file) if file.endswith((".yaml", ".yml")) else folder / f"{file}.yaml"
    known = sorted(one.stem for one in folder.glob("*.yaml"))
    if not file.endswith((".yaml", ".yml")) and file not in known:
        raise ValueError(
            f"trials.file={file} must be the path of a YAML file, or one of {', '.join(known)}.{nearest(file, known)}"
        )
    trials: dict[str, Values] = {}
    for name, values in read_yaml(path, f"trials.file={file}").items():
        if not isinstance(values, dict) or not re.fullmatch(r"[\w.-]+", str(name)):
            raise ValueError(
                f"trials.file={file}: {name!r} must be a name of letters, digits, -, _ and . and hold sections"
            )
        trials[str(name)] = values
    return path, trials


def settings_of(name: str, tree: Values, path: Path) -> Values:
    """A trial's checked values by option."""
    where = f" in trial {name!r} of {path.name}"
    values = values_of(TrainConfig, tree, where)
    if shared := [key for key in values if not key.startswith(OWN)]:
        raise ValueError(
            f"{shared[0]}{where} is shared by all trials: a trial may set heads, target, loss, infer, optim.lr, optim.betas "
            "and optim.weight_decay"
        )
    return values
