"""The record of a saved cache: all of its file but the tensors."""

import time
from dataclasses import dataclass, replace
from typing import Annotated

import torch
from annotated_types import Interval

from ..naming import prefixed_errors
from ..settings import Count, Resolved
from ..validation import build, display, validate_fields

CREATED = "%Y-%m-%dT%H:%M:%SZ"
MOST_PINS = 1024
"""Ranges of pinned positions in a file: each costs a pass over the rows."""
Scaling = Annotated[float, Interval(gt=0, lt=2**31)]
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class Saved:
    """The record of a saved cache, besides its tensors.

    Raises:
        ValueError: a field of another type or out of its bound; it is named.
    """

    version: int
    kit: str
    created: str
    """Date and time, UTC."""
    model: dict[str, object]
    """See ``backbones.identity``."""
    heads: str | None
    """Fingerprint of the retaining heads."""
    policy: str
    parts: dict[str, str]
    """The policy in full, every parameter written out."""
    pool: str | None
    """Fingerprint of the weights of a merging policy."""
    settings: dict[str, object]
    ropes: list[dict[str, object]] | None
    """See ``rotations``."""
    dtype: str
    batch: Annotated[int, Interval(ge=1, le=1)]
    """A cache takes one text."""
    prompt_length: Count | None
    counters: dict[str, int | float | str]
    layers: list[dict[str, int | float]]
    """Counts of each layer."""
    pins: list[list[Count]]
    """Positions that are never evicted: pairs of start and end, ascending, with a gap between any two."""
    document: dict[str, object] | None
    """Further fields about the text that was read, see ``documents``."""

    def __post_init__(self) -> None:
        # Anybody may have written the file: every field is checked before one is used.
        validate_fields(self)
        with prefixed_errors("created", ValueError):
            time.strptime(self.created, CREATED)
        if len(self.pins) > MOST_PINS or any(len(pin) != 2 for pin in self.pins):
            raise ValueError(f"pins: {len(self.pins)} ranges must be pairs of start and end, at most {MOST_PINS}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype={display(self.dtype)} must be one of: {', '.join(DTYPES)}")

    @property
    def resolved(self) -> Resolved:
        """The run settings; the backend is chosen anew."""
        own = {name: value for name, value in self.settings.items() if name != "store_bits"}
        with prefixed_errors("settings", ValueError):
            return replace(build(Resolved, own, whole=True), backend=None)
