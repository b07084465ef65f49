"""The largest settings that fit a number of bytes."""

import warnings
from bisect import bisect_right
from collections.abc import Callable

from ..naming import show
from ..policies.base import PolicyWarning
from .backbone_sizes import BackboneSizes
from .inference_plan import Plan, Setting, plan_inference

STEP = 64
"""Budgets and chunks that are proposed are multiples of this."""


class DoesNotFit(ValueError):
    """A plan above its cap; the message names settings that would fit."""


def largest(fits: Callable[[int], bool], max_value: int) -> int:
    """The largest value in ``1..max_value`` that fits; 0 if none does. ``fits`` must stay false once it is false. Nothing warns
    of the values between, which nobody has chosen."""
    with warnings.catch_warnings(action="ignore", category=PolicyWarning):
        return bisect_right(range(1, max_value + 1), False, key=lambda n: not fits(n))


def largest_budget(backbone: BackboneSizes, setting: Setting, cap: int) -> int:
    """The largest budget (a multiple of ``STEP``, at most the context) that fits ``cap`` bytes at the setting's chunk; 0 if none
    does. Lengths that were made for the setting's budget shrink with it."""
    lengths = {"stabilizers": setting.run.stabilizers, "local_len": setting.run.local_len}

    def resized(budget: int) -> Setting:
        scaled = {name: n and min(n, n * budget // setting.budget) for name, n in lengths.items()}
        return setting.with_run(budget=budget, **scaled)

    return _largest_setting(backbone, cap, setting.context, resized)


def largest_chunk(backbone: BackboneSizes, setting: Setting, cap: int) -> int:
    """The largest chunk (likewise) that fits ``cap`` bytes at the setting's budget; 0 if none does."""
    return _largest_setting(backbone, cap, setting.context, lambda n: setting.with_run(chunk=n))


def _largest_setting(backbone: BackboneSizes, cap: int, max_value: int, sized: Callable[[int], Setting]) -> int:
    return STEP * largest(lambda n: plan_inference(backbone, sized(STEP * n)).peak <= cap, max_value // STEP)


def fitting(backbone: BackboneSizes, setting: Setting, cap: int) -> str:
    """Words for the largest budget and the largest chunk, each alone, that fit ``cap`` bytes."""
    if not setting.evicts:
        return f"policy={setting.policy.name!r} evicts nothing, so no budget helps"
    budget = largest_budget(backbone, setting, cap)
    chunk = 0 if setting.run.one_shot else largest_chunk(backbone, setting, cap)
    words = [f"budget {budget} at chunk {setting.chunk}"] * bool(budget)
    words += [f"chunk {chunk} at budget {setting.budget}"] * bool(chunk)
    return " or ".join(words or ["no smaller budget or chunk"]) + " fits"


def require_fit(backbone: BackboneSizes, setting: Setting, cap: int) -> Plan:
    """The plan, if it fits ``cap`` bytes.

    Raises:
        DoesNotFit: with the largest budget and chunk that would fit.
    """
    plan = plan_inference(backbone, setting)
    if plan.peak <= cap:
        return plan
    weights = f"weights and heads alone take {show(plan.weights + plan.heads)}"
    raise DoesNotFit(
        f"{setting} at context {setting.context} needs {show(plan.peak)}, above the cap of {show(cap)}; {weights}; "
        f"{fitting(backbone, setting, cap)}"
    )
