"""Eviction that moves only the rows that change place: rows take the slots that others free."""

from .reference import move_rows, reuse_rows

__all__ = ["move_rows", "reuse_rows"]
