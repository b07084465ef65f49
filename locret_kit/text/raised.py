"""Marks for what is drawn higher or lower than its line: 10^6 for a raised 6."""

from __future__ import annotations

import re

ORDINAL = "st|nd|rd|th|er|TM|SM"
"""Raised letters that are read as a part of the word before them."""


def marks(mark: str, script: str, before: str, after: str) -> tuple[str, str]:
    """What stands before and after a raised or lowered text, so that it is no part of what is beside it.

    Args:
        mark: "^" for a raised text, "_" for a lowered one.
        before, after: characters next to it in the line; '' where there are none.
    """
    bare = script.strip()
    beside = before.strip() or re.match(r"[^\W_]", after)
    if not re.search(r"\w", bare) or bare.startswith("[") or not beside:
        return "", ""
    if re.fullmatch(ORDINAL, bare) and mark == "^":
        return "", ""
    if mark == "_" and bare.isdigit() and before.isalpha() and not after.isdigit():  # H2O, CO2
        return "", ""
    simple = re.fullmatch(r"[+\-\u2212\u2013]?\w+(?:[.,]\w+)*", bare) and not after.isalnum()
    return (mark, "") if simple else (f"{mark}(", ")")


def fraction(above: str, below: str) -> str:
    """A stacked fraction in a line: 1/2, (a+b)/2."""
    return "/".join(one if one.isalnum() else f"({one})" for one in (above.strip(), below.strip()))
