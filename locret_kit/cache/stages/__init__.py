"""Stages: what a policy does beside evicting. The step of a layer iterates over those of its cache."""

from __future__ import annotations

from ...policies.policy import Policy
from ..context import Stage
from .bring_back import RecallStage
from .fold import MergeStage
from .sparse_prefill import SparseStage


def stages_of(policy: Policy) -> tuple[Stage, ...]:
    """The stages of a policy, in the order in which they see an eviction."""
    stages: list[Stage] = []
    if policy.merge is not None:
        stages.append(MergeStage(policy.merge))
    if policy.recall is not None:
        stages.append(RecallStage(policy.recall))
    if policy.sparse is not None:
        stages.append(SparseStage(policy.sparse))
    return tuple(stages)
