"""Products with matrices in few bits, in one call (``cpu.cpp``): as the definition but for activations in 8 bits.

Activations have a step per 32 numbers, their largest over 127. llama.cpp does the same, for formats of blocks of 256 with a step
per 256 numbers.
"""

from pathlib import Path

import torch
from torch import Tensor

from .. import cpp
from .. import product as reference

SOURCE = Path(__file__).with_name("cpu.cpp")


def load(form: str, *options: str) -> cpp.Library:
    """The compiled calls for a format, by options of the compiler besides the usual ones.

    Raises:
        cpp.Unavailable: another system, no compiler, or one that fails.
    """
    return cpp.load(SOURCE, f"-DFORMAT={form}", *options)


def product(x: Tensor, data: Tensor, form: str, bias: Tensor | None = None) -> Tensor:
    """``x [..., K]`` times packed rows, plus ``bias [N]``: shape ``[..., N]``, compiled; see the definition,
    ``product``."""
    if x.dtype not in cpp.DTYPES:
        return reference.product(x, data, form, bias)
    reference.check_packed(x, data, form)
    x, data, K, N = x.contiguous(), data.contiguous(), x.shape[-1], len(data)
    bias = None if bias is None else bias.to(x.dtype).expand(N).contiguous()  # what else it is would be misread
    out = x.new_empty(*x.shape[:-1], N)
    load(form).locret_product(
        cpp.address(x, x.dtype), cpp.address(data, torch.uint8), cpp.address(bias, x.dtype), x.numel() // K, K, N,
        cpp.address(out, x.dtype), cpp.TYPES[x.dtype], torch.get_num_threads(),
    )  # fmt: skip
    return out
