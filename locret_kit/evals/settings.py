"""What a run compares, as plain data: built by the command line, or by hand from Python."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .tasks.base import Task

RANDOM_HEADS = "random-heads"
"""The policy `locret` with untrained heads."""


@dataclass
class Engine:
    """The backbone, the heads and the settings of every cache of a run."""

    model: Any
    tokenizer: Any
    name: str
    """The backbone, as it was named."""
    settings_for: Callable[[int | None], dict[str, Any]]
    """Settings of a `BoundedCache` for a budget; for None those of the checkpoint's own budget (used by `full`)."""
    heads: dict[str, Any] = field(default_factory=dict)
    """Heads by the name that rows give them: a checkpoint's, or 'untrained'."""
    chat: str = "auto"
    ending: str = "infinitebench"
    seed: int = 0
    max_new_tokens: int | None = None
    """Answer tokens of every task; None takes each task's own."""


@dataclass(frozen=True)
class Variant:
    """One column of the comparison."""

    policy: str
    heads: str
    budget: int
    """0 for `full`."""


@dataclass(frozen=True)
class Group:
    """One prompt, which every variant reads."""

    task: Task
    length: int
    sample: int


@dataclass
class Run:
    """Everything that `runner.run` does."""

    engine: Engine
    tasks: list[Task]
    variants: list[Variant]
    lengths: list[int]
    samples: int
    out: Path
    keep: int = 0
    """Of the first `keep` examples of a task, what the cache holds behind the prompt is stored."""
    retry_errors: bool = False
    """Do examples again that ended with an error."""
    rank: int = 0
    world_size: int = 1

    def groups(self) -> Iterator[Group]:
        """All prompts, in the same order in every process: first numbers of every task and length first."""
        for sample in range(self.samples):
            for length in self.lengths:
                for task in self.tasks:
                    if task.size is None or sample < task.size:
                        yield Group(task, length, sample)


def variants(policies: list[str], budgets: list[int], heads: list[str]) -> list[Variant]:
    """Policies by budgets, in the order given; policies that need heads once for each checkpoint.

    Raises:
        ValueError: an unknown policy, or one that needs heads where there are none.
    """
    from ..policies.registry import parse_policy

    found = []
    for policy in policies:
        if policy == RANDOM_HEADS:
            names = ["untrained"]
        else:
            parsed = parse_policy(policy)
            if parsed.needs_heads and not heads:
                raise ValueError(f"policy={policy} needs retaining heads: give ckpt=PATH_OR_REPO")
            names = heads if parsed.needs_heads else ["-"]
            if parsed.keeps_everything:
                found += [Variant(policy, name, 0) for name in names]
                continue
        found += [Variant(policy, name, budget) for name in names for budget in budgets]
    return list(dict.fromkeys(found))
