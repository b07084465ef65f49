"""The largest settings that fit a number of bytes."""

from __future__ import annotations

import os
import re
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from ..backbones.probe import describe
from ..backbones.spec import text_config
from ..cache.bounded import BoundedCache
from ..naming import show
from ..policies import Policy
from ..settings import Resolved
from .inference_plan import BackboneSizes, Plan, Setting, cache_bytes, head_parameters, plan_inference

# ---- settings that fit a number of bytes ----


STEP = 64
"""Budgets and chunks that are proposed are multiples of this."""


class DoesNotFit(ValueError):
    """A plan above its cap; the message names settings that would fit."""


def largest(fits: Callable[[int], bool], max_value: int) -> int:
    """The largest value in ``1..max_value`` that fits; 0 if none does. ``fits`` must stay false once it is false."""
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


# ---- width of the heads and length of the samples of a training -------------------------------------------------------


WIDTHS = (64, 128, 256, 512, 1024)
"""The largest is the paper's for models of 4 and 8 billion parameters."""
SHARE = 0.06
"""Largest part of the model's parameters that heads take: the demo's take 0.055."""
LONGEST, LONGEST_ON_CPU = 10240, 2048
"""Tokens of a sample: the paper's, and the demo's, whose steps take seconds on a CPU."""


def choose_width(backbone: BackboneSizes) -> int:
    """The largest of ``WIDTHS`` whose heads take at most ``SHARE`` of the parameters; the smallest if none does."""
    widths = [width for width in WIDTHS if head_parameters(backbone.spec, width) <= SHARE * backbone.parameters]
    return max(widths, default=WIDTHS[0])


# ---- what to say when a run's memory runs out -----------------------------------------------------------------------


class OutOfMemory(RuntimeError, MemoryError):
    """The device ran out of memory. The message has the bytes that were asked for, the budget and the chunk."""


@dataclass(frozen=True)
class explain_oom:
    """A block that turns an out-of-memory error of a run into an ``OutOfMemory``. It is a class, because a generator's context
    that raises leaves a cycle from Python 3.12 on. That cycle would keep the run's memory alive."""

    cache: BoundedCache

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        asked = re.search(r"ried to allocate ([\d.]+ ?(?:bytes|[KMGT]iB))", str(error))  # a card's words, or a CPU's
        if not isinstance(error, RuntimeError) or not (asked or isinstance(error, torch.OutOfMemoryError)):
            return
        needed, schedule = f"{asked[1]} were asked for, " if asked else "", self.cache.schedule
        raise OutOfMemory(
            f"out of memory: {needed}with budget={schedule.budget} and chunk={schedule.chunk}; "
            "locret-plan prints the largest that fit"
        ) from error


# ---- the budget of a text for which nobody named one ----------------------------------------------------------------

# A quarter of it, within what window and memory allow.


PER_SLOT = 4
"""Tokens of the text per slot. ``docs/results`` has the scores at a quarter and below."""
FREE_SHARE = 2
"""Divisor of the free memory, for the bytes that keys and values may take."""
MEMINFO, CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


def budget_of_text(
    model: PreTrainedModel, policy: Policy, least: Resolved, tokens: int, turns: int = 0
) -> tuple[int, str]:
    """Slots for a text of ``tokens`` tokens, and one line with the reason.

    A quarter of the text, but at least the budget without a text, that of ``least``. Above it, at most the room that compact
    positions have in the backbone's window, and at most half of the free memory. The ``turns`` of a conversation have slots in
    addition.
    """
    limits = {"a quarter of them": tokens // PER_SLOT}
    window = getattr(text_config(model), "max_position_embeddings", None)
    if window is not None and least.positions in (None, "compact"):
        limits[f"as many as the model's window of {window} takes beside a chunk"] = window - least.chunk - turns
    free = free_memory(model.device)
    if free is not None and tokens // PER_SLOT > least.budget:
        spec, dtype = describe(model).spec, str(model.dtype).removeprefix("torch.")

        def fits(more: int) -> bool:
            setting = Setting(tokens, least, dtype=dtype, policy=policy).with_run(budget=least.budget + STEP * more)
            return cache_bytes(spec, setting) <= free // FREE_SHARE

        more = largest(fits, tokens // PER_SLOT // STEP)
        limits[f"as many as half of the free {free / 2**30:.1f} GiB holds"] = least.budget + STEP * more
    limit, budget = min(limits.items(), key=lambda item: item[1])
    if budget <= least.budget:
        limit, budget = "the least that a text gets", least.budget
    return budget, f"budget: {budget} slots for {tokens} tokens, {limit}; --budget N takes another"


def free_memory(device: torch.device) -> int | None:
    """Bytes that a device has free: of a CUDA device, or of this machine and container; None where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = dict(line.split(":") for line in MEMINFO.read_text(encoding="ascii").splitlines())
        free = int(lines["MemAvailable"].split()[0]) * 2**10
    except (OSError, KeyError, ValueError):
        pages = "SC_PHYS_PAGES" if "SC_PHYS_PAGES" in os.sysconf_names else None
        return os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE") // 2 if pages else None
    try:
        limit = int((CGROUP / "memory.max").read_text(encoding="ascii"))
    except (OSError, ValueError):  # no cgroup v2, or "max"
        return free
    try:
        used = int((CGROUP / "memory.current").read_text(encoding="ascii"))
        stat = dict(line.split() for line in (CGROUP / "memory.stat").read_text(encoding="ascii").splitlines())
        used -= int(stat.get("inactive_file", 0))  # the cache of files gives way
    except (OSError, ValueError):  # a container that says its bound alone
        used = 0
    return min(free, limit - used)
