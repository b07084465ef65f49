"""Attention of new tokens over the rows of a cache and themselves: with each query's log-sum-exp, or with what its weights add up
to."""

from .reference import ChunkRotation, attend, attend_and_count

__all__ = ["ChunkRotation", "attend", "attend_and_count"]
