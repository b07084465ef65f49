"""Keys and values of rows in floating point of 8 bits (E4M3: sign, 4 bits of exponent, 3 of mantissa), a scale for each head.

A number is read back as ``code * scale``, within 1/16 of itself wherever it is above a 28,672nd of the largest, which is 448
times the scale. A head's scale is a power of two, so scaling rounds nothing, and is fixed by the first tokens of a text that are
read together: the largest number among them is ``MARGIN`` times below the largest code. A number beyond that is clipped, and
counted.

A row is quantised as it enters and never again, so it moves as it is. A decoded token's attention reads the codes as they lie;
a chunk's reads all rows in the model's dtype, its own too as they are stored.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from locret_kernels.ragged_decode import Float8Rows

from .codec import Codec, Column
from .layouts import Index, Shapes

LARGEST = torch.finfo(torch.float8_e4m3fn).max
MARGIN = 4.0
"""How far a number may be above the largest of the first tokens; one bit of 17 in the range of a code."""


def scale_of(x_BHTD: Tensor) -> Tensor:
    """Scale ``[B, H]`` (float32, a power of two) of heads with such numbers."""
    most_BH = x_BHTD.abs().amax((2, 3)).float().clamp(min=2.0**-100)
    exponent_BH = torch.frexp(most_BH * (MARGIN / LARGEST)).exponent
    return ((exponent_BH + 127) << 23).view(torch.float32)  # 2 to that power, exactly


class Float8(Codec):
    """Keys and values in 8 bits."""

    keys: Tensor
    """Codes as uint8, which every operation can move, and so are the values'."""
    values: Tensor
    key_scale: Tensor
    """``[B, H]`` float32, and so is the values'."""
    value_scale: Tensor
    clipped: Tensor
    """``[2]`` int64: numbers of keys and of values that were beyond the largest code."""

    def columns(self) -> dict[str, Column]:
        return {"keys": (torch.uint8, (self.key_size,)), "values": (torch.uint8, (self.value_size,))}

    def tables(self) -> Shapes:
        scale = torch.float32, (self.layout.B, self.layout.H)
        return {"key_scale": scale, "value_scale": scale, "clipped": (torch.int64, (2,))}

    def begin(self) -> None:
        self.key_scale.fill_(1)
        self.value_scale.fill_(1)
        self.clipped.zero_()

    def write(self, at: Index, k_BHTD: Tensor, v_BHTD: Tensor) -> None:
        for number, (codes, scale_BH, x) in enumerate(
            ((self.keys, self.key_scale, k_BHTD), (self.values, self.value_scale, v_BHTD))
        ):
            # The first tokens fix a head's scale for good: rows are never written a second time.
            if not self.layout.rows:
                scale_BH[:] = scale_of(x)
            y = x.float() / scale_BH[..., None, None]
            self.clipped[number] += (y.abs() > LARGEST).sum()
            codes[at] = y.clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn).view(torch.uint8)

    def read(self, name: str, at: Index) -> Tensor:
        codes, scale_BH = (self.keys, self.key_scale) if name == "keys" else (self.values, self.value_scale)
        scale_BH11 = scale_BH[..., None, None].to(self.dtype)
        return codes[at].view(torch.float8_e4m3fn).to(self.dtype).mul_(scale_BH11)

    def flat(self) -> Float8Rows:
        keys, values = self.keys.flatten(0, -2), self.values.flatten(0, -2)
        return Float8Rows(keys, values, self.key_scale.flatten(), self.value_scale.flatten())

    def clear(self) -> None:
        if hasattr(self, "clipped"):
            self.clipped.zero_()

    # ---- taken out and put back ------------------------------------------------------------------------------------

    def export(self, rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in self.tables()}

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        for name in self.tables():
            getattr(self, name).copy_(tensors[name])
