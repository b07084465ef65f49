"""A layer's elementwise work between its products, each in one pass."""

from .reference import rms_norm, swiglu

__all__ = ["rms_norm", "swiglu"]
