"""The configuration of ``locret-eval key=value ...``: its schema and its bounds. Knows no model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, get_args, get_type_hints

from ..cli.command import pairs_of
from ..evals.tasks.base import CHAT
from ..naming import nearest
from ..samples.needles import ENDINGS
from ..settings import RunSettings

USAGE = """usage: locret-eval tasks=[...] out=FOLDER [key=value ...]
       locret-eval summary out=FOLDER
       locret-eval report out=FOLDER
       locret-eval paired out=FOLDER against=LABEL [figure=NAME] [key=value ...]
       locret-eval figure NAME out=FOLDER [key=value ...]
       locret-eval kept out=FOLDER sample=N [key=value ...]
       locret-eval lm_eval --model locret --model_args ckpt=...,policy=locret,budget=256 --tasks ...

  locret-eval tasks=[passkey,number] policies=[full,locret,streaming] budgets=[256,512,1024] lengths=[4096,8192] \\
      samples=20 ckpt=checkpoints/smollm2-135m-locret out=runs/needles
  locret-eval tasks=[passkey,number,perplexity,reconstruction] policies=[full,locret,h2o,kvzip] ckpt=... out=runs/table
  locret-eval tasks=[leval.coursera] data=[FOLDER/OF/LEVAL] policies=[full,locret] ckpt=... out=runs/leval
  torchrun --nproc_per_node 2 -m locret_kit.cli.eval tasks=...      # examples are shared among the processes

A rerun does only what is missing, and what prompts have in common at their beginning is read once.
An unknown key, task or policy is an error that names the nearest; --help lists the keys.
Tasks: locret-eval tasks; figures: locret-eval figure; policies: locret-infer --list-policies, and here also kvzip and
kvzip(joint=true) (oracles that read the whole prompt first) and random-heads (locret with untrained heads).
`locret-eval lm_eval` is lm-evaluation-harness's own command line (pip install 'locret-kit[harness]') with one model more,
locret; its --model_args take policy=, budget= and this command's keys, such as ckpt= and chunk=."""


@dataclass
class EvalConfig:
    """Everything an evaluation needs."""

    tasks: list[str]
    """Names, groups (ruler, infinitebench, leval, longbench), or fidelity:NAME and agreement:NAME."""
    out: str
    """Folder of the rows, the summary and the report."""
    policies: list[str] = field(default_factory=lambda: ["full"])
    """Names or expressions, as locret-infer takes them; 'random-heads' is locret with untrained heads, 'kvzip' and
    'kvzip(joint=true)' are the unbounded oracle."""
    budgets: list[int] = field(default_factory=lambda: [1024])
    """Slots kept per key/value head and layer; `full` ignores them."""
    lengths: list[int] = field(default_factory=lambda: [4096])
    """Prompt tokens: what synthetic prompts have, and documents are cut to."""
    samples: int = 20
    """Examples of each task, at most."""
    haystacks: list[str] = field(default_factory=lambda: ["repeated"])
    """Texts of synthetic tasks: 'repeated', 'pydoc', 'jargon', files or folders. Tasks that need real text (perplexity,
    reconstruction, fidelity) leave 'repeated' out, and read 'pydoc' where it is all there is."""
    data: list[str] = field(default_factory=list)
    """Folders with the benchmarks' files; the Hub is asked for what they lack."""
    ckpt: list[str] = field(default_factory=list)
    """Retaining heads: folders, files or Hub repositories."""
    model: str | None = None
    """The backbone; null takes the one that the heads name."""
    adapter: str | None = None
    """PEFT adapter on the backbone; null takes the one that the heads were trained with, 'none' is none."""
    chunk: int | None = None
    """Tokens between evictions; null takes the checkpoint's."""
    stabilizers: int | None = None
    """Newest slots that no prefill eviction takes; null scales the checkpoint's to the budget."""
    local_len: int | None = None
    """Last prompt tokens that are never evicted; null scales the checkpoint's to the budget."""
    positions: str | None = None
    """'compact', 'original' or 'clipped(SPAN)'; null takes the checkpoint's."""
    kv_bits: int | None = None
    """Bits of a stored key or value, 4 or 2; null stores them as they are."""
    chat: str = "auto"
    """Whether prompts go through the chat template: 'auto' (as the benchmark does), 'always' or 'never'."""
    ending: str = "infinitebench"
    """How hidden-digits prompts end: 'infinitebench' (blank lines) or 'line'."""
    prefill: str = "chunked"
    """'chunked' evicts at every chunk, 'one-shot' once, when the whole prompt has been read."""
    decode_every: int | None = None
    """Decoded tokens between evictions; null evicts when the buffers are full."""
    max_new_tokens: int | None = None
    """Answer tokens; null takes each task's own."""
    keep: int = 0
    """For the first so many examples of each task: store what the cache holds behind the prompt. A rerun leaves rows that
    are there as they are, so to store more of them takes another ``out``."""
    retry: str = "never"
    """'errors' does examples again that ended with an error."""
    share_prefix: bool = True
    """Read what prompts have in common at their beginning once; scores are the same either way, false times each alone."""
    seed: int = 0
    """Seeds prompts, policies that draw, and untrained heads."""
    device: str | None = None
    """'cpu', 'cuda', 'cuda:1'; null takes the best there is, a device of its own for each process."""
    dtype: str = "auto"
    """'auto', 'float32', 'bfloat16' or 'float16'."""
    weight_bits: int | None = None
    """8 or 4: bits of the layers' weights, quantised by bitsandbytes as they are loaded; null leaves them in ``dtype``."""

    @property
    def run(self) -> RunSettings:
        """The settings of every cache, but for the budget."""
        names = ("chunk", "stabilizers", "local_len", "positions", "kv_bits", "decode_every", "seed")
        return RunSettings(**{name: getattr(self, name) for name in names}, one_shot=self.prefill == "one-shot")

    def validate(self) -> None:
        """Raise ValueError at the first field that is out of bounds, naming field, value and bound."""
        from ..backbones.weight_bits import check_weight_bits
        from ..cache.geometry.positions import Positions
        from ..evals.engine.settings import check_policies

        for name in ("tasks", "policies", "budgets", "lengths", "haystacks"):
            if not getattr(self, name):
                raise ValueError(f"{name}=[] must name at least one")
        for name, low in _LOWEST.items():
            value = getattr(self, name)
            if value is not None and value < low:
                raise ValueError(f"{name}={value} must be at least {low}")
        for name in ("budgets", "lengths"):
            for value in getattr(self, name):
                if value < 1:
                    raise ValueError(f"{name}: {value} must be at least 1")
        choices = {
            "chat": CHAT,
            "ending": tuple(ENDINGS),
            "prefill": ("chunked", "one-shot"),
            "retry": ("never", "errors"),
            "dtype": ("auto", "float32", "bfloat16", "float16"),
        }
        check_policies(self.policies, self.kv_bits)
        check_weight_bits(self.weight_bits)
        if self.positions is not None:
            Positions.parse(self.positions, 1)
        for name, known in choices.items():
            value = getattr(self, name)
            if value not in known:
                names = [one for one in known if one]
                raise ValueError(f"{name}={value} must be one of: {', '.join(names)}.{nearest(str(value), names)}")


@dataclass(kw_only=True)
class RowsConfig:
    """Which rows of a folder; an empty list is all."""

    out: str
    """Folder of the rows; a figure goes to its ``figures/``."""
    tasks: list[str] = field(default_factory=list)
    """Names as rows give them, or as `locret-eval` takes them."""
    haystacks: list[str] = field(default_factory=list)
    """Texts of synthetic tasks."""
    policies: list[str] = field(default_factory=list)
    """Names or expressions, as the rows give them."""
    budgets: list[int] = field(default_factory=list)
    """Slots kept per key/value head and layer; rows of `full` have none and always count."""
    lengths: list[int] = field(default_factory=list)
    """Prompt tokens asked for."""


@dataclass(kw_only=True)
class PairedConfig(RowsConfig):
    """Which rows to compare with which, example by example."""

    against: str
    """A policy as tables name it, such as 'full' or 'locret (smollm2-135m-locret)'; `policies`, if given, must name it too."""
    figure: str | None = None
    """One of the rows' figures; by default the main one of each task."""


@dataclass(kw_only=True)
class KeptConfig(RowsConfig):
    """Which examples to show with what was kept of them."""

    sample: int = 0
    """The example's number."""
    layer: int | None = None
    """One layer instead of all of them."""
    color: str = "auto"
    """'auto' (on a terminal), 'always' or 'never'."""

    def validate(self) -> None:
        """Raise ValueError at a field that is out of bounds."""
        known = ("auto", "always", "never")
        if self.color not in known:
            raise ValueError(f"color={self.color} must be one of: {', '.join(known)}.{nearest(self.color, known)}")


_LOWEST = {
    "samples": 1, "keep": 0, "seed": 0, "chunk": 1, "decode_every": 1, "stabilizers": 0, "local_len": 0, "max_new_tokens": 1,
}  # fmt: skip

FIXED = (
    "model", "adapter", "chunk", "stabilizers", "local_len", "positions", "kv_bits", "chat", "ending", "prefill",
    "decode_every", "max_new_tokens", "seed", "dtype", "weight_bits",
)  # fmt: skip
"""What all rows of a folder share, and the heads of one name; the other keys may differ from one run to the next."""


def load_eval_config(argv: list[str]) -> EvalConfig:
    """The validated configuration of ``key=value ...``, in any order.

    Raises:
        ValueError: an unknown key, a value of a wrong type or out of bounds, or no ``tasks`` or ``out``.
    """
    config = EvalConfig(**_given(argv, EvalConfig, ("tasks", "out")))
    config.validate()
    return config


def load_rows_config(argv: list[str]) -> RowsConfig:
    """The same for a choice of rows."""
    return RowsConfig(**_given(argv, RowsConfig, ("out",)))


def load_paired_config(argv: list[str]) -> PairedConfig:
    """The same for a comparison of rows."""
    return PairedConfig(**_given(argv, PairedConfig, ("out", "against")))


def load_kept_config(argv: list[str]) -> KeptConfig:
    """The same for the view of what was kept."""
    config = KeptConfig(**_given(argv, KeptConfig, ("out",)))
    config.validate()
    return config


def _given(argv: list[str], kind: type, required: tuple[str, ...]) -> dict[str, Any]:
    schema, given = get_type_hints(kind), dict[str, Any]()
    for key, text in pairs_of(argv, "samples=20").items():
        if key not in schema:
            raise ValueError(f"unknown key {key!r}.{nearest(key, schema)} Keys: {', '.join(schema)}.")
        given[key] = _value(key, text.strip(), schema[key])
    for key in required:
        if not given.get(key):
            raise ValueError(f"{key}=... is missing")
    return given


def _value(key: str, text: str, kind: Any) -> Any:
    """The text as a value of a field's type; ``null`` where the type allows it."""
    if type(None) in get_args(kind):
        if text == "null":
            return None
        kind = get_args(kind)[0]
    if kind is str:
        return text
    if kind is int:
        return _integer(key, text)
    if kind is bool:
        return _yes_or_no(key, text)
    items = split_list(text)
    return items if kind == list[str] else [_integer(key, item) for item in items]


def split_list(text: str) -> list[str]:
    """The items of ``[a,b]`` or ``a,b``; commas within parentheses belong to an item: ``kvcrush(base=h2o,anchor=mean)``."""
    from ..policies.grammar import split_outside

    inner = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    return [item for part in split_outside(inner, ",") if (item := part.strip().strip("\"'"))]


def _integer(key: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{key}={text} must be an integer") from None


def _yes_or_no(key: str, text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError(f"{key}={text} must be true or false")
    return text == "true"
