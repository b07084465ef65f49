"""The budget of a text for which nobody named one: a quarter of it, within what window and memory allow."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..backbones.probe import describe
from ..backbones.spec import text_config
from ..policies.policy import Policy
from ..settings import RunSettings
from .fitting_settings import STEP, largest
from .inference_plan import Setting, cache_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from transformers import PreTrainedModel

SHARE = 4
"""Tokens of the text per slot. ``docs/results`` has what a quarter finds, and what less does."""
MEMORY = 2
"""Keys and values may take one part in so many of the free memory."""
MEMINFO, CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


def budget_of_text(
    model: PreTrainedModel,
    policy: Policy,
    run: RunSettings,
    published: Mapping[str, object],
    tokens: int,
    turns: int = 0,
) -> tuple[int, str]:
    """Slots for a text of so many tokens, and one line that says why.

    A quarter of the text, and never less than without a text: the heads' published budget, or ``settings.BUDGET``. Above
    that, no more than compact positions have room for in the backbone's window, nor than half of the free memory holds. A
    conversation's ``turns`` have slots beside it.
    """
    least = run.resolved(published, tokens)
    assert isinstance(least.budget, int)
    limits = {"a quarter of them": tokens // SHARE}
    window = getattr(text_config(model), "max_position_embeddings", None)
    if window is not None and least.positions in (None, "compact"):
        limits[f"as many as the model's window of {window} takes beside a chunk"] = window - least.chunk - turns
    free = free_memory(model.device)
    if free is not None and tokens // SHARE > least.budget:
        spec, dtype = describe(model).spec, str(model.dtype).removeprefix("torch.")

        def fits(more: int) -> bool:
            setting = Setting(tokens, least, dtype=dtype, policy=policy).with_run(budget=least.budget + STEP * more)
            return cache_bytes(spec, setting) <= free // MEMORY

        more = largest(fits, tokens // SHARE // STEP)
        limits[f"as many as half of the free {free / 2**30:.1f} GiB holds"] = least.budget + STEP * more
    reason, budget = min(limits.items(), key=lambda item: item[1])
    if budget <= least.budget:
        reason, budget = "the least that a text gets", least.budget
    return budget, f"budget: {budget} slots for {tokens} tokens, {reason}; --budget N takes another"


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
    if (limit := container_limit()) is None:
        return free
    try:
        used = int((CGROUP / "memory.current").read_text(encoding="ascii"))
        stat = dict(line.split() for line in (CGROUP / "memory.stat").read_text(encoding="ascii").splitlines())
        used -= int(stat.get("inactive_file", 0))  # the cache of files gives way
    except (OSError, ValueError):  # a container that says its bound alone
        used = 0
    return min(free, limit - used)


def container_limit() -> int | None:
    """Bytes that this container may take; None where nothing bounds them."""
    try:
        return int((CGROUP / "memory.max").read_text(encoding="ascii"))
    except (OSError, ValueError):  # no cgroup v2, or "max"
        return None
