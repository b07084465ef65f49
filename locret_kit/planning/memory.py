"""What to say when a run's memory runs out."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..backbones.spec import text_config
from ..backbones.weight_bits import weight_bits_of
from ..cache.bounded import BoundedCache
from ..sizes import UNITS, show
from .backbone_sizes import BackboneSizes
from .fitting_settings import listed, nearest_fitting
from .inference_plan import Setting, plan_inference

if TYPE_CHECKING:
    from transformers import PreTrainedModel


SIZE = r"([\d.]+) (bytes|[KMGT]iB)"


class OutOfMemory(RuntimeError):
    """The device ran out of memory; the message says what was asked, what was free, and settings that fit."""


@dataclass(frozen=True)
class explain_oom:
    """A block in which an out-of-memory error of a run becomes an ``OutOfMemory`` that says what would fit. A class, since from
    Python 3.12 on a generator's context that raises leaves a cycle, which holds what ran out of memory."""

    model: PreTrainedModel
    cache: BoundedCache
    tokens: int

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, torch.OutOfMemoryError):
            raise OutOfMemory(_advice(str(error), self.model, self.cache, self.tokens)) from error
        if isinstance(error, RuntimeError) and (
            asked := re.search(r"tried to allocate (\d+) bytes", str(error))
        ):  # a CPU's
            said = (
                f"out of memory: {show(int(asked[1]))} were asked for at once, with budget={self.cache.schedule.budget}"
            )
            raise OutOfMemory(f"{said}: a smaller one takes less") from error


def _advice(said: str, model: PreTrainedModel, cache: BoundedCache, tokens: int) -> str:
    """One line from PyTorch's message and the run's own setting."""
    figures = allocator_figures(said)
    config = text_config(model)
    if figures is None:
        return said.splitlines()[0]
    setting = Setting(
        tokens, cache.settings, dtype=str(model.dtype).removeprefix("torch."),
        d_hidden=cache.heads.config.d_hidden if cache.heads is not None else 0, policy=cache.policy,
        weight_bits=weight_bits_of(model),
    )  # fmt: skip
    backbone = BackboneSizes.of(config)
    words, room = shortage(figures, plan_inference(backbone, setting).peak)
    near = listed(backbone, nearest_fitting(backbone, setting, room))
    fitting = f"These fit: {near}" if near else "No setting of this policy fits"
    return f"{words}, with {setting} at context {tokens}. {fitting}"


def shortage(figures: tuple[int, int, int], planned: int) -> tuple[str, int]:
    """Words for an allocation that failed, and the bytes that a plan may take instead of the ``planned`` ones."""
    asked, free, in_use = figures
    words = (
        f"out of memory: {show(asked)} were asked for and {show(free)} were free beside the {show(in_use)} of this run"
    )
    room = in_use + free  # or the plan was too low by as much as was asked
    return words, room if planned > room else planned - asked


def allocator_figures(said: str) -> tuple[int, int, int] | None:
    """``(asked, free, held)`` in bytes from PyTorch's out-of-memory message; None where it says something else. Free is what
    the run could still have had: of the device, or below its own cap, with what the allocator had in reserve."""

    def size(pattern: str) -> int | None:
        match = re.search(pattern, said)
        return None if match is None else int(float(match[1]) * UNITS[match[2].replace("bytes", "B")])

    asked, free = size(f"Tried to allocate {SIZE}"), size(f"of which {SIZE} is free")
    in_use, spare = size(f"{SIZE} is allocated by PyTorch"), size(f"{SIZE} is reserved by PyTorch but unallocated")
    if asked is None or free is None or in_use is None or spare is None:
        return None
    allowed = size(f"{SIZE} allowed")
    free += spare
    return asked, free if allowed is None else min(free, max(0, allowed - in_use)), in_use
