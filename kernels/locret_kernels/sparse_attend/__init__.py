"""Attention of blocks of new tokens, each over chosen rows of a cache alone."""

from .reference import Blocks, sparse_attend

__all__ = ["Blocks", "sparse_attend"]
