"""Terms of a cache: what it is asked for, before its prompt and its model are known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..heads import RetainingHeads, loaded
from ..policies import Policy
from ..policies.capabilities import Subject, refuse
from ..policies.grammar import parse_policy
from ..settings import Resolved, RunSettings
from .due import Schedule
from .storage.codec import check_storage
from .view import check_reread


@dataclass(frozen=True)
class Terms:
    """Settings, a policy and the retaining heads with which it scores."""

    settings: RunSettings
    policy: Policy
    heads: RetainingHeads | None
    """None where the policy needs none."""
    published: Mapping[str, object]
    """Settings that the heads were published with."""

    @classmethod
    def of(
        cls,
        settings: RunSettings | int | float | None,
        policy: str | Policy | None,
        heads: RetainingHeads | str | Path | None,
        given: Mapping[str, object],
    ) -> Terms:
        """Terms as ``BoundedCache`` takes them. Raises as it does."""
        heads = loaded(heads)
        # Heads name the policy that they were measured with.
        if policy is None:
            policy = heads.config.policy if heads is not None else "locret"
        if isinstance(policy, str):
            policy = parse_policy(policy)
        if not isinstance(settings, RunSettings):
            settings = RunSettings.of(given if settings is None else {"budget": settings, **given})
        elif given:
            raise ValueError(f"{', '.join(given)}: given twice, within settings and by name")
        needed = policy.heads_for(heads)
        # Refused here and not at the first forward: a model takes minutes to load.
        check_storage(settings.kv_bits, policy)
        published = heads.config.inference if heads is not None else {}
        return cls(settings, policy, needed, published)

    def at(self, prompt_length: int | None) -> tuple[Resolved, Schedule]:
        """Settings and schedule of a prompt of so many tokens. Raises ValueError where the prompt must be longer or shorter, or
        its length known."""
        if prompt_length is None:
            refuse("prompt of unknown length", Subject(self.policy))
        resolved = self.settings.resolved(self.published, prompt_length)
        schedule = Schedule.of(resolved, prompt_length)
        check_reread(self.policy, schedule)
        return resolved, schedule
