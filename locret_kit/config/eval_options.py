"""Options of ``locret-eval``. This module knows no model and imports no torch."""

from dataclasses import dataclass, field, fields
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Gt, MinLen

from ..settings import Budget, RunSettings, Slots
from .infer_options import Machine, idle_one_shot
from .schema import Command, assemble, given_by

NOTES = """  locret-eval tasks=[passkey,number,perplexity,reconstruction] policies=[full,locret,h2o,kvzip] ckpt=... out=runs/table
  locret-eval tasks=[leval.coursera] data=[FOLDER/OF/LEVAL] policies=[full,locret] ckpt=... out=runs/leval
  locret-eval lm_eval --model locret --model_args ckpt=...,policy=locret,budget=256 --tasks ...
  torchrun --nproc_per_node 2 -m locret_kit.cli.eval tasks=...      # examples are shared among the processes

The shared prefix of prompts is read once. An unknown key, task or policy is an error that names the nearest.
Tasks: locret-eval tasks; policies: locret-infer --list-policies, and here also kvzip and
kvzip(joint=true) (oracles that read the whole prompt first), bm25 (retrieval: full attention over the best passages, in as many
tokens as a policy has slots) and random-heads (locret with untrained heads).
`locret-eval lm_eval` is lm-evaluation-harness's own command line (extra `harness`) with one model more, locret; its
--model_args take policy=, budget= and this command's keys, such as ckpt= and chunk=."""

Names = Annotated[list[str], MinLen(1)]


@dataclass(frozen=True, kw_only=True)
class EvalConfig(RunSettings, Machine):
    """Compare policies: a row per example, a table at the end; a rerun does only what is missing or failed.

    Examples:
      locret-eval tasks=[passkey,number] policies=[full,locret,streaming] budgets=[256,512,1024] lengths=[4096,8192] \\
          samples=20 ckpt=checkpoints/smollm2-135m-locret out=runs/needles
      locret-eval paired out=runs/needles against=full

    Subcommands, each with a --help of its own: tasks, figure, table, report, paired, lm_eval.
    """

    HIDDEN: ClassVar[tuple[str, ...]] = ("budget", "backend")

    tasks: Names
    """Names of tasks or groups (ruler, infinitebench, leval, longbench), or files of questions (mine.jsonl, records
    as locret-train takes them). fidelity:NAME and agreement:NAME compare a task's output with full attention's."""
    out: Annotated[str, MinLen(1)]
    """Folder of the rows, the summary and the report."""
    policies: Names = field(default_factory=lambda: ["full"])
    """Names or expressions, as locret-infer takes them. Baselines: 'random-heads' (locret with untrained heads),
    'kvzip' and 'kvzip(joint=true)' (unbounded oracles), 'bm25' (reads the best passages only)."""
    budgets: Annotated[list[Budget], MinLen(1)] = field(default_factory=lambda: [1024])
    """Slots per key/value head and layer. A number with a point is a share of the prompt, such as 0.1. `full`
    ignores budgets."""
    lengths: Annotated[list[Slots], MinLen(1)] = field(default_factory=lambda: [4096])
    """Prompt lengths in tokens: synthetic prompts are made that long, documents are cut to it."""
    samples: Annotated[int, Ge(1)] = 20
    """Maximum number of examples per task."""
    haystacks: Names = field(default_factory=lambda: ["repeated"])
    """Texts of synthetic tasks: 'repeated', 'pydoc', 'jargon', files or folders. Tasks that need real text
    (perplexity, reconstruction, fidelity) skip 'repeated', and read 'pydoc' if there is no other."""
    metric: str = "contains"
    """Score for files of questions. 'contains' is the share of answers that contain an accepted one (F1 of words is
    reported too). Others by name: 'qa_f1', 'has_all' (all of the accepted answers), 'rouge', 'first_number', ..."""
    data: list[str] = field(default_factory=list)
    """Folders with the benchmarks' files. Missing files are downloaded from the Hub."""
    ckpt: list[str] = field(default_factory=list)
    """Retaining heads: folders, files or Hub repositories."""
    model: str | None = None
    """The backbone. Default: the one named by the heads."""
    adapter: str | None = None
    """PEFT adapter on the backbone, or 'none'. Default: the adapter used to train the heads."""
    chat: Literal["auto", "always", "never"] = "auto"
    """Whether prompts go through the chat template. auto follows the benchmark."""
    ending: Literal["infinitebench", "open"] = "infinitebench"
    """End of hidden-digits prompts: 'infinitebench' (blank lines around the question, then the first words of the
    answer) or 'open' (no such words, with or without the chat template)."""
    max_new_tokens: Annotated[int, Ge(1)] | None = None
    """Maximum number of answer tokens, thinking excluded. Default: set by the task."""
    max_thought_tokens: Annotated[int, Ge(0)] = 2048
    """Maximum number of thinking tokens, which are not scored. Then the chat template's end mark is inserted."""
    keep: Annotated[int, Ge(0)] = 0
    """Store the kept slots after the prompt in ``out/kept``, for the first n examples of each task with
    written answers. A rerun keeps finished rows, so a larger n needs another ``out``."""
    share_prefix: bool = True
    """Read the shared prefix of prompts once. Scores are the same; turn it off to time every prompt alone."""


@dataclass(kw_only=True)
class RowsConfig:
    """A selection of a folder's rows. An empty list selects all."""

    out: str
    """Folder of the rows. Figures are written to its ``figures/``."""
    tasks: list[str] = field(default_factory=list)
    """Task names as written in the rows, or as `locret-eval` takes them."""
    haystacks: list[str] = field(default_factory=list)
    """Texts of synthetic tasks."""
    policies: list[str] = field(default_factory=list)
    """Policies as written in the rows."""
    budgets: list[Budget] = field(default_factory=list)
    """Slots per key/value head and layer, or shares. Rows of `full` have no budget and are always selected."""
    lengths: list[int] = field(default_factory=list)
    """Requested prompt lengths in tokens."""


@dataclass(kw_only=True)
class TableConfig(RowsConfig):
    """Tables of a folder's rows."""

    format: Literal["markdown", "latex"] = "markdown"
    """'latex' is for the package booktabs."""


@dataclass(kw_only=True)
class PairedConfig(RowsConfig):
    """A paired comparison, example by example."""

    against: str
    """The baseline, as tables name it: 'full' or 'locret (smollm2-135m-locret)'. If `policies` is given, it must
    include this one."""
    figure: str | None = None
    """The score to compare, by its name in the rows. Default: each task's main score."""


@dataclass(kw_only=True)
class FigureConfig(RowsConfig):
    """The figure to draw from a folder's rows."""

    name: Literal["score-memory", "needle-grid"]
    """'score-memory' (score against memory) or 'needle-grid' (score by needle depth and prompt length)."""
    width: Annotated[float, Gt(0)] | None = None
    """Inches across; fewer panels stand side by side in a narrow figure. Default: 3.6 for each of up to three panels."""


@dataclass(kw_only=True)
class FolderConfig:
    """The folder of a run."""

    out: str
    """Folder of the rows."""


@dataclass(kw_only=True)
class NoConfig:
    """No options."""


EVAL = Command(
    "locret-eval",
    EvalConfig,
    "tasks=[...] out=FOLDER [key=value ...]\n       locret-eval SUBCOMMAND [key=value ...]",
    ("tasks", "out", "policies", "budgets", "lengths", "samples", "ckpt", "model", "haystacks", "data"),
    NOTES,
    idle=idle_one_shot,
)
PAIRED = Command("locret-eval paired", PairedConfig, "out=FOLDER against=LABEL [figure=NAME] [key=value ...]")
FIGURE = Command("locret-eval figure", FigureConfig, "NAME out=FOLDER [key=value ...]", positional=("name",))
TABLE = Command("locret-eval table", TableConfig, "out=FOLDER [key=value ...]")
REPORT = Command("locret-eval report", FolderConfig, "out=FOLDER")
TASKS = Command("locret-eval tasks", NoConfig, "")

FROZEN_KEYS = (
    *(item.name for item in fields(RunSettings) if item.name not in EvalConfig.HIDDEN),
    "model", "adapter", "chat", "ending", "max_new_tokens", "max_thought_tokens", "metric", "dtype", "weight_bits",
    "template_kwargs", "think", "reasoning_effort",
)  # fmt: skip
"""Keys with one value for all rows of a folder; so have heads of the same name. Other keys may differ between runs."""


def load_eval_config(argv: list[str]) -> EvalConfig:
    """The options of an evaluation.

    Raises:
        ValueError: an unknown key, a value of a wrong type or out of bounds, or no ``tasks`` or ``out``.
    """
    return assemble(EvalConfig, given_by(EVAL, argv))
