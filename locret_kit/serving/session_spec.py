"""The settings of a server's sessions, and the saved caches that one of them could hold."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from transformers import PreTrainedModel

from ..backbones.identity import NAMES, first_difference
from ..cache.bounded import BoundedCache
from ..cache.saved import Origin, Saved
from ..heads import RetainingHeads
from ..policies.grammar import parts_of
from ..policies.policy import Policy
from ..settings import RunSettings


class SessionSpec:
    """Model, settings, heads and policies of a server's sessions.

    Args:
        policies: the server's, then those that requests may ask for.
    """

    def __init__(
        self, model: PreTrainedModel, settings: RunSettings, heads: RetainingHeads | None, policies: Sequence[Policy]
    ) -> None:
        self.model, self.settings, self.heads, self.policies = model, settings, heads, policies

    @cached_property
    def origin(self) -> Origin:
        """The model and the heads, by content."""
        return Origin.of(self.model, self.heads)

    def check(self, saved: Saved, *, session: bool = False) -> None:
        """Refuse a saved cache.

        Args:
            session: a conversation without a document, whose settings must be the server's own.

        Raises:
            ValueError: it is another model's, its policy is not allowed here, or it has more slots than a session.
        """
        names = {name: saved.model.get(name) for name in NAMES}
        heads = None if saved.heads is None else self.origin.heads
        there: dict[str, object] = {"model": saved.model, "heads": saved.heads}
        if difference := first_difference(there, {"model": self.origin.model | names, "heads": heads}):
            raise ValueError(difference)
        policies = self.policies[:1] if session else self.policies
        if not any(saved.parts == parts_of(policy) for policy in policies):
            allowed = ", ".join(policy.name for policy in policies)
            raise ValueError(f"policy={saved.policy[:64]!r} is not allowed here; allowed: {allowed}")
        mine = settings_of(self.settings, self.policies[0], self.heads, saved.prompt_length)
        theirs = saved.resolved
        if theirs.share is not None:
            raise ValueError(f"budget={theirs.share} is a share of the prompt: the slots of a session are fixed")
        for name in ("budget", "chunk"):
            if getattr(theirs, name) > mine[name]:
                raise ValueError(f"{name}={getattr(theirs, name)} must be at most {mine[name]}, that of a session")
        if theirs.kv_bits != mine["kv_bits"]:
            raise ValueError(f"kv_bits={theirs.kv_bits} must be {mine['kv_bits']}, that of a session")
        if session:
            chosen = {name for name, value in mine.items() if value is not None or name not in ("backend", "positions")}
            stated = theirs.portable
            if difference := first_difference(
                {name: stated[name] for name in sorted(chosen)}, {name: mine[name] for name in sorted(chosen)}
            ):
                raise ValueError(difference)


def settings_of(
    settings: RunSettings, policy: Policy, heads: RetainingHeads | None, prompt_length: int | None
) -> dict[str, object]:
    """The settings of a session whose prompt has so many tokens."""
    needed = heads if policy.needs_heads else None
    return BoundedCache(settings, policy, needed, prompt_length=prompt_length).settings.portable
