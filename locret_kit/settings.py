"""Settings of a bounded run: every choice beside the backbone, the heads and the policy. No torch.

This is the only list of their names: the cache, the schedule, plans, reports, evaluation rows and all commands take a
``RunSettings`` or flatten one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, Literal

from annotated_types import Ge, Interval

from .validation import Says, check, made

BUDGET, CHUNK = 1024, 512
"""Slots and tokens where neither the user nor the heads say."""

Slots = Annotated[int, Ge(1)]
Share = Annotated[float, Interval(gt=0, le=1)]


@dataclass(frozen=True)
class RunSettings:
    """What a run is given. None leaves a setting to what the heads were published with, then to the default.

    Raises:
        ValueError: a wrong type or a value out of bounds; names the setting, its value and the bound.
    """

    budget: Annotated[
        Slots | Share | None,
        Says("slots (an integer, at least 1), or a share of the prompt (with a point, above 0 and at most 1)"),
    ] = None
    """Slots that a key/value head keeps in one layer, everything counted: an integer; or with a point, such as 0.1, a
    share of the prompt. Default: the heads', or 1024."""
    chunk: Annotated[int, Ge(1)] | None = None
    """Tokens between evictions while the prompt is read. Default: the heads', or 512."""
    stabilizers: Annotated[int, Ge(0)] | None = None
    """Newest slots that no prefill eviction may take; part of the budget. Default: the heads' share of the budget, or an
    eighth of it."""
    local_len: Annotated[int, Ge(0)] | None = None
    """Last prompt tokens that are never evicted before decoding. Default: the heads', or 64; less for small budgets."""
    positions: str | None = None
    """'compact' (a slot's rank in the cache), 'original' (its place in the text) or 'clipped(SPAN)' (between). Default:
    the heads', or compact where the architecture allows it."""
    kv_bits: Literal[4, 2] | None = None
    """Bits of a stored key or value, but for the newest rows. Default: the model's dtype."""
    one_shot: bool = False
    """Evict once, when the whole prompt has been read, instead of after every chunk."""
    decode_every: Annotated[int, Ge(1)] | None = None
    """Decoded tokens between evictions. Default: only when the buffers are full."""
    seed: Annotated[int, Interval(ge=0, lt=2**32)] = 0
    """Seed of policies that draw, and of sampling."""
    backend: Literal["reference", "triton"] | None = None
    """Kernels. Default: triton on CUDA in half precision, the reference otherwise."""

    def __post_init__(self) -> None:
        check(self)

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> RunSettings:
        """Settings from names and values.

        Raises:
            ValueError: as the class; an unknown name, with the nearest one.
        """
        return made(cls, dict(given))

    def given(self) -> dict[str, Any]:
        """The settings that are not at their defaults."""
        return {item.name: value for item in fields(self) if (value := getattr(self, item.name)) != item.default}

    @property
    def share(self) -> float | None:
        """The budget as a share of the prompt, where it was given so."""
        return self.budget if isinstance(self.budget, float) else None

    def resolved(self, published: Mapping[str, Any], prompt_length: int | None) -> RunSettings:
        """Settings whose budget, chunk, stabilizers and local_len are integers.

        Published stabilizers keep their share of the budget; the published tail gets shorter with it, never longer. The
        one-shot form has the prompt as its one chunk and holds nothing back.

        Args:
            published: the settings that the heads were published with.
            prompt_length: tokens of the prompt; None where it is not known yet.

        Raises:
            ValueError: a share of the prompt, or one_shot, without ``prompt_length``.
        """
        if prompt_length is None and self.share is not None:
            raise ValueError(f"budget={self.budget} is a share of the prompt: pass prompt_length=")
        if prompt_length is None and self.one_shot:
            raise ValueError("one_shot=True needs prompt_length: the prompt is its one chunk")
        asked = self.budget if self.budget is not None else published.get("budget") or BUDGET
        budget = max(1, int(asked * (prompt_length or 0))) if isinstance(asked, float) else asked
        factor = budget / published["budget"] if published.get("budget") else 1.0

        def scaled(name: str, scale: float, default: int) -> int:
            value = getattr(self, name)
            if value is None and published.get(name) is not None:
                value = int(published[name] * scale)
            return default if value is None else value

        return replace(
            self,
            budget=budget,
            chunk=prompt_length if self.one_shot else self.chunk or published.get("chunk") or CHUNK,
            stabilizers=0 if self.one_shot else scaled("stabilizers", factor, budget // 8),
            local_len=0 if self.one_shot else scaled("local_len", min(1.0, factor), min(64, budget // 4)),
            positions=self.positions or published.get("positions"),
        )
