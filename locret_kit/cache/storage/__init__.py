"""Rows of a layer: how they lie, and how their keys and values are stored."""

from . import quantised as quantised
