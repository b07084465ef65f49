"""Buffers into which rows in few bits are read: one pair for all layers of a cache."""

from __future__ import annotations

import torch

from .codec import Codec


class Scratch:
    """Keys and values ``[B, H, rows, D]`` in the model's dtype of the one layer that is read now; all layers share it."""

    def __init__(self) -> None:
        self.owner: Codec | None = None
        self.complete = True
        """Whether it holds all values, and not the tail's alone."""
        self.keys = self.values = torch.empty(0, dtype=torch.float32, device="cpu")

    def lend(self, codec: Codec) -> None:
        """Give the buffers to a layer, made anew where they do not fit it."""
        rows = codec.layout
        for name, size in (("keys", codec.key_size), ("values", codec.value_size)):
            old, shape = getattr(self, name), (rows.B, rows.H, rows.capacity, size)
            # Rows to spare do no harm: layers of several capacities share the largest buffer.
            fits = (
                old.dim() == 4
                and old.shape[2] >= rows.capacity
                and (*old.shape[:2], old.shape[3]) == (*shape[:2], size)
            )
            if not (fits and old.dtype == codec.dtype and old.device == rows.device):
                with torch.inference_mode(False):
                    setattr(self, name, torch.empty(shape, dtype=codec.dtype, device=rows.device))
        self.owner = codec

    @property
    def nbytes(self) -> int:
        """Bytes of both buffers."""
        return int(self.keys.nbytes + self.values.nbytes)
