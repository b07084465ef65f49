"""CIS target: the largest logit, or log-probability, that any answer query gives each slot."""

from .reference import column_max

__all__ = ["column_max"]
