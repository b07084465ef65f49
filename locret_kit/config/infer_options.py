"""The options of ``locret-infer``. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from annotated_types import Ge, Gt, Interval

from ..settings import RunSettings
from ..validation import Description, check
from .machine import Backbone, Machine
from .schema import Command, Repeatable

USAGE = """usage: locret-infer [FILE] [--key value | key=value ...]

Answer from a long text in a fixed key/value budget.

  locret-infer book.pdf --question "Who finds the key?"
  locret-infer --ckpt user/heads --budget 0.1 --question "Who?" --question "When?" < long.txt
  locret-infer book.txt --model checkpoints/SmolLM2-135M-Instruct --policy 'h2o(window=0.25)' --budget 512
  locret-infer --batch prompts.jsonl -o answers.jsonl"""

Name = str | int
"""Name of a line of a batch."""


@dataclass(frozen=True, kw_only=True)
class Text:
    """The text."""

    file: str | None = None
    """The text, UTF-8; - or nothing is stdin. A .html, .pdf, .docx or .epub file is converted (extra `documents`)."""
    question: Annotated[list[str], Repeatable()] = field(default_factory=list)
    """Asked about the text, through the chat template. Given several times, each is answered in turn; the text is read once,
    unless the budget is a share of each prompt. Without one the text is continued."""
    chat: bool = True
    """Use the chat template; without, nothing follows the question: it may end with the answer's first words."""


@dataclass(frozen=True, kw_only=True)
class Many:
    """Many prompts at once."""

    batch: str | None = None
    """A file or a pipe of prompts, a JSON object per line: `prompt` (continued as it is), `text` and `question`, or `messages`
    (`role` and `content`); if wanted `id` (default: the line's number), `seed`, `max_new_tokens`, `temperature`, `top_k`,
    `top_p`, `repetition_penalty`. Each answer is what this prompt alone would get."""
    out: str | None = None
    """The file of --batch for answers, a JSON object per prompt, in the order in which they end; -o is the same. A prompt whose
    id has an answer there is not run again, one with an error is. The exit status is 1 where a prompt has an error."""
    batch_size: Annotated[int, Ge(1)] = 32
    """Prompts of --batch at once, at most; each holds a cache of its own, of budget + chunk rows."""


@dataclass(frozen=True, kw_only=True)
class Generation:
    """Generation."""

    max_new_tokens: Annotated[int, Ge(1)] = 64
    """Answer tokens, at most; an answer that is cut there says so."""
    temperature: Annotated[float, Ge(0)] = 0.0
    """0 is greedy."""
    top_k: Annotated[int, Ge(0)] = 0
    """Most likely tokens to draw from; 0 is all."""
    top_p: Annotated[float, Interval(gt=0, le=1)] = 1.0
    """Share of the likelihood to draw from."""
    repetition_penalty: Annotated[float, Gt(0)] = 1.0
    """Divides the scores of tokens that were there already; 1 is none."""


@dataclass(frozen=True, kw_only=True)
class Output:
    """Output."""

    report: str | None = None
    """A JSON file for every figure of the run."""
    quiet: bool = False
    """Nothing on stderr but errors and warnings."""


@dataclass(frozen=True, kw_only=True)
class InferOptions(Text, Many, Backbone, Generation, Output, RunSettings, Machine):
    """Options of ``locret-infer``."""

    HIDDEN: ClassVar[tuple[str, ...]] = ("decode_every",)


@dataclass(frozen=True, kw_only=True)
class BatchPrompt(Generation):
    """A line of ``--batch``.

    Raises:
        ValueError: a field of a wrong type or out of bounds, or not one way to write a prompt.
    """

    id: Annotated[Name | None, Description("a text or an integer")] = None
    prompt: str | None = None
    text: str | None = None
    question: str | None = None
    messages: Annotated[
        list[dict[str, str]] | None, Description('a list of {"role": ..., "content": ...}, both texts')
    ] = None
    seed: Annotated[int, Interval(ge=0, lt=2**32)] = 0

    def __post_init__(self) -> None:
        check(self)
        asked = self.question if self.text is None else self.text
        forms = {"prompt": self.prompt, "text and question": asked, "messages": self.messages}
        given = [form for form, value in forms.items() if value is not None]
        if len(given) != 1:
            raise ValueError(f"give one of: {', '.join(forms)}; found {' and '.join(given) or 'none'}")
        if (self.text is None) != (self.question is None):
            raise ValueError("text and question go together; a text that is to be continued is a prompt")


_READ_ONCE = "locret-read FILE -o X.locret reads a text once, and locret-ask X.locret answers about it"
INFER = Command(
    "locret-infer",
    InferOptions,
    USAGE,
    ("file", "question", "model", "ckpt", "budget", "policy", "max_new_tokens", "batch", "report", "quiet"),
    positional=("file",),
    short={"-o": "--out"},
    gone={
        "save_cache": _READ_ONCE,
        "cache": _READ_ONCE,
        "question_file": 'the shell reads files: --question "$(cat FILE)"',
        "gpu_memory": "locret-plan --gpu-memory SIZE says which --chunk and --budget fit",
        "graph": "Answer(..., graph=True) of locret_kit.runtime.session replays CUDA graphs",
        "decode_every": "decoded tokens are evicted when the buffers are full",
    },
)
