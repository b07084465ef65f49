"""Attention of new tokens over the rows of a cache and themselves, with each query's log-sum-exp."""

from .reference import attend

__all__ = ["attend"]
