"""Settings of a bounded run: every choice beside the backbone, the heads and the policy. No torch.

This is the only list of their names: the cache, the schedule, plans, reports, evaluation rows and all commands take a
``RunSettings``, extend one or flatten one. Types and bounds are the annotations (``validation``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from fractions import Fraction
from typing import Annotated, Literal

from annotated_types import Interval, Predicate

from .naming import nearest, parse_bytes
from .validation import NAME, Description, build, validate_fields

Thoughts = Literal["evicted", "dropped", "pinned"]
"""Handling of thoughts in a bounded cache: evicted like other tokens, dropped when the turn ends, or pinned."""
BUDGET, CHUNK = 1024, 512
"""Default slots and tokens, if neither the user nor the heads set them."""
INT32_MAX = 2**31 - 1
SCHEMES = ("compact", "clipped", "original")
PROTECTED = ("first", "system", "markers")
"""Names that ``protect`` may have."""
FIRST = 4
"""Number of first tokens, which get much attention whatever they say. Source: StreamingLLM, arXiv 2309.17453."""
SMOOTH_L1 = "smooth_l1"
"""The loss of training where no other is named."""
PUBLISHED = ("budget", "chunk", "stabilizers", "local_len", "positions")
"""Settings that heads are published with."""

Slots = Annotated[int, Interval(ge=1, le=INT32_MAX)]
Count = Annotated[int, Interval(ge=0, le=INT32_MAX)]
Share = Annotated[float, Interval(gt=0, le=1)]
Repetition = Annotated[float, Interval(ge=0.01, le=100)]
"""Divisor of the scores of tokens that occurred before. Beyond the bounds scores are no finite numbers, or all alike."""
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


Bytes = Annotated[str, Predicate(lambda text: parse_bytes(text, NAME) > 0)]
PositionScheme = Annotated[str, Predicate(lambda text: bool(read_positions(text)))]
Protected = Annotated[str, Predicate(lambda text: text == "none" or bool(read_protect(text)))]
Word = Annotated[str, Predicate(str.isidentifier)]
"""The name of a plugin's part. Whether the part exists is checked when it is used."""


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Settings of the cache. None means the heads' published value, or else the default.

    Raises:
        ValueError: wrong type or out of bounds; has the setting's name, its value and the bound.
    """

    budget: Budget | None = None
    """Slots per key/value head and layer, everything included. A number with a point, such as 0.1, is a share of the
    prompt. Default: the heads', or 1024. For one text locret-infer, locret-read and locret-chat use a quarter of it if
    that is more, limited by window and memory."""
    chunk: Slots | None = None
    """Prefill chunk: tokens read between evictions. Default: the heads', or 512."""
    stabilizers: Count | None = None
    """Newest slots that are never evicted during prefill. They are part of the budget. Default: the heads' share of
    the budget, or an eighth of it."""
    local_len: Count | None = None
    """Last prompt tokens that are never evicted before decoding. Default: the heads', or 64; fewer for small
    budgets."""
    positions: PositionScheme | None = None
    """Positions for RoPE: 'compact' (a slot's rank in the cache), 'original' (its position in the text) or
    'clipped(SPAN)' (in between). Default: the heads', or compact if the architecture allows it."""
    protect: Protected | None = None
    """Tokens that no policy may evict: 'first' (the first 4 tokens), 'system' (the system prompt), 'markers' (the
    chat template's own tokens around messages), or several, as in 'first+system'. Default: none."""
    kv_bits: Literal[8, 4, 2] | Word | None = None
    """Bits per stored key or value: 8 (each row by itself), 4 or 2 (the newest rows are not quantised);
    or a plugin's codec. Default: the model's dtype."""
    one_shot: bool = False
    """Evict once, after the whole prompt, instead of after every chunk."""
    decode_every: Slots | None = None
    """Decoded tokens between evictions. Default: only when the buffers are full."""
    seed: Annotated[int, Interval(ge=0, lt=2**32)] = 0
    """Seed of random policies and of sampling."""
    backend: Literal["reference", "triton", "cpu"] | Word | None = None
    """Implementation of the kernels, or a plugin's backend. Default: triton on CUDA in half precision, cpu (C++) on
    a CPU with a compiler, otherwise reference."""

    def __post_init__(self) -> None:
        validate_fields(self)

    @classmethod
    def of(cls, given: Mapping[str, object]) -> RunSettings:
        """Settings from names and values.

        Raises:
            ValueError: as the class; an unknown name, with the nearest one.
        """
        return build(RunSettings, given)

    @property
    def run(self) -> RunSettings:
        """Settings of a run alone, without those of a derived class."""
        return RunSettings(**{item.name: getattr(self, item.name) for item in fields(RunSettings)})

    @property
    def by_length(self) -> bool:
        """Whether a prompt's length decides its budget or chunk."""
        return self.one_shot or isinstance(self.budget, float)

    @property
    def portable(self) -> dict[str, object]:
        """The settings by name, in the form of a file. The last one exists only in files of earlier versions."""
        return {**asdict(self), "store_bits": None}

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
        budget = max(1, int(Fraction(str(asked)) * (prompt_length or 0))) if isinstance(asked, float) else asked
        factor = budget / theirs.budget if theirs.budget else 1.0
        chunk = self.chunk or theirs.chunk or CHUNK
        stabilizers, local_len = self.stabilizers, self.local_len
        if stabilizers is None:
            stabilizers = budget // 8 if theirs.stabilizers is None else int(theirs.stabilizers * factor)
        if local_len is None:
            local_len = min(64, budget // 4) if theirs.local_len is None else int(theirs.local_len * min(1.0, factor))
        if self.one_shot:
            chunk, stabilizers, local_len = prompt_length or 1, 0, 0
        share = asked if isinstance(asked, float) else getattr(self, "share", None)
        sizes = {"budget": budget, "chunk": chunk, "stabilizers": stabilizers, "local_len": local_len, "share": share}
        return Resolved(**asdict(self.run) | sizes | {"positions": self.positions or theirs.positions})


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


TOKENS_PER_SLOT = 8
"""Tokens for each slot beyond which few facts of a text are found again (docs/tutorials/read.md)."""


def too_few(budget: int, tokens: int) -> str | None:
    """Words where a text has more tokens than ``TOKENS_PER_SLOT`` for each slot."""
    if tokens <= TOKENS_PER_SLOT * budget:
        return None
    wanted = -(-tokens // TOKENS_PER_SLOT)
    step = 10 ** max(0, len(str(wanted)) - 2)
    more = -(-wanted // step) * step
    return (
        f"{budget:,} slots for {tokens:,} tokens, 1 in {tokens // budget}: facts need about 1 in {TOKENS_PER_SLOT}: "
        f"--budget {more} takes {more / budget:.1f} times the cache's memory, and more time"
    )
