"""The default budget of a text: a quarter of its tokens, within the bounds of window and memory."""

import math
import os
from pathlib import Path

import torch
from transformers import PreTrainedModel

from ..backbones.probe import describe
from ..backbones.spec import text_config
from ..policies import Policy
from ..processes import control_groups
from ..settings import Resolved
from .fitting_settings import STEP, largest
from .inference_plan import Setting, cache_bytes

PER_SLOT = 4
"""Tokens of the text per slot. ``docs/results`` has the scores at a quarter and below."""
FREE_SHARE = 2
"""Divisor of the free memory, for the bytes that keys and values may take."""
MEMINFO = Path("/proc/meminfo")


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
    return int(min(free, *map(_room, control_groups())))


def _room(group: Path) -> float:
    """Bytes that processes of a control group may take besides what they have; infinite where it has no bound."""
    try:
        limit = int((group / "memory.max").read_text(encoding="ascii"))
    except (OSError, ValueError):  # no cgroup v2, or "max"
        return math.inf
    try:
        used = int((group / "memory.current").read_text(encoding="ascii"))
        stat = dict(line.split() for line in (group / "memory.stat").read_text(encoding="ascii").splitlines())
        used -= int(stat.get("inactive_file", 0))  # the cache of files gives way
    except (OSError, ValueError):  # a container that says its bound alone
        used = 0
    return limit - used
