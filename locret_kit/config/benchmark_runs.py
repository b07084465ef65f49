"""The configuration of ``locret-eval benchmark``, and the runs that it stands for. Knows no model, imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import resources
from typing import Annotated, Any, Literal

from annotated_types import Ge, MinLen

from ..naming import nearest
from ..validation import check
from .eval_options import EvalConfig, Names
from .machine import Machine
from .schema import Command, build

Block = Literal["needles-4k", "needles-16k", "questions", "language", "leval", "grid", "grid-2k"]
QUESTIONS = 4
"""Examples of a document, where several questions are asked about each."""
GRIDS, AS_IT_IS = ("grid", "grid-2k"), "as it is"
HEADS = "locret"
"""Name of the heads' policy in the blocks."""


@dataclass(frozen=True, kw_only=True)
class BenchmarkConfig(Machine):
    """The benchmark of heads."""

    ckpt: Names
    """Retaining heads to compare: folders, files or Hub repositories."""
    haystacks: Names
    """Real texts: folders of .txt files, files, or 'jargon'. Nothing may have been trained on them."""
    out: str
    """Folder of the rows, a folder for each run, and of ``benchmark.md``."""
    policy: str = HEADS
    """Policy that stands wherever the blocks have ``locret``: how the heads' scores are used."""
    size: Literal["screening", "final"] = "screening"
    """'screening' has 10 texts in each cell, 'final' 40."""
    samples: Annotated[int, Ge(1)] | None = None
    """Texts in each cell. Default: as ``size`` has it, and two of ``grid-2k``."""
    blocks: Annotated[list[Block], MinLen(1)] = field(
        default_factory=lambda: ["needles-4k", "needles-16k", "questions", "language", "leval"]
    )
    """Parts of the benchmark; 'grid' varies template and chunks; so does 'grid-2k', with two
    texts of 2K in each cell. 'leval' needs ``data``."""
    data: list[str] = field(default_factory=list)
    """Folders with L-Eval's files."""
    against: str | None = None
    """Heads, by their folder's name, that the others are compared with, text by text. Default: the first of ``ckpt``."""
    model: str | None = None
    """The backbone. Default: the one that the heads name."""
    write: str | None = None
    """Markdown file whose part between the lines <!-- heads:begin --> and <!-- heads:end --> the tables become."""

    def __post_init__(self) -> None:
        check(self)
        if self.against is not None and self.against not in self.names:
            known = ", ".join(self.names)
            raise ValueError(f"against={self.against} must be one of {known}.{nearest(self.against, self.names)}")

    @property
    def names(self) -> list[str]:
        """The heads' names in tables: the last names of their paths."""
        return [path.rstrip("/").rsplit("/", 1)[-1] for path in self.ckpt]


BENCHMARK = Command(
    "locret-eval",
    BenchmarkConfig,
    "usage: locret-eval benchmark ckpt=[...] haystacks=[FOLDER] out=FOLDER [key=value ...]",
    ("ckpt", "haystacks", "out", "size", "policy", "samples", "blocks", "data", "against", "write"),
)


@lru_cache(maxsize=1)
def definition() -> dict[str, Any]:
    """The benchmark: ``sizes`` and ``blocks``."""
    import yaml

    return yaml.safe_load(resources.files(__package__).joinpath("benchmark.yaml").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class BenchmarkRun:
    """One of the benchmark's runs."""

    block: str
    variation: str
    """Variation of a grid: the key and its value, or ``AS_IT_IS``."""
    config: EvalConfig


def runs(config: BenchmarkConfig) -> Iterator[BenchmarkRun]:
    """The runs of the blocks that were asked for, in order; without ``data`` none of L-Eval."""
    size = definition()["sizes"][config.size]
    shared = {
        name: getattr(config, name) for name in ("ckpt", "data", "model", "device", "dtype", "weight_bits", "plugin")
    }
    for block in config.blocks:
        if block == "leval" and not config.data:
            continue
        keys = dict(definition()["blocks"][block])
        vary: dict[str, list[object]] = keys.pop("vary", {})
        texts = ["repeated", *config.haystacks] if block in GRIDS else config.haystacks
        own = keys.pop("texts", size)
        keys["samples"] = (config.samples or own) * (QUESTIONS if block == "questions" else 1)
        keys["policies"] = [config.policy if name == HEADS else name for name in keys["policies"]]
        keys |= {**shared, "haystacks": texts, "out": f"{config.out}/{block}"}
        yield BenchmarkRun(block, AS_IT_IS, build(EvalConfig, keys))
        for name, values in vary.items():
            for value in values:
                words = f"{name}={value}"
                yield BenchmarkRun(
                    block, words, build(EvalConfig, {**keys, name: value, "out": f"{keys['out']}/{words}"})
                )
