"""The configuration of ``locret-eval``: its schemas. Knows no model, imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, MinLen

from ..settings import Budget, RunSettings, Slots, check
from .infer_options import Machine
from .schema import Command, build, given_by

USAGE = """usage: locret-eval tasks=[...] out=FOLDER [key=value ...]
       locret-eval SUBCOMMAND [key=value ...]

Compare policies: a row per example, a table at the end; a rerun does only what is missing or failed.

  locret-eval tasks=[passkey,number] policies=[full,locret,streaming] budgets=[256,512,1024] lengths=[4096,8192] \\
      samples=20 ckpt=checkpoints/smollm2-135m-locret out=runs/needles
  locret-eval paired out=runs/needles against=full

Subcommands, each with a --help of its own: tasks, figure, table, report, paired, lm_eval."""
NOTES = """  locret-eval tasks=[passkey,number,perplexity,reconstruction] policies=[full,locret,h2o,kvzip] ckpt=... out=runs/table
  locret-eval tasks=[leval.coursera] data=[FOLDER/OF/LEVAL] policies=[full,locret] ckpt=... out=runs/leval
  locret-eval lm_eval --model locret --model_args ckpt=...,policy=locret,budget=256 --tasks ...
  torchrun --nproc_per_node 2 -m locret_kit.cli.eval tasks=...      # examples are shared among the processes

What prompts have in common at their beginning is read once. An unknown key, task or policy is an error that names the nearest.
Tasks: locret-eval tasks; policies: locret-infer --list-policies, and here also kvzip and
kvzip(joint=true) (oracles that read the whole prompt first), bm25 (retrieval: full attention over the best passages, in as many
tokens as a policy has slots) and random-heads (locret with untrained heads).
`locret-eval lm_eval` is lm-evaluation-harness's own command line (extra `harness`) with one model more, locret; its
--model_args take policy=, budget= and this command's keys, such as ckpt= and chunk=."""

Names = Annotated[list[str], MinLen(1)]


@dataclass(frozen=True, kw_only=True)
class EvalConfig(RunSettings, Machine):
    """The evaluation."""

    HIDDEN: ClassVar[tuple[str, ...]] = ("budget", "backend")

    tasks: Names
    """Names, groups (ruler, infinitebench, leval, longbench), files of questions (mine.jsonl, records as locret-train takes
    them), or fidelity:NAME and agreement:NAME."""
    out: str
    """Folder of the rows, the summary and the report."""
    policies: Names = field(default_factory=lambda: ["full"])
    """Names or expressions, as locret-infer takes them; 'random-heads' is locret with untrained heads, 'kvzip' and
    'kvzip(joint=true)' are the unbounded oracle, 'bm25' reads the best passages alone."""
    budgets: Annotated[list[Budget], MinLen(1)] = field(default_factory=lambda: [1024])
    """Slots kept per key/value head and layer, or with a point shares of the prompt, such as 0.1; `full` ignores them."""
    lengths: Annotated[list[Slots], MinLen(1)] = field(default_factory=lambda: [4096])
    """Prompt tokens: what synthetic prompts have, and documents are cut to."""
    samples: Annotated[int, Ge(1)] = 20
    """Examples of each task, at most."""
    haystacks: Names = field(default_factory=lambda: ["repeated"])
    """Texts of synthetic tasks: 'repeated', 'pydoc', 'jargon', files or folders. Tasks that need real text (perplexity,
    reconstruction, fidelity) leave 'repeated' out, and read 'pydoc' where it is all there is."""
    metric: str = "contains"
    """Score of files of questions: 'contains' (the share of answers in which an accepted one stands, F1 of words beside it), or
    another by name, such as 'qa_f1', 'has_all' (all of the accepted ones), 'rouge' or 'first_number'."""
    data: list[str] = field(default_factory=list)
    """Folders with the benchmarks' files; the Hub is asked for what they lack."""
    ckpt: list[str] = field(default_factory=list)
    """Retaining heads: folders, files or Hub repositories."""
    model: str | None = None
    """The backbone. Default: the one that the heads name."""
    adapter: str | None = None
    """PEFT adapter on the backbone, or 'none'. Default: the one that the heads were trained with."""
    chat: Literal["auto", "always", "never"] = "auto"
    """Whether prompts go through the chat template; auto does as the benchmark does."""
    ending: Literal["infinitebench", "open"] = "infinitebench"
    """End of hidden-digits prompts: 'infinitebench' (blank lines around the question, then the answer's first words) or 'open'
    (without these words; through the chat template too)."""
    max_new_tokens: Annotated[int, Ge(1)] | None = None
    """Answer tokens, without a thought's. Default: each task's own."""
    max_thought_tokens: Annotated[int, Ge(0)] = 2048
    """Tokens of an answer's thought, at most, which is not scored; then the chat template's end mark closes it."""
    keep: Annotated[int, Ge(0)] = 0
    """For the first so many examples of each task: store in ``out/kept`` what the cache holds after the prompt. A rerun leaves
    rows that are there as they are, so to store more of them takes another ``out``."""
    share_prefix: bool = True
    """Read what prompts have in common at their beginning once; scores are the same either way, without times each alone."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.out:
            raise ValueError("out=... is missing")


@dataclass(kw_only=True)
class RowsConfig:
    """Rows of a folder; an empty list is all."""

    out: str
    """Folder of the rows; a figure goes to its ``figures/``."""
    tasks: list[str] = field(default_factory=list)
    """Names as rows give them, or as `locret-eval` takes them."""
    haystacks: list[str] = field(default_factory=list)
    """Texts of synthetic tasks."""
    policies: list[str] = field(default_factory=list)
    """Names or expressions, as the rows give them."""
    budgets: list[Budget] = field(default_factory=list)
    """Slots kept per key/value head and layer, or shares; rows of `full` have none and always count."""
    lengths: list[int] = field(default_factory=list)
    """Prompt tokens asked for."""

    def __post_init__(self) -> None:
        check(self)


@dataclass(kw_only=True)
class PairedConfig(RowsConfig):
    """The comparison, example by example."""

    against: str
    """A policy as tables name it, such as 'full' or 'locret (smollm2-135m-locret)'; `policies`, if given, must name it too."""
    figure: str | None = None
    """One of the rows' figures. Default: the main one of each task."""


@dataclass(kw_only=True)
class FigureConfig(RowsConfig):
    """The figure to draw of rows; an empty list is all."""

    name: Literal["score-memory", "needle-grid"]
    """Score against memory, or by the needle's depth and the prompt's length."""


@dataclass(kw_only=True)
class FolderConfig:
    """The folder of a run."""

    out: str
    """Folder of the rows."""

    @property
    def folder(self) -> Path:
        """The folder. Raises FileNotFoundError where there is none."""
        if not Path(self.out).is_dir():
            raise FileNotFoundError(f"out={self.out} is no folder")
        return Path(self.out)


@dataclass(kw_only=True)
class NoConfig:
    """No options."""


EVAL = Command(
    "locret-eval",
    EvalConfig,
    USAGE,
    ("tasks", "out", "policies", "budgets", "lengths", "samples", "ckpt", "model", "haystacks", "data"),
    NOTES,
    gone={
        "wording": "a text of your own is a haystack or a file of questions",
        "offset": "chunk=256 and others move a prompt against the chunks",
        "retry": "every rerun does examples again that ended with an error",
    },
)
PAIRED = Command(
    "locret-eval", PairedConfig, "usage: locret-eval paired out=FOLDER against=LABEL [figure=NAME] [key=value ...]"
)
FIGURE = Command(
    "locret-eval",
    FigureConfig,
    "usage: locret-eval figure NAME out=FOLDER [key=value ...]",
    positional=("name",),
    gone=dict.fromkeys(
        ("formats", "width", "height", "font", "title", "x"), "figures are PNG and SVG, the numbers summary.csv"
    ),
)
TABLE = Command(
    "locret-eval",
    RowsConfig,
    "usage: locret-eval table out=FOLDER [key=value ...]",
    gone=dict.fromkeys(("format", "interval"), "summary.csv has every number, with Wilson's interval in low and high"),
)
REPORT = Command("locret-eval", FolderConfig, "usage: locret-eval report out=FOLDER")
TASKS = Command("locret-eval", NoConfig, "usage: locret-eval tasks")

FROZEN_KEYS = (
    *(item.name for item in fields(RunSettings) if item.name not in EvalConfig.HIDDEN),
    "model", "adapter", "chat", "ending", "max_new_tokens", "max_thought_tokens", "metric", "dtype", "weight_bits",
    "template_kwargs", "think", "reasoning_effort",
)  # fmt: skip
"""Keys that all rows of a folder share, and the heads of one name; the others may differ from one run to the next."""


def load_eval_config(argv: list[str]) -> EvalConfig:
    """The options of an evaluation.

    Raises:
        ValueError: an unknown key, a value of a wrong type or out of bounds, or no ``tasks`` or ``out``.
    """
    return build(EvalConfig, given_by(EVAL, argv))
