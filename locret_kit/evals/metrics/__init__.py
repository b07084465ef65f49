"""What an answer is worth: the benchmarks' metrics."""

from collections.abc import Mapping
from typing import Any

Answer = Any
"""The reference as the data set has it: a string, a number, or a list of accepted or required ones."""
Extra = Mapping[str, Any]
"""What a metric needs besides, by name, such as a task's classes."""
