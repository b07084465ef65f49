"""Rows of one layer in floating point of 8 bits (E4M3: sign, 4 bits of exponent, 3 of mantissa), a scale for each head.

A number is read back as ``code * scale``, within 1/16 of itself wherever it is above a 28,672nd of the largest, which is 448
times the scale. A head's scale is a power of two, so scaling rounds nothing, and is fixed by the first tokens of a text that are
read together: the largest number among them is ``MARGIN`` times below the largest code. A number beyond that is clipped, and
counted.

A row is quantised as it enters and never again, so it moves as it is. A decoded token's attention reads the codes as they lie;
a chunk's reads all rows in the model's dtype, its own too as they are stored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from locret_kernels.ragged_decode import Float8Rows

from .rows import BoundedLayer, Column, Layout

BITS = 8
LARGEST = torch.finfo(torch.float8_e4m3fn).max
MARGIN = 4.0
"""How far a number may be above the largest of the first tokens; one bit of 17 in the range of a code."""
SCALES = 2 * 4
"""Bytes of a head's two scales."""
COUNTS = 2 * 8
"""Bytes of the counts of clipped keys and values."""


def scale_of(x_BHTD: Tensor) -> Tensor:
    """Scale ``[B, H]`` (float32, a power of two) of heads with such numbers."""
    most_BH = x_BHTD.abs().amax((2, 3)).float().clamp(min=2.0**-100)
    exponent_BH = torch.frexp(most_BH * (MARGIN / LARGEST)).exponent
    return ((exponent_BH + 127) << 23).view(torch.float32)  # 2 to that power, exactly


class Float8Layer(BoundedLayer):
    """Rows of one layer in 8 bits, the same number in every head."""

    keys: Tensor
    """``[B, H, capacity, D]``: codes as uint8, which every operation can move, and so are the values'."""
    key_scale: Tensor
    """``[B, H]`` float32, and so is the values'."""
    value_scale: Tensor
    clipped: Tensor
    """``[2]`` int64: numbers of keys and of values that were beyond the largest code."""

    def columns(self) -> dict[str, Column]:
        codes: dict[str, Column] = {
            "keys": (torch.uint8, (self.key_size,)),
            "values": (torch.uint8, (self.value_size,)),
        }
        return super().columns() | codes

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        with torch.inference_mode(False):
            self.key_scale, self.value_scale = torch.ones(2, self.B, self.H, device=self.device)
            self.clipped = torch.zeros(2, dtype=torch.int64, device=self.device)

    def _write(self, new: slice | Tensor, k: Tensor, v: Tensor) -> None:
        for number, (name, x) in enumerate((("key", k), ("value", v))):
            scale_BH = getattr(self, f"{name}_scale")
            if self.seen == 0:
                scale_BH[:] = scale_of(x)
            y = x.float() / scale_BH[..., None, None]
            self.clipped[number] += (y.abs() > LARGEST).sum()
            codes = y.clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn).view(torch.uint8)
            getattr(self, f"{name}s")[:, :, new] = codes

    def _numbers(self, name: str, rows: Tensor) -> Tensor:
        if name not in ("keys", "values"):
            return rows
        scale_BH = self.key_scale if name == "keys" else self.value_scale
        return rows.view(torch.float8_e4m3fn).to(self.dtype).mul_(scale_BH[..., None, None].to(self.dtype))

    def _flat_rows(self) -> Float8Rows:
        keys, values = self.keys.flatten(0, 2), self.values.flatten(0, 2)
        return Float8Rows(keys, values, self.key_scale.flatten(), self.value_scale.flatten())

    def head(self, name: str, h: int) -> Tensor:
        raise ValueError("rows in 8 bits are not merged in place")

    # ---- taken out and put back ------------------------------------------------------------------------------------

    def export(self) -> tuple[dict[str, float], dict[str, Tensor]]:
        counts, tensors = super().export()
        own = {"key_scale": self.key_scale, "value_scale": self.value_scale, "clipped": self.clipped} if tensors else {}
        return counts, tensors | own

    def layout(self, counts: Mapping[str, float], lengths: Sequence[int], query_heads: int) -> Layout:
        scales: Layout = {name: (torch.float32, (self.B, self.H)) for name in ("key_scale", "value_scale")}
        return super().layout(counts, lengths, query_heads) | scales | {"clipped": (torch.int64, (2,))}

    def _fill(self, tensors: Mapping[str, Tensor]) -> None:
        super()._fill(tensors)
        for name in ("key_scale", "value_scale", "clipped"):
            getattr(self, name).copy_(tensors[name])

    def reset(self) -> None:
        super().reset()
        if self.is_initialized:
            self.clipped.zero_()
