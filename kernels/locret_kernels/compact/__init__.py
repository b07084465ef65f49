"""Compaction of buffers: rows that stay move to the front, in place; and the index of those rows."""

from .reference import compact_rows, kept_rows

__all__ = ["compact_rows", "kept_rows"]
