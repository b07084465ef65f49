"""A setting of a plan, and one with some of it changed, by the names of either part."""

from dataclasses import fields, replace
from typing import Any

from locret_kit.planning.inference_plan import Setting
from locret_kit.settings import RunSettings

RUN = {item.name for item in fields(RunSettings)}


def setting_of(context: int, budget: int, chunk: int, *rest: Any, **given: Any) -> Setting:
    run = RunSettings(budget=budget, chunk=chunk, **{name: given.pop(name) for name in RUN & given.keys()})
    return Setting(context, run, *rest, **given)


def changed(setting: Setting, **change: Any) -> Setting:
    run = {name: change.pop(name) for name in RUN & change.keys()}
    return replace(setting.with_run(**run), **change)
