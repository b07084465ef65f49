"""Options of all commands that load a backbone, and of ``locret-infer``, ``locret-read``, ``locret-info``,
``locret-ask``, ``locret-kept`` and ``locret-chat``. Imports no torch."""

from dataclasses import dataclass, field, fields
from itertools import chain
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Interval, Predicate

from ..naming import prefixed_errors
from ..settings import Count, Repetition, RunSettings, Slots, Thoughts
from ..validation import Description, validate_fields
from .schema import Command, Idle, Repeatable

Dtype = Literal["auto", "float32", "bfloat16", "float16"]


def is_question(text: str) -> bool:
    """Check a question: True. Raises ValueError for a text without words, or with bytes of another encoding, as the shell gave
    them."""
    if not text.strip():
        raise ValueError("the question is empty")
    with prefixed_errors("the question is not UTF-8", UnicodeEncodeError):
        text.encode()
    return True


Questioned = Annotated[list[str], Repeatable(), Predicate(lambda texts: all(map(is_question, texts)))]
"""Questions of a command line."""


@dataclass(frozen=True, kw_only=True)
class Plugin:
    """Policies of your own."""

    plugin: str | None = None
    """A module or a Python file that defines your own policies."""


@dataclass(frozen=True, kw_only=True)
class Machine(Plugin):
    """The machine."""

    device: str | None = None
    """'cpu', 'cuda', 'cuda:1', ... Default: the best available."""
    dtype: Dtype = "auto"
    """Precision of backbone and cache. auto is bfloat16, or float32 on CPUs without instructions for it."""
    template_kwargs: str | None = None
    """Arguments of the chat template, as JSON. '{"enable_thinking": false}' turns off thinking in models with that
    switch."""
    think: bool | None = None
    """Turn the model's thinking on or off, by the chat template's switch. Default: the template's."""
    reasoning_effort: str | None = None
    """Amount of thinking, in the chat template's words: low, medium or high."""
    weight_bits: Literal[8, 4] | None = None
    """Quantise the layers' weights to n bits with bitsandbytes while loading. Default: no quantisation."""


@dataclass(frozen=True, kw_only=True)
class Backbone:
    """The backbone, its retaining heads and the policy."""

    ckpt: str | None = None
    """Retaining heads: a folder, a .pt or .bin file, or a Hub repository. Default: those that ship for
    --model, if any; without --model the demo's heads for SmolLM2-135M-Instruct."""
    model: str | None = None
    """The backbone: a folder, a Hub id, or a GGUF file (a path; on the Hub user/name/FILE.gguf or user/name:Q4_K_M).
    Default: the one named by the heads."""
    adapter: str | None = None
    """PEFT adapter for the backbone, or none. Default: the one named by the heads."""
    policy: str | None = None
    """A policy's name or an expression. Default: the heads' published policy, or locret; compactor without heads;
    rereading-locret with the demo's heads, for a question of locret-infer and for locret-read."""
    list_policies: bool = False
    """Print every policy with its parts and exit."""


Name = str | int
"""Id of a line of a batch."""


@dataclass(frozen=True, kw_only=True)
class TextSource:
    """The text."""

    file: str | None = None
    """A text file in UTF-8, or a folder; - or nothing reads stdin. A .html, .pdf, .docx or .epub file is converted (extra
    `documents`). Of a folder all text files are read that git does not ignore, each under its path."""
    include: Annotated[list[str], Repeatable()] = field(default_factory=list)
    """The files of a folder by name or path, such as '*.py'. Repeat the option to give several patterns."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The question."""

    question: Questioned = field(default_factory=list)
    """A question about the text, asked through the chat template. Repeat the option to ask several. The text is read
    once, unless the budget is a share of each prompt. Without a question the text is continued."""
    chat: bool = True
    """Use the chat template. Without it nothing follows the question, so it may end with the first words of the
    answer."""


@dataclass(frozen=True, kw_only=True)
class Many:
    """A batch of prompts."""

    batch: str | None = None
    """A file or pipe of prompts, one JSON object per line. Give one of `prompt` (continued), `text` and `question`,
    or `messages` (`role` and `content`). Optional: `id` (default: the line number), `seed`, `max_new_tokens`,
    `temperature`, `top_k`, `top_p`, `repetition_penalty`. Answers do not depend on the other prompts."""
    out: str | None = None
    """The answers of --batch, one JSON object per prompt, in order of completion; -o is the same. A rerun skips
    prompts that the file answers and repeats those with an error. The exit status is 1 if any prompt has an error."""
    batch_size: Annotated[int, Ge(1)] = 32
    """Maximum number of --batch prompts at a time. Each has its own cache of budget + chunk rows."""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Evidence."""

    evidence: bool = False
    """Print up to three passages of the text below an answer: those that its tokens attended to most, with file and line. They
    show where the answer comes from, not that it is right."""


@dataclass(frozen=True, kw_only=True)
class Generation:
    """Generation."""

    max_new_tokens: Annotated[int, Ge(1)] = 128
    """Maximum number of answer tokens, thinking excluded. A cut answer is reported."""
    max_thought_tokens: Annotated[int, Ge(0)] = 2048
    """Maximum number of thinking tokens. Then the chat template's end mark is inserted, and the answer follows."""
    temperature: Annotated[float, Ge(0)] = 0.0
    """Sampling temperature; 0 is greedy."""
    top_k: Annotated[int, Ge(0)] = 0
    """Sample from the n most likely tokens; 0 is all."""
    top_p: Annotated[float, Interval(gt=0, le=1)] = 1.0
    """Sample from the most likely tokens whose probabilities sum to this share."""
    repetition_penalty: Repetition = 1.0
    """Divides the scores of tokens that occurred before; 1 has no effect."""


@dataclass(frozen=True, kw_only=True)
class Messages:
    """Messages."""

    quiet: bool = False
    """Print only errors and warnings on stderr."""


@dataclass(frozen=True, kw_only=True)
class Output(Messages):
    """Output."""

    report: str | None = None
    """Write all measurements of the run to this JSON file."""


@dataclass(frozen=True, kw_only=True)
class InferOptions(TextSource, Asked, Evidence, Many, Backbone, Generation, Output, RunSettings, Machine):
    """Answer from a long text in a fixed key/value budget.

    Examples:
      locret-infer book.pdf --question "Who finds the key?"
      locret-infer --ckpt user/heads --budget 0.1 --question "Who?" --question "When?" < long.txt
      locret-infer book.txt --model checkpoints/SmolLM2-135M-Instruct --policy 'h2o(window=0.25)' --budget 512
      locret-infer --batch prompts.jsonl -o answers.jsonl
    """

    HIDDEN: ClassVar[tuple[str, ...]] = ("decode_every",)


@dataclass(frozen=True, kw_only=True)
class BatchPrompt(Generation):
    """A line of ``--batch``.

    Raises:
        ValueError: a field of a wrong type or out of bounds, or not exactly one of the three forms of a prompt.
    """

    id: Annotated[Name | None, Description("a text or an integer")] = None
    prompt: str | None = None
    text: str | None = None
    question: Annotated[str, Predicate(is_question)] | None = None
    messages: Annotated[
        list[dict[str, str]] | None, Description('a list of {"role": ..., "content": ...}, both texts')
    ] = None
    seed: Annotated[int, Interval(ge=0, lt=2**32)] = 0

    def __post_init__(self) -> None:
        validate_fields(self)
        asked = self.question if self.text is None else self.text
        forms = {"prompt": self.prompt, "text and question": asked, "messages": self.messages}
        given = [form for form, value in forms.items() if value is not None]
        if len(given) != 1:
            raise ValueError(f"give one of: {', '.join(forms)}; found {' and '.join(given) or 'none'}")
        if (self.text is None) != (self.question is None):
            raise ValueError("give text and question together; to continue a text, give it as prompt")


TEMPLATE = ("template_kwargs", "think", "reasoning_effort")
"""Arguments of the chat template."""


def _idle_template(chat: bool) -> Idle:
    if not chat:
        yield TEMPLATE, "with --no-chat, which leaves out the chat template"


def _idle_greedy(options: Generation) -> Idle:
    if options.temperature == 0:
        yield ("top_k", "top_p"), "at temperature 0, which is greedy"


def idle_one_shot(options: RunSettings) -> Idle:
    """Settings of chunks have no effect where a prompt is one chunk."""
    if options.one_shot:
        yield ("chunk", "stabilizers", "local_len"), "with --one-shot, which evicts once, after the whole prompt"


def _idle_infer(options: InferOptions) -> Idle:
    yield from idle_one_shot(options)
    yield from _idle_template(options.chat)
    if options.batch:
        yield ("file", "include", "question", "report", "evidence"), "with --batch, whose lines have the questions"
        return
    yield ("out", "batch_size"), "without --batch"
    if not options.question:
        yield ("chat", *TEMPLATE, "max_thought_tokens"), "without --question: the text is then the whole prompt"
    yield from _idle_greedy(options)


INFER = Command(
    "locret-infer",
    InferOptions,
    "[FILE] [--key value | key=value ...]",
    ("file", "question", "model", "ckpt", "budget", "policy", "max_new_tokens", "batch", "report", "quiet"),
    positional=("file",),
    idle=_idle_infer,
)


@dataclass(frozen=True, kw_only=True)
class Stored:
    """The output file."""

    out: str | None = None
    """The output file; -o is the same. Default: the text's name with the ending .locret, in this folder."""
    append: bool = False
    """Append the text to the document in the output file."""
    overwrite: bool = False
    """Replace an existing file."""
    title: str | None = None
    """A title for people. Default: the text's file name."""
    text: bool = True
    """Store the text's tokens. Without them the file answers the same questions, but the text cannot be read from
    it."""
    chat: bool = True
    """Ask questions through the chat template. Without it nothing follows a question."""


@dataclass(frozen=True, kw_only=True)
class ReadOptions(TextSource, Stored, Messages, Backbone, RunSettings, Machine):
    """Read a text once into a file for locret-ask and locret-chat.

    Examples:
      locret-read book.txt -o book.locret
      pdftotext paper.pdf - | locret-read -o paper.locret --model checkpoints/SmolLM2-135M-Instruct --policy snapkv
      locret-read chapter-2.txt -o book.locret --append
    """


@dataclass(frozen=True, kw_only=True)
class InfoOptions:
    """Show the record of a file written by locret-read. Loads no model.

    Examples:
      locret-info book.locret
      locret-info book.locret --json | python -m json.tool
    """

    file: str
    """A document written by locret-read."""
    json: bool = False
    """Print the file's complete record as JSON."""


@dataclass(frozen=True, kw_only=True)
class Names:
    """The backbone and its retaining heads. They must be the ones that read the text."""

    ckpt: str | None = None
    """Retaining heads: a folder, a .pt or .bin file, or a Hub repository. Default: named in the document."""
    model: str | None = None
    """The backbone: a folder or a Hub id. Default: named in the document."""
    adapter: str | None = None
    """PEFT adapter for the backbone, or none. Default: named in the document."""
    policy: str | None = None
    """The document's policy, if it merges with weights from a folder, which a document cannot name. Default: named
    in the document."""
    force: bool = False
    """Allow a wider dtype than the text was read in."""


@dataclass(frozen=True, kw_only=True)
class Questions:
    """Questions and answers."""

    book: str
    """A document written by locret-read."""
    question: Questioned = field(default_factory=list)
    """A question about the text. Questions do not see each other."""
    question_file: str | None = None
    """A file of questions, one per line; - is stdin."""
    json: bool = False
    """Print one line of JSON per answer, instead of its text."""
    seed: Annotated[int, Interval(ge=0, lt=2**32)] | None = None
    """Seed of sampling. Default: stored in the document."""


@dataclass(frozen=True, kw_only=True)
class AskOptions(Questions, Messages, Evidence, Names, Generation, Machine):
    """Ask about a text that locret-read read.

    Examples:
      locret-ask book.locret "Who finds the key?" "Where is it hidden?"
      locret-ask book.locret --question-file questions.txt --json > answers.jsonl
      locret-ask from-a-friend.locret "Who finds the key?" --model ~/models/SmolLM2-135M-Instruct --ckpt ~/heads
    """


@dataclass(frozen=True, kw_only=True)
class KeptOptions:
    """The words that each layer and head kept of a text: in the terminal, or as a page for the browser.

    Examples:
      locret-kept book.locret
      locret-kept book.locret -o page.html
      locret-kept book.locret --layer 12 --head 0
    """

    file: str
    """A document written by locret-read, with its text."""
    out: str | None = None
    """The HTML page to write; -o is the same. Default: show the text in the terminal."""
    overwrite: bool = False
    """Replace an existing page."""
    layer: Count | None = None
    """Show one layer, counted from 0. Default: all. A page shows each."""
    head: Count | None = None
    """Show one key/value head, counted from 0. Default: all."""
    model: str | None = None
    """The backbone with the document's tokenizer: a folder or a Hub id. Default: named in the document."""


AS_BEFORE = (*(item.name for item in fields(RunSettings)), "policy", "chat", "title", *TEMPLATE)
"""Options that say how a text is read, which goes on as it began."""


def _idle_read(options: ReadOptions) -> Idle:
    if options.append:
        yield AS_BEFORE, "with --append: the document keeps its settings"
    yield from idle_one_shot(options)
    yield from _idle_template(options.chat)


def _idle_kept(options: KeptOptions) -> Idle:
    page = options.out is not None
    yield (("layer", "head"), "with --out: the page shows each") if page else (("overwrite",), "without --out")


READ = Command(
    "locret-read",
    ReadOptions,
    "[FILE] [-o BOOK.locret] [--key value | key=value ...]",
    ("file", "out", "model", "ckpt", "budget", "policy", "append", "overwrite", "title", "quiet"),
    positional=("file",),
    idle=_idle_read,
)
INFO = Command("locret-info", InfoOptions, "BOOK.locret [--json]", positional=("file",))
ASK = Command(
    "locret-ask",
    AskOptions,
    "BOOK.locret [QUESTION ...] [--key value | key=value ...]",
    ("book", "question", "question_file", "model", "ckpt", "max_new_tokens", "temperature", "json", "force", "quiet"),
    positional=("book", "question"),
    idle=_idle_greedy,
)
KEPT = Command(
    "locret-kept",
    KeptOptions,
    "BOOK.locret [-o PAGE.html] [--key value | key=value ...]",
    positional=("file",),
    idle=_idle_kept,
)


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """The conversation."""

    file: str | None = None
    """The subject: a document written by locret-read or /save, or a text (.txt, .md, .html, .pdf, .docx, .epub)."""
    history: Slots = 1024
    """Slots per key/value head for the turns, in addition to the document's budget. Older turns are evicted like
    text."""
    system: str | None = None
    """A system prompt. Only for conversations without a document."""
    thoughts: Thoughts = "evicted"
    """Thoughts of earlier answers: 'evicted' like other tokens; 'dropped' when the turn ends, so that each prompt is
    the chat template's of the whole conversation; or 'pinned'."""
    history_file: str | None = None
    """A file to store your messages for later sessions. Default: none."""


@dataclass(frozen=True, kw_only=True)
class ChatOptions(Conversation, Evidence, Backbone, Generation, RunSettings, Machine):
    """Talk with a model in a terminal, about a document or about anything. Memory does not grow with the conversation.

    Examples:
      locret-chat book.locret
      locret-chat book.pdf --budget 2048
      printf 'Who came in?\\nWhen?\\n' | locret-chat book.locret

    Enter sends, Alt-Enter or a backslash at the end begins another line, Ctrl-C stops an answer, Ctrl-D leaves; /help lists the
    commands. Without a terminal each line of stdin is a message: answers go to stdout, all else to stderr.
    """

    max_new_tokens: Annotated[int, Ge(1)] = 512
    """Maximum number of tokens per answer. A cut answer is reported."""


CHAT = Command(
    "locret-chat",
    ChatOptions,
    "[BOOK.locret | FILE] [--key value | key=value ...]",
    ("file", "model", "ckpt", "budget", "history", "policy", "max_new_tokens", "temperature", "system", "history_file"),
    positional=("file",),
    idle=lambda options: chain(_idle_greedy(options), idle_one_shot(options)),
)
