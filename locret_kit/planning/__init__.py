"""Memory of a run before it is run: sizes, plans, and the largest setting that fits.

Here, without torch: how long the reading of a text takes, judged before it begins.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel

LONG = 4096
"""Tokens of a text whose reading is worth a measurement."""
MEASURED = 128
"""Tokens of a measurement on a CPU; other devices are as fast as they can be in a whole chunk alone."""


def reading_time(model: PreTrainedModel, ids: Sequence[int], chunk: int) -> str | None:
    """Words for the time that the reading of a long text will take, from the rate of its first tokens in a plain forward.

    Args:
        model: the backbone, not attached. chunk: tokens that are read at once.
    """
    if len(ids) < LONG:
        return None
    import torch

    from ..backbones.spec import decoder_of

    tokens = min(chunk, len(ids), MEASURED if model.device.type == "cpu" else chunk)
    ids_BT = torch.tensor([list(ids[:tokens])], device=model.device)
    seconds = []
    with torch.inference_mode():
        for _ in range(2):  # the first one prepares memory and kernels
            began = time.perf_counter()
            last = decoder_of(model)(input_ids=ids_BT, use_cache=False)[0]
            last[0, -1, 0].item()  # waits for the device
            seconds.append(time.perf_counter() - began)
    rate = tokens / min(seconds)
    return f"{len(ids):,} tokens take about {duration(len(ids) / rate)}, at the {rate:.0f} tok/s of the first {tokens}"


def duration(seconds: float) -> str:
    """A time in its largest fitting unit: "40 s", "12 min", "3.5 h"."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
