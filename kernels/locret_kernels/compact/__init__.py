"""Compaction of buffers: rows that stay move to the front, in place."""

from .reference import compact_rows

__all__ = ["compact_rows"]
