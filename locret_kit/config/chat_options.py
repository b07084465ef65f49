"""The options of ``locret-chat``. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge

from ..settings import RunSettings, Slots
from .infer_options import Generation
from .machine import Backbone, Machine
from .schema import Command

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
