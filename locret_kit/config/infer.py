"""The options of ``locret-infer``. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from annotated_types import Ge

from ..settings import RunSettings
from .machine import Backbone, Bytes, Machine
from .reader import Command, Each

USAGE = """usage: locret-infer [FILE] [--key value | key=value ...]

Answer from a long text in a fixed key/value budget.

  locret-infer long.txt --ckpt checkpoints/smollm2-135m-locret --budget 1024 --question "What is the pass key?"
  locret-infer --ckpt user/heads --budget 0.1 --question "Who?" --question "When?" < long.txt
  locret-infer book.txt --model checkpoints/SmolLM2-135M-Instruct --policy 'h2o(window=0.25)' --budget 512"""


@dataclass(frozen=True, kw_only=True)
class Text:
    """The text."""

    file: str | None = None
    """The text, UTF-8; - or nothing is stdin. A .html, .pdf, .docx or .epub file is converted (extra `documents`)."""
    question: Annotated[list[str], Each()] = field(default_factory=list)
    """Asked about the text, through the chat template. Given several times, each is answered in turn; the text is read once,
    unless the budget is a share of each prompt. Without one the text is continued."""
    question_file: str | None = None
    """The question, from a file."""
    chat: bool = True
    """Use the chat template; without, nothing follows the question: it may end with the answer's first words."""
    save_cache: str | None = None
    """A new file for the text as it was read, for locret-ask; as locret-read writes it."""
    cache: str | None = None
    """A file of locret-read, instead of the text."""


@dataclass(frozen=True, kw_only=True)
class Generation:
    """Generation."""

    max_new_tokens: Annotated[int, Ge(1)] = 64
    """Answer tokens, at most; an answer that is cut there says so."""
    temperature: Annotated[float, Ge(0)] = 0.0
    """0 is greedy."""
    top_k: Annotated[int, Ge(0)] = 0
    """Most likely tokens to draw from; 0 is all."""
    top_p: float = 1.0
    """Share of the likelihood to draw from."""
    repetition_penalty: float = 1.0
    """Divides the scores of tokens that were there already; 1 is none."""


@dataclass(frozen=True, kw_only=True)
class Output:
    """Output, and the memory that it takes."""

    graph: bool = False
    """Replay decoding steps as CUDA graphs; an error where the policy or the machine does not allow it."""
    gpu_memory: Bytes | None = None
    """Take no more of a CUDA device than this, such as 24GiB, and plan the chunk for it."""
    report: str | None = None
    """A JSON file for every figure of the run."""
    quiet: bool = False
    """Nothing on stderr but errors and warnings."""


@dataclass(frozen=True, kw_only=True)
class InferOptions(Text, Backbone, Generation, Output, RunSettings, Machine):
    """Options of ``locret-infer``."""


INFER = Command("locret-infer", InferOptions, USAGE, positional=("file",))
