"""Metrics of the benchmarks: score an output against its reference."""

from collections.abc import Mapping
from typing import Any

Answer = Any
"""The reference as the data set has it: a string, a number, or a list of accepted or required ones."""
Extra = Mapping[str, Any]
"""Further needs of a metric, by name, such as a task's classes."""
