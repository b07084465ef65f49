"""The best rows of each head by score, protected rows first."""

from .reference import select_rows

__all__ = ["select_rows"]
