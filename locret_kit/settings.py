"""Settings of a bounded run: every choice beside the backbone, the heads and the policy. No torch.

This is the only list of their names: the cache, the schedule, plans, reports, evaluation rows and all commands take a
``RunSettings``, extend one or flatten one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Literal

from annotated_types import Interval, Predicate

from .naming import nearest, parse_bytes
from .validation import NAME, Description, check, made

BUDGET, CHUNK = 1024, 512
"""Slots and tokens where neither the user nor the heads say."""
INT32_MAX = 2**31 - 1
SCHEMES = ("compact", "clipped", "original")
PROTECTED = ("first", "system", "markers")
"""Names that ``protect`` may have."""
FIRST = 4
"""The first tokens of a text, on which much attention rests whatever they say. Source: StreamingLLM, arXiv 2309.17453."""
PUBLISHED = ("budget", "chunk", "stabilizers", "local_len", "positions")
"""Settings that heads are published with."""

Slots = Annotated[int, Interval(ge=1, le=INT32_MAX)]
Count = Annotated[int, Interval(ge=0, le=INT32_MAX)]
Share = Annotated[float, Interval(gt=0, le=1)]
Budget = Annotated[
    Slots | Share,
    Description("at least 1 slot (at most 2147483647), or with a point a share of the prompt, above 0 and at most 1.0"),
]


def read_positions(text: str) -> tuple[str, int | None]:
    """The name of a position scheme, and its span: ``compact``, ``original``, ``clipped`` or ``clipped(span)``.

    Raises:
        ValueError: another name, or a span that is missing its meaning.
    """
    match = re.fullmatch(r"(\w+)(?:\((\d+)\))?", text)
    if not match or match[1] not in SCHEMES or (match[2] and match[1] != "clipped"):
        known = "compact, original, clipped or clipped(SPAN)"
        raise ValueError(f"positions={text!r} must be {known}.{nearest(text.split('(')[0], SCHEMES)}")
    if match[2] and (len(match[2]) > 10 or int(match[2]) > INT32_MAX):
        raise ValueError(f"positions={text!r}: the span must be at most {INT32_MAX} tokens")
    return match[1], int(match[2]) if match[2] else None


def is_positions(text: str) -> bool:
    """Whether a position scheme is known. Raises ValueError with those that are."""
    return bool(read_positions(text))


def read_protect(text: str | None) -> frozenset[str]:
    """The names in ``protect``: of 'first', 'system' and 'markers' some, joined by +; none of them for 'none' or None.

    Raises:
        ValueError: another name, with the nearest.
    """
    names = frozenset() if text in (None, "none") else frozenset(text.split("+"))
    for name in sorted(names.difference(PROTECTED)):
        known = f"none, or joined by + some of: {', '.join(PROTECTED)}"
        raise ValueError(f"protect={text!r}: {name!r} is unknown; it must be {known}.{nearest(name, PROTECTED)}")
    return names


def is_protect(text: str) -> bool:
    """Whether all that is to be protected is known. Raises ValueError with what may be."""
    return bool(read_protect(text)) or text == "none"


def is_size(text: str) -> bool:
    """Whether a text is a number of bytes. Raises ValueError with what is, which names the setting."""
    return parse_bytes(text, NAME) > 0


Bytes = Annotated[str, Predicate(is_size)]


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Settings of the cache. None leaves a setting to what the heads were published with, then to the default.

    Raises:
        ValueError: a wrong type or a value out of bounds; names the setting, its value and the bound.
    """

    budget: Budget | None = None
    """Slots that a key/value head keeps in one layer, everything counted: an integer; or with a point, such as 0.1, a
    share of the prompt. Default: the heads', or 1024; locret-infer, locret-read and locret-chat take a quarter of a text where
    that is more, as far as window and memory allow."""
    chunk: Slots | None = None
    """Tokens between evictions while the prompt is read. Default: the heads', or 512."""
    stabilizers: Count | None = None
    """Newest slots that no prefill eviction may take; part of the budget. Default: the heads' share of the budget, or an
    eighth of it."""
    local_len: Count | None = None
    """Last prompt tokens that are never evicted before decoding. Default: the heads', or 64; less for small budgets."""
    positions: Annotated[str, Predicate(is_positions)] | None = None
    """'compact' (a slot's rank in the cache), 'original' (its place in the text) or 'clipped(SPAN)' (between). Default:
    the heads', or compact where the architecture allows it."""
    protect: Annotated[str, Predicate(is_protect)] | None = None
    """Text that is never evicted, whatever the policy: 'first' (the first 4 tokens), 'system' (the chat template's system
    prompt), 'markers' (the template's own tokens around the messages), or several, as in 'first+system'. Default: none."""
    kv_bits: Literal[8, 4, 2] | None = None
    """Bits of a stored key or value: 8 (floating point, a scale for each head), 4 or 2 (but for the newest rows). Default: the
    model's dtype."""
    one_shot: bool = False
    """Evict once, when the whole prompt has been read, instead of after every chunk."""
    decode_every: Slots | None = None
    """Decoded tokens between evictions. Default: only when the buffers are full."""
    seed: Annotated[int, Interval(ge=0, lt=2**32)] = 0
    """Seed of policies that draw, and of sampling."""
    backend: Literal["reference", "triton", "cpu"] | None = None
    """Who computes. Default: triton on CUDA in half precision, cpu (C++) on a CPU where a compiler is, reference otherwise."""

    def __post_init__(self) -> None:
        check(self)

    @classmethod
    def of(cls, given: Mapping[str, object]) -> RunSettings:
        """Settings from names and values.

        Raises:
            ValueError: as the class; an unknown name, with the nearest one.
        """
        return made(RunSettings, given)

    @property
    def run(self) -> RunSettings:
        """These settings alone, where a class extends them."""
        return RunSettings(**{item.name: getattr(self, item.name) for item in fields(RunSettings)})

    @property
    def portable(self) -> dict[str, object]:
        """The settings by name, as a file says them; the last is one of earlier versions, which their files have."""
        return {**vars(self), "store_bits": None}

    def resolved(self, published: Mapping[str, object], prompt_length: int | None) -> Resolved:
        """Settings of one prompt.

        Published stabilizers keep their share of the budget; the published tail gets shorter with it, never longer. The
        one-shot form has the prompt as its one chunk and holds nothing back.

        Args:
            published: the settings that the heads were published with.
            prompt_length: tokens of the prompt; None where it is not known yet.

        Raises:
            ValueError: a share of the prompt, or one_shot, without ``prompt_length``.
        """
        theirs = RunSettings.of({name: published.get(name) for name in PUBLISHED})
        asked = self.budget or theirs.budget or BUDGET
        if prompt_length is None and isinstance(asked, float):
            raise ValueError(f"budget={asked} is a share of the prompt: pass prompt_length=")
        if prompt_length is None and self.one_shot:
            raise ValueError("one_shot=True needs prompt_length: the prompt is its one chunk")
        budget = max(1, int(asked * (prompt_length or 0))) if isinstance(asked, float) else asked
        factor = budget / theirs.budget if theirs.budget else 1.0
        chunk = self.chunk or theirs.chunk or CHUNK
        stabilizers, local_len = self.stabilizers, self.local_len
        if stabilizers is None:
            stabilizers = budget // 8 if theirs.stabilizers is None else int(theirs.stabilizers * factor)
        if local_len is None:
            local_len = min(64, budget // 4) if theirs.local_len is None else int(theirs.local_len * min(1.0, factor))
        if self.one_shot:
            chunk, stabilizers, local_len = prompt_length or 1, 0, 0
        return Resolved(
            **vars(self.run)
            | {"budget": budget, "chunk": chunk, "stabilizers": stabilizers, "local_len": local_len}
            | {"positions": self.positions or theirs.positions}
            | {"share": asked if isinstance(asked, float) else getattr(self, "share", None)}
        )


@dataclass(frozen=True, kw_only=True)
class Resolved(RunSettings):
    """Settings of one prompt: nothing that counts slots or tokens is left open."""

    budget: Slots = BUDGET
    """Slots of a key/value head in one layer."""
    chunk: Slots = CHUNK
    stabilizers: Count = 0
    local_len: Count = 0
    share: Share | None = None
    """The budget as a share of the prompt, where it was given so."""
