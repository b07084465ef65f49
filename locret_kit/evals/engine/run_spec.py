"""Plain data of a run: backbone, tasks, variants; built by the command line, or by hand from Python."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ...settings import Resolved
from ..tasks.task import Example, Task

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ...heads import RetainingHeads

RANDOM_HEADS = "random-heads"
"""The policy `locret` with untrained heads."""
UNTRAINED = "untrained"
"""Its heads, as rows name them."""
ORACLES = {"kvzip": False, "kvzip(joint=true)": True}
"""Unbounded oracles, see `oracle`: whether heads and layers share the slots among them."""


@dataclass
class Setup:
    """The backbone, the heads and the settings of every cache of a run."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    name: str
    """The backbone, as it was named."""
    settings_for: Callable[[Variant, int | None], Resolved]
    """Settings of a variant's cache for a prompt of so many tokens (None: not known): those of its heads scaled to its
    budget, of `full` at their own budget."""
    heads: dict[str, RetainingHeads] = field(default_factory=dict)
    """Heads by the name that rows give them: a checkpoint's, or 'untrained'."""
    hashes: dict[str, str] = field(default_factory=dict)
    """Hashes of the heads' weights, see `provenance.weights_hash`."""
    adapter: str | None = None
    """PEFT adapter on the backbone, as it was named."""
    chat: str = "auto"
    ending: str = "infinitebench"
    seed: int = 0
    max_new_tokens: int | None = None
    """Answer tokens of every task; None takes each task's own."""

    def __post_init__(self) -> None:
        from ...backbones.libraries import unwrapped

        self.model = unwrapped(self.model)


@dataclass(frozen=True)
class Variant:
    """One column of the comparison."""

    policy: str
    heads: str
    budget: int | float
    """Slots, or a share of the prompt; 0 for `full`."""

    def key(self, example: Example) -> tuple[str | int | float, ...]:
        """The key of an example's row, see `result_rows.KEY`."""
        task = example.task
        return task.name, task.haystack, example.length, self.budget, self.policy, self.heads, example.sample


@dataclass
class Run:
    """Everything that `runner.answer` does."""

    setup: Setup
    tasks: list[Task]
    variants: list[Variant]
    lengths: list[int]
    samples: int
    out: Path
    keep: int = 0
    """Examples of a task, the first ones, of which the tokens in the cache after the prompt are stored."""
    share_prefix: bool = True
    """Read what prompts about one document have in common once, see `measure.SharedBeginning`."""
    rank: int = 0
    world_size: int = 1

    def batches(self) -> list[list[Example]]:
        """All examples, in the same order in every process: those of a task that begin alike together, the others one by
        one, first numbers of every task and length first."""
        by_beginning: dict[tuple[str, str, int, int], list[Example]] = defaultdict(list)
        for example in self.examples():
            task, alike = example.task, self.share_prefix and example.task.begins_alike
            by_beginning[task.name, task.haystack, example.length, -1 if alike else example.sample].append(example)
        return list(by_beginning.values())

    def row_keys(self) -> Iterator[tuple[str | int | float, ...]]:
        """Keys of all rows."""
        return (variant.key(example) for example in self.examples() for variant in self.variants)

    def examples(self) -> Iterator[Example]:
        """All examples, before they are made: first numbers of every task and length first."""
        setup = self.setup
        for sample in range(self.samples):
            for length in self.lengths:
                for task in self.tasks:
                    if task.size is None or sample < task.size:
                        yield Example(task, setup.tokenizer, length, sample, setup.seed, setup.chat, setup.ending)


BM25 = "bm25"
"""The policy that reads the best passages of a prompt with full attention, see `bm25`."""


def reads_alone(policy: str) -> bool:
    """Whether a policy is one of evaluations alone, an oracle or `BM25`: it looks at the whole prompt before it reads."""
    return policy == BM25 or is_oracle(policy)


def is_oracle(policy: str) -> bool:
    """Whether a policy is one of `ORACLES`.

    Raises:
        ValueError: an oracle with other parameters.
    """
    if policy not in ORACLES and policy.split("(")[0].strip() == "kvzip":
        raise ValueError(f"policy={policy} must be one of: {', '.join(ORACLES)}")
    return policy in ORACLES


def check_policies(policies: list[str], kv_bits: int | None) -> None:
    """Before a backbone is loaded: raise ValueError at an unknown policy, or at one whose slots cannot be stored in
    ``kv_bits`` bits."""
    from ...cache.storage.codec import check_bits, check_storage
    from ...policies.grammar import parse_policy

    check_bits(kv_bits)
    for policy in policies:
        if policy != RANDOM_HEADS and not reads_alone(policy):
            check_storage(kv_bits, parse_policy(policy))


def variants(policies: list[str], budgets: Sequence[int | float], heads: list[str]) -> list[Variant]:
    """Policies by budgets, in the order given; policies that need heads once for each checkpoint.

    Raises:
        ValueError: an unknown policy, or one that needs heads where there are none.
    """
    from ...policies.grammar import parse_policy

    columns = []
    for policy in policies:
        if policy == RANDOM_HEADS:
            names = [UNTRAINED]
        elif reads_alone(policy):
            names = ["-"]
        else:
            parsed = parse_policy(policy)
            if parsed.needs_heads and not heads:
                raise ValueError(f"policy={policy} needs retaining heads: give ckpt=PATH_OR_REPO")
            names = heads if parsed.needs_heads else ["-"]
            if parsed.keeps_everything:
                columns += [Variant(policy, name, 0) for name in names]
                continue
        columns += [Variant(policy, name, budget) for name in names for budget in budgets]
    return list(dict.fromkeys(columns))
