"""Base of the parts of a policy, and the types of their parameters."""

from __future__ import annotations

from dataclasses import is_dataclass
from typing import Annotated, Protocol

from annotated_types import Interval, Predicate

from ..validation import Description, check

Count = Annotated[int, Interval(ge=0, lt=2**31)]
"""Tokens or slots; positions are int32."""
Positive = Annotated[int, Interval(ge=1, lt=2**31)]
Odd = Annotated[int, Interval(ge=1, lt=2**31), Predicate(lambda n: n % 2 == 1), Description("odd and at least 1")]
"""Slots of a pooled neighbourhood, which has a middle."""
Ratio = Annotated[float, Interval(ge=0, le=1)]
Size = Annotated[
    Count | Ratio, Description("a number of tokens (an integer, at least 0), or a fraction (with a point, from 0 to 1)")
]
PositiveSize = Annotated[
    Positive | Annotated[float, Interval(gt=0, le=1)],
    Description("a number of tokens (an integer, at least 1), or a fraction (with a point, above 0, at most 1)"),
]


class Part(Protocol):
    """Base of all parts: the values of the fields are checked against their annotated types and bounds.

    Raises:
        ValueError: a wrong type, NaN or infinity, or a value out of bounds; names the field, its value and the bound.
    """

    def __post_init__(self) -> None:
        assert is_dataclass(self)
        check(self)
