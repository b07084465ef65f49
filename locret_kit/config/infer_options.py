"""The options of every command that loads a backbone, and those of ``locret-infer``, ``locret-read``, ``locret-info``,
``locret-ask``, ``locret-kept`` and ``locret-chat``. No torch.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from annotated_types import Ge, Gt, Interval

from ..settings import Count, Description, RunSettings, Slots, Thoughts, check
from .schema import Command, Repeatable

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Dtype = Literal["auto", "float32", "bfloat16", "float16"]


@dataclass(frozen=True, kw_only=True)
class Plugin:
    """Policies of your own."""

    plugin: str | None = None
    """A module, or a Python file, that brings policies of your own."""

    def load_plugin(self) -> None:
        """Make the plugin's policies known."""
        if self.plugin is not None:
            from ..policies import registry

            registry.load_plugin(self.plugin)


@dataclass(frozen=True, kw_only=True)
class Machine(Plugin):
    """The machine."""

    device: str | None = None
    """'cpu', 'cuda', 'cuda:1', ... Default: the best there is."""
    dtype: Dtype = "auto"
    """Precision of backbone and cache; auto is bfloat16, unless a CPU is slower with it."""
    template_kwargs: str | None = None
    """Arguments of the chat template, as JSON: '{"enable_thinking": false}' switches off the thoughts of models that have such a
    switch."""
    think: bool | None = None
    """Answer with thoughts, or without: the switch of the chat template. Default: the template's."""
    reasoning_effort: str | None = None
    """How much to think, in the words of the chat template: low, medium or high."""
    weight_bits: Literal[8, 4] | None = None
    """Bits of the layers' weights, quantised by bitsandbytes as they are loaded. Default: as ``dtype``."""

    def set_template(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Give the tokenizer's template its arguments. Raises ValueError for what it does not take, or what is no JSON."""
        if self.template_kwargs is None and self.think is None and self.reasoning_effort is None:
            return
        from ..text.template import DEFAULTS, render_messages, thinking_arguments

        try:
            arguments = json.loads(self.template_kwargs or "{}")
        except ValueError:
            arguments = None
        if not isinstance(arguments, dict):
            raise ValueError(f"template_kwargs={self.template_kwargs!s:.64} must be an object of JSON")
        arguments |= thinking_arguments(tokenizer, self.think, self.reasoning_effort)
        render_messages(tokenizer, [{"role": "user", "content": "?"}], arguments=arguments)
        setattr(tokenizer, DEFAULTS, arguments)


@dataclass(frozen=True, kw_only=True)
class Backbone:
    """The backbone, its retaining heads and the policy."""

    ckpt: str | None = None
    """Retaining heads: a folder, a .pt or .bin file, or a Hub repository. Default: with --model none, else the demo's, for
    SmolLM2-135M-Instruct."""
    model: str | None = None
    """The backbone: a folder, a Hub id, or a GGUF file (a path; on the Hub user/name/FILE.gguf or user/name:Q4_K_M). Default: the
    one the heads name."""
    adapter: str | None = None
    """PEFT adapter for the backbone, or none. Default: the one the heads name."""
    policy: str | None = None
    """A policy's name or an expression. Default: what the heads were published with (locret, where they name none); without
    heads compactor; locret-infer with the demo's heads and a question rereading-locret."""
    list_policies: bool = False
    """Print every policy with its parts and leave."""


INFER_USAGE = """usage: locret-infer [FILE] [--key value | key=value ...]

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
    """Answer tokens, at most, without its thought; an answer that is cut there says so."""
    max_thought_tokens: Annotated[int, Ge(0)] = 2048
    """Tokens of a thought, at most; then the chat template's end mark closes it, and the answer follows."""
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
    INFER_USAGE,
    ("file", "question", "model", "ckpt", "budget", "policy", "max_new_tokens", "batch", "report", "quiet"),
    positional=("file",),
    short={"-o": "--out"},
    gone={
        "save_cache": _READ_ONCE,
        "cache": _READ_ONCE,
        "question_file": 'the shell reads files: --question "$(cat FILE)"',
        "gpu_memory": "locret-plan --gpu-memory SIZE says which --chunk and --budget fit",
        "graph": "CUDA graphs are replayed where they can be; Answer(..., graph=False) decodes without",
        "decode_every": "decoded tokens are evicted when the buffers are full",
    },
)


READ_USAGE = """usage: locret-read [FILE] -o BOOK.locret [--key value | key=value ...]

Read a text once into a file that locret-ask and locret-chat ask about.

  locret-read book.txt -o book.locret
  pdftotext paper.pdf - | locret-read -o paper.locret --model checkpoints/SmolLM2-135M-Instruct --policy snapkv
  locret-read chapter-2.txt -o book.locret --append"""

INFO_USAGE = """usage: locret-info BOOK.locret [--json]

What a file of locret-read holds. No model is loaded.

  locret-info book.locret
  locret-info book.locret --json | python -m json.tool"""

ASK_USAGE = """usage: locret-ask BOOK.locret [QUESTION ...] [--key value | key=value ...]

Ask about a text that locret-read has read.

  locret-ask book.locret "Who finds the key?" "Where is it hidden?"
  locret-ask book.locret --question-file questions.txt --json > answers.jsonl
  locret-ask from-a-friend.locret "Who finds the key?" --model ~/models/SmolLM2-135M-Instruct --ckpt ~/heads"""

KEPT_USAGE = """usage: locret-kept BOOK.locret [-o PAGE.html] [--key value | key=value ...]

The words that each layer and head kept of a text: in the terminal, or as a page for the browser.

  locret-kept book.locret
  locret-kept book.locret -o page.html
  locret-kept book.locret --layer 12 --head 0"""


@dataclass(frozen=True, kw_only=True)
class TextSource:
    """The text, and the file that it becomes."""

    file: str | None = None
    """The text, UTF-8; - or nothing is stdin. A .html, .pdf, .docx or .epub file is converted (extra `documents`)."""
    out: str
    """The file to write; -o is the same."""
    append: bool = False
    """Add the text to the end of the one that the file holds."""
    overwrite: bool = False
    """Replace the file if it is there."""
    title: str | None = None
    """A name for people. Default: the text's file name."""
    text: bool = True
    """Store the text's tokens. Without, the file answers the same questions, but no one can read the text out of it."""
    chat: bool = True
    """Put questions through the chat template; without, nothing follows a question."""
    quiet: bool = False
    """Nothing on stderr but errors and warnings."""


@dataclass(frozen=True, kw_only=True)
class ReadOptions(TextSource, Backbone, RunSettings, Machine):
    """Options of ``locret-read``."""


@dataclass(frozen=True, kw_only=True)
class InfoOptions:
    """The file."""

    file: str
    """A file that locret-read wrote."""
    json: bool = False
    """The whole record as JSON, as the file holds it."""


@dataclass(frozen=True, kw_only=True)
class Names:
    """The backbone and its retaining heads, which must be those that read the text."""

    ckpt: str | None = None
    """Retaining heads: a folder, a .pt or .bin file, or a Hub repository. Default: what the file names."""
    model: str | None = None
    """The backbone: a folder or a Hub id. Default: what the file names."""
    adapter: str | None = None
    """PEFT adapter for the backbone, or none. Default: what the file names."""
    policy: str | None = None
    """The same policy, where the file cannot name it: one that merges by weights of a folder. Default: the file's."""
    force: bool = False
    """Go on in a wider dtype than the text was read in."""


@dataclass(frozen=True, kw_only=True)
class Questions:
    """Questions and answers."""

    book: str
    """A file that locret-read wrote."""
    question: Annotated[list[str], Repeatable()] = field(default_factory=list)
    """Asked about the text; each question starts from the text alone."""
    question_file: str | None = None
    """Questions from a file, one a line; - is stdin."""
    json: bool = False
    """One line of JSON for each answer, instead of its text as it is written."""
    quiet: bool = False
    """Nothing on stderr but errors and warnings."""
    seed: Annotated[int, Interval(ge=0, lt=2**32)] | None = None
    """Seed of sampling. Default: the one that the text was read with."""


@dataclass(frozen=True, kw_only=True)
class AskOptions(Questions, Names, Generation, Machine):
    """Options of ``locret-ask``."""


@dataclass(frozen=True, kw_only=True)
class KeptOptions:
    """The file, and what is shown of it."""

    file: str
    """A file that locret-read wrote, with its text."""
    out: str | None = None
    """The page to write; -o is the same. Default: the text in the terminal."""
    overwrite: bool = False
    """Replace the page if it is there."""
    layer: Count | None = None
    """Show one layer, from 0. Default: all. A page shows each."""
    head: Count | None = None
    """Show one key/value head, from 0. Default: all."""
    model: str | None = None
    """The backbone whose tokenizer made the tokens: a folder or a Hub id. Default: what the file names."""


READ = Command(
    "locret-read",
    ReadOptions,
    READ_USAGE,
    ("file", "out", "model", "ckpt", "budget", "policy", "append", "overwrite", "title", "quiet"),
    positional=("file",),
    short={"-o": "--out"},
)
INFO = Command("locret-info", InfoOptions, INFO_USAGE, positional=("file",))
ASK = Command(
    "locret-ask",
    AskOptions,
    ASK_USAGE,
    ("book", "question", "question_file", "model", "ckpt", "max_new_tokens", "temperature", "json", "force", "quiet"),
    positional=("book", "question"),
    gone={"graph": "CUDA graphs are replayed where they can be; Document.ask(..., graph=False) decodes without"},
)
KEPT = Command("locret-kept", KeptOptions, KEPT_USAGE, positional=("file",), short={"-o": "--out"})


CHAT_USAGE = """usage: locret-chat [BOOK.locret | FILE] [--key value | key=value ...]

Talk with a model in a terminal, about a document or about anything. Memory does not grow with the conversation.

  locret-chat book.locret
  locret-chat book.pdf --budget 2048
  printf 'Who came in?\\nWhen?\\n' | locret-chat book.locret

Enter sends, Alt-Enter or a backslash at the end begins another line, Ctrl-C stops an answer, Ctrl-D leaves; /help lists the
commands. Without a terminal each line of stdin is a message: answers go to stdout, all else to stderr."""


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """The conversation."""

    file: str | None = None
    """Its subject: a document that locret-read or /save wrote, or a text (.txt, .md, .html, .pdf, .docx, .epub)."""
    history: Slots = 1024
    """Slots of a key/value head that the turns have, beside the document's budget. Older turns are evicted as text is."""
    system: str | None = None
    """A system prompt, for conversations without a document."""
    thoughts: Thoughts = "evicted"
    """Thoughts of earlier answers: evicted like all else; dropped when the turn ends, so that each prompt is the chat template's
    of the whole conversation; or pinned."""
    history_file: str | None = None
    """A file in which your messages are kept for the next time. Default: none."""


@dataclass(frozen=True, kw_only=True)
class ChatOptions(Conversation, Backbone, Generation, RunSettings, Machine):
    """Options of ``locret-chat``."""

    max_new_tokens: Annotated[int, Ge(1)] = 512
    """Tokens of an answer, at most; one that is cut there says so."""


CHAT = Command(
    "locret-chat",
    ChatOptions,
    CHAT_USAGE,
    ("file", "model", "ckpt", "budget", "history", "policy", "max_new_tokens", "temperature", "system", "history_file"),
    positional=("file",),
)
