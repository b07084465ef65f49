"""The largest settings that fit a number of bytes."""

from __future__ import annotations

import os
import re
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import torch
from annotated_types import Ge
from transformers import PreTrainedModel

from ..backbones.probe import describe
from ..backbones.spec import text_config
from ..backbones.weights import check_weight_bits, weight_bits_of
from ..cache.bounded import BoundedCache
from ..naming import UNITS, show
from ..policies import Policy
from ..settings import Resolved
from ..validation import validate, validate_fields
from .inference_plan import (
    ITEM_BYTES,
    BackboneSizes,
    Dtype,
    Plan,
    Setting,
    cache_bytes,
    head_parameters,
    plan_inference,
)

# ---- memory of a training step, predicted from a transformers configuration alone -----------------------------------


Positive = Annotated[int, Ge(1)]


@dataclass(frozen=True)
class TrainSetting:
    """One training step on one device that holds everything: samples of ``tokens``, ``answer`` of them the answer."""

    tokens: Positive
    answer: Positive = 64
    batch: Positive = 1
    """Samples of one forward (``data.batch``), padded to the longest."""
    dtype: str = "bfloat16"
    """Type of the backbone; heads, their gradients and AdamW's two moments are float32."""
    d_hidden: Positive = 1024
    block: Positive = 64
    """Answer queries that the target reads at a time (`column_max`)."""
    weight_bits: int | None = None
    """Bits of a weight in the backbone's layers; None is ``dtype``."""

    def __post_init__(self) -> None:
        validate_fields(self)
        if self.answer >= self.tokens:
            raise ValueError(f"answer={self.answer} must be below tokens={self.tokens}")
        check_weight_bits(self.weight_bits)
        validate("dtype", Dtype, self.dtype)

    def __str__(self) -> str:
        samples = f"{self.batch} samples of " if self.batch > 1 else ""
        return f"{samples}{self.tokens} tokens, {self.answer} of them the answer"


def plan_training(backbone: BackboneSizes, setting: TrainSetting) -> Plan:
    """Memory of one step: a forward of the frozen backbone. One head of one sample at a time holds a graph.

    ``tests/training/test_plan_train.py`` measures whole steps on a CPU in float32: the prediction is within 2% of the peak. A
    CPU's matrix products need scratch in bfloat16, up to twice their output. It is not counted.
    """
    spec, item, T, B = backbone.spec, ITEM_BYTES[setting.dtype], setting.tokens, setting.batch
    prompt, heads = T - setting.answer, head_parameters(spec, setting.d_hidden)
    trained = heads // spec.n_layers * spec.windows.count(None)  # heads of windowed layers get no gradient
    q, k = T * spec.n_heads * spec.head_dim, T * spec.n_kv_heads * spec.head_dim
    always = backbone.stream(B * T) + 2 * spec.head_dim * T * len(set(spec.windows))  # and what the backbone rotates by
    layer = always + B * ((q + 2 * k) + (q + k) + (q + k if backbone.fused else 0))  # before and after RoPE
    logits = spec.n_heads * min(setting.block, setting.answer) * T  # of a block; beside them the last one's, or a copy
    inputs = spec.qkv_dim * max(
        2 * item, 4 if item == 4 else item + 4
    )  # of a token, as they are and in the heads' float32
    phases = {
        "rotate": (layer + 3 * q) * item,
        "target": layer * item + 4 * (2 * logits + k),
        "head": layer * item + prompt * max(inputs, 4 * (spec.qkv_dim + 2 * setting.d_hidden)),
        "mlp": always * item + backbone.mlp(B * T, item, setting.weight_bits),
    }
    if setting.weight_bits is not None:
        phases["project"] = backbone.projection(B * T, item, setting.weight_bits, always, layer + B * q)
    if B > 1:
        phases["attend"] = (layer + B * (q + k) + B * q) * item  # what was rotated alone, together, and the output
    return Plan(
        weights=backbone.weights(item, setting.weight_bits),
        heads=4 * (heads + 3 * trained),
        cache=0,
        phases=phases | {"optimiser": 4 * trained},
    )


# ---- settings that fit a number of bytes ----


STEP = 64
"""Budgets and chunks that are proposed are multiples of this."""
RESERVE = 2**30
"""Bytes kept free for the CUDA context, libraries and fragmentation: an assumption."""


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


# ---- width of the heads, length of the samples and batch of a training, chosen for a model and the memory of a device


WIDTHS = (64, 128, 256, 512, 1024)
"""The largest is the paper's for models of 4 and 8 billion parameters."""
SHARE = 0.06
"""Largest part of the model's parameters that heads take: the demo's take 0.055."""
LONGEST, LONGEST_ON_CPU = 10240, 2048
"""Tokens of a sample: the paper's, and the demo's, whose steps take seconds on a CPU."""
SHORTEST = 256
"""Samples that are chosen are a multiple of this."""


def choose_width(backbone: BackboneSizes) -> int:
    """The largest of ``WIDTHS`` whose heads take at most ``SHARE`` of the parameters; the smallest if none does."""
    widths = [width for width in WIDTHS if head_parameters(backbone.spec, width) <= SHARE * backbone.parameters]
    return max(widths, default=WIDTHS[0])


def choose_step(
    backbone: BackboneSizes, setting: TrainSetting, cap: int, *, tokens: int | None, batch: int | None, samples: int
) -> TrainSetting:
    """The step with the longest samples that ``cap`` bytes hold, and then the most of them in one forward.

    Args:
        setting: dtype, width, weight bits, and the most tokens of a sample. tokens, batch: where they are given.
        samples: of an optimiser step, which the batch divides.

    Raises:
        DoesNotFit: a sample of ``SHORTEST`` tokens, or the one that is given, is above the cap.
    """

    def plan(tokens: int, batch: int) -> Plan:
        return plan_training(backbone, replace(setting, tokens=tokens, batch=batch))

    least, low = batch or 1, setting.answer + 1
    if tokens is None:
        more = largest(lambda n: plan(low + n, least).peak <= cap, setting.tokens - low)
        tokens = max((low + more) // SHORTEST, 1) * SHORTEST
    needed = plan(tokens, least)
    if needed.peak > cap:
        raise DoesNotFit(
            f"a training step of {replace(setting, tokens=tokens, batch=least)} needs {show(needed.peak)}, "
            f"{show(needed.weights)} of them weights, above the {show(cap)} of the device: "
            "choose backbone.weight_bits=4, a smaller model or a larger card"
        )
    batches = [n for n in range(1, samples + 1) if samples % n == 0 and plan(tokens, n).peak <= cap]
    return replace(setting, tokens=tokens, batch=batch or max(batches))


# ---- what to say when a run's memory runs out -----------------------------------------------------------------------


FIGURES = {
    "asked": "Tried to allocate {}", "free": "of which {} is free", "held": "{} is allocated by PyTorch",
    "spare": "{} is reserved by PyTorch but unallocated", "allowed": "{} allowed",
}  # fmt: skip
"""Figures of PyTorch's message, and the words around each; ``allowed`` may be missing."""


class OutOfMemory(RuntimeError, MemoryError):
    """The device ran out of memory. The message has the requested and the free bytes, and which budget and chunk fit."""


@dataclass(frozen=True)
class explain_oom:
    """A block that turns an out-of-memory error of a run into an ``OutOfMemory`` with settings that fit. It is a class, because a
    generator's context that raises leaves a cycle from Python 3.12 on. That cycle would keep the run's memory alive."""

    model: PreTrainedModel
    cache: BoundedCache
    tokens: int

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, torch.OutOfMemoryError):
            raise OutOfMemory(_advice(str(error), self.model, self.cache, self.tokens)) from error
        match = re.search(r"tried to allocate (\d+) bytes", str(error))  # a CPU's words
        if isinstance(error, RuntimeError) and match:
            budget, asked = self.cache.schedule.budget, show(int(match[1]))
            raise OutOfMemory(
                f"out of memory: {asked} were asked for at once, with budget={budget}: a smaller one takes less"
            ) from error


def _advice(message: str, model: PreTrainedModel, cache: BoundedCache, tokens: int) -> str:
    """One line from PyTorch's message and the run's own setting."""
    figures = allocator_figures(message)
    if figures is None:
        return message.splitlines()[0]
    asked, free, held = figures
    setting = Setting(
        tokens, cache.settings, dtype=str(model.dtype).removeprefix("torch."),
        d_hidden=cache.heads.config.d_hidden if cache.heads is not None else 0, policy=cache.policy,
        weight_bits=weight_bits_of(model),
    )  # fmt: skip
    backbone, room = BackboneSizes.of(text_config(model)), held + free
    if (planned := plan_inference(backbone, setting).peak) <= room:  # the plan was too low by as much as was asked
        room = planned - asked
    return (
        f"out of memory: {show(asked)} were asked for and {show(free)} were free beside the {show(held)} of this run, "
        f"with {setting} at context {tokens}; {fitting(backbone, setting, room)}"
    )


def allocator_figures(message: str) -> tuple[int, int, int] | None:
    """``(asked, free, held)`` in bytes from PyTorch's out-of-memory message; None for another message. Free memory is on the
    device, or below the run's own cap, and includes the allocator's reserve."""
    figures = {
        name: int(float(match[1]) * UNITS[match[2].replace("bytes", "B")])
        for name, pattern in FIGURES.items()
        if (match := re.search(pattern.format(r"([\d.]+) (bytes|[KMGT]iB)"), message))
    }
    if FIGURES.keys() - figures.keys() - {"allowed"}:
        return None
    free, held = figures["free"] + figures["spare"], figures["held"]
    return figures["asked"], min(free, max(0, figures.get("allowed", free + held) - held)), held


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
