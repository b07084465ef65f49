"""Pieces that several tests of weight bits share."""

from __future__ import annotations

TINY = dict(hidden_size=128, intermediate_size=320)
"""Sizes that every CPU kernel takes: those for AVX512-BF16 want outputs in 32s and inputs in 64s."""
