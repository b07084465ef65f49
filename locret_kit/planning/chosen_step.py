"""Width of the heads, length of the samples and batch of a training, chosen for a model and the memory of a device."""

from __future__ import annotations

from dataclasses import replace

from ..sizes import show
from .backbone_sizes import BackboneSizes, head_parameters
from .fitting_settings import DoesNotFit, largest_sample
from .training_plan import TrainSetting, plan_training

WIDTHS = (64, 128, 256, 512, 1024)
"""The largest is the paper's for models of 4 and 8 billion parameters."""
SHARE = 0.06
"""Largest part of the model's parameters that heads take: the demo's take 0.055."""
LONGEST, LONGEST_ON_CPU = 10240, 2048
"""Tokens of a sample: the paper's, and the demo's, whose steps take seconds on a CPU."""
SHORTEST = 256
"""Samples that are chosen are a multiple of this."""


def choose_width(backbone: BackboneSizes) -> int:
    """The largest of ``WIDTHS`` with which the heads take ``SHARE`` of the parameters; the smallest where none does."""
    fitting = [width for width in WIDTHS if head_parameters(backbone.spec, width) <= SHARE * backbone.parameters]
    return max(fitting, default=WIDTHS[0])


def choose_step(
    backbone: BackboneSizes,
    setting: TrainSetting,
    cap: int,
    *,
    tokens: int | None,
    batch: int | None,
    max_tokens: int,
    samples: int,
) -> TrainSetting:
    """The step with the longest samples that ``cap`` bytes hold, and then the most of them in one forward.

    Args:
        setting: dtype, width and weight bits. tokens, batch: where they are given. max_tokens: of a sample.
        samples: of an optimiser step, which the batch divides.

    Raises:
        DoesNotFit: a sample of ``SHORTEST`` tokens, or the one that is given, is above the cap.
    """
    own = replace(setting, batch=batch or 1)
    length = tokens or largest_sample(backbone, own, cap, max_tokens) // SHORTEST * SHORTEST
    own = replace(own, tokens=max(length, SHORTEST))
    if (peak := plan_training(backbone, own).peak) > cap:
        weights = plan_training(backbone, own).weights
        raise DoesNotFit(
            f"a training step of {own} needs {show(peak)}, {show(weights)} of them weights, above the {show(cap)} of the device: "
            "choose backbone.weight_bits=4, a smaller model or a larger card"
        )
    if batch is None:
        batches = [n for n in range(1, samples + 1) if samples % n == 0]
        fitting = [n for n in batches if plan_training(backbone, replace(own, batch=n)).peak <= cap]
        own = replace(own, batch=max(fitting))
    return own
