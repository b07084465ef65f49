"""Rotary position embedding of rows by tables of cos and sin."""

from .reference import rotate_rows

__all__ = ["rotate_rows"]
