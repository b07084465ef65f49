"""Limits on the work of a chat template, which is a program of whoever made the backbone's folder.

The sandbox of Jinja keeps a template from files and from Python, not from loops without end.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

from jinja2 import nodes

if TYPE_CHECKING:
    from _typeshed import TraceFunction

STEPS = 2_000_000
"""Lines of a template, compiled to Python, that a rendering may run: real ones run some ten for each message."""
LARGEST = 1_000_000
"""The largest number in a template: a text repeated or indented so often takes all memory in one step."""


def check_template(tree: nodes.Template) -> None:
    """Raise ValueError for a template with numbers above ``LARGEST``, or with powers."""
    for number in tree.find_all(nodes.Const):
        if isinstance(number.value, int | float) and abs(number.value) > LARGEST:
            raise ValueError(f"the chat template holds {number.value!s:.20}: numbers are at most {LARGEST}")
    if next(tree.find_all(nodes.Pow), None) is not None:
        raise ValueError("the chat template computes a power (**), which no template needs")


@contextmanager
def limited_steps(steps: int = STEPS) -> Iterator[None]:
    """Raise ValueError in this thread when a template that is rendered within has run more than ``steps`` of its lines."""
    left = steps

    def line(frame: FrameType, event: str, arg: object) -> TraceFunction:
        nonlocal left
        left -= event == "line"
        if left < 0:
            raise ValueError(f"the chat template takes more than {steps} steps")
        return line

    def call(frame: FrameType, event: str, arg: object) -> TraceFunction | None:
        return line if frame.f_code.co_filename in ("<template>", "<unknown>") else None

    before = sys.gettrace()
    sys.settrace(call)
    try:
        yield
    finally:
        sys.settrace(before)
