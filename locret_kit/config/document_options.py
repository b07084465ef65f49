"""The options of ``locret-read``, ``locret-info``, ``locret-ask``, ``locret-kept`` and ``locret-chat``. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from annotated_types import Ge, Interval

from ..settings import Count, RunSettings, Slots
from .infer_options import Generation
from .machine import Backbone, Machine
from .schema import Command, Repeatable

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
    gone={"graph": "Document.ask(..., graph=True) replays CUDA graphs"},
)
KEPT = Command("locret-kept", KeptOptions, KEPT_USAGE, positional=("file",), short={"-o": "--out"})


USAGE = """usage: locret-chat [BOOK.locret | FILE] [--key value | key=value ...]

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
    USAGE,
    ("file", "model", "ckpt", "budget", "history", "policy", "max_new_tokens", "temperature", "system", "history_file"),
    positional=("file",),
)
