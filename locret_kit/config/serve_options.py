"""The options of ``locret-serve``. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from annotated_types import Ge, Interval

from ..settings import Bytes, RunSettings
from .machine import Backbone, Machine
from .schema import Command, Repeatable

USAGE = """usage: locret-serve [--key value | key=value ...]

Serve OpenAI's protocol with a fixed key/value budget per session.

  locret-serve --port 8000
  locret-serve --ckpt user/heads --budget 4096 --sessions 16 --api-key-file keys.txt --host 0.0.0.0"""


@dataclass(frozen=True, kw_only=True)
class Service:
    """The service."""

    host: str = "127.0.0.1"
    """Address to listen on. Anything but loopback should have --api-key-file."""
    allowed_hosts: list[str] = field(default_factory=list)
    """Names by which requests may call a server without API keys, beside localhost and the address at which they arrive; * for
    any. A proxy's public name is one. With --api-key-file any name will do."""
    cors_origins: list[str] = field(default_factory=list)
    """Origins whose pages may use the server from a browser, such as http://localhost:3000; * for any, which with API keys is
    harmless and without them lets every page that you look at use it. Default: none."""
    port: Annotated[int, Interval(ge=0, le=65535)] = 8000
    """Port; 0 takes a free one and prints it."""
    sessions: Annotated[int, Ge(1)] = 8
    """Caches at once: requests that run, and conversations that wait for their next turn."""
    documents: Annotated[int, Ge(0)] = 8
    """Documents in memory at once."""
    beginnings: Annotated[int, Ge(0)] = 2
    """Equal beginnings of prompts (system prompts) that are read once, in memory at once; 0 reads each prompt alone."""
    session_dir: str | None = None
    """Folder where every conversation is saved after each turn, and every document, so that they outlive the server and
    leave memory for others. Default: none, they are in memory alone."""
    session_disk: Bytes = "10GiB"
    """Size of that folder, at most: files that were used least recently are removed."""
    max_prompt_tokens: Annotated[int, Ge(1)] = 131072
    """Tokens of a prompt, at most."""
    max_answer_tokens: Annotated[int, Ge(1)] = 4096
    """Tokens of an answer, at most; a request that asks for more gets so many."""
    temperature: Annotated[float, Interval(ge=0, le=2)] | None = None
    """Temperature of requests that name none. Default: that of the backbone's generation_config.json, or OpenAI's 1."""
    grace: Annotated[float, Interval(ge=0, le=3600)] = 10.0
    """Seconds that answers which run are given after Ctrl-C or SIGTERM; then they end with an error that says so."""
    api_key_file: str | None = None
    """A file with one API key per line. Default: no key is asked for."""
    policies: Annotated[list[str], Repeatable()] = field(default_factory=list)
    """A policy that requests may ask for; several times for several."""
    model_name: str | None = None
    """Name of the model in the protocol. Default: the last part of the heads' or the backbone's name."""


@dataclass(frozen=True, kw_only=True)
class ServeOptions(Service, Backbone, RunSettings, Machine):
    """Options of ``locret-serve``."""

    HIDDEN: ClassVar[tuple[str, ...]] = ("one_shot", "decode_every", "list_policies")


_SAMPLING = "a request says it, or the backbone's generation_config.json"
SERVE = Command(
    "locret-serve",
    ServeOptions,
    USAGE,
    ("model", "ckpt", "budget", "policy", "host", "port", "sessions", "documents", "session_dir", "api_key_file"),
    gone={
        "share_session_dir": "a folder of sessions is one server's, docs/serving.md says how several share the work",
        "share_beginnings": "each API key has its own",
        "queue": "64 requests may wait, whatever --sessions is",
        **dict.fromkeys(("top_p", "top_k", "min_p"), _SAMPLING),
        "one_shot": "a conversation has no last chunk that is known before",
        "decode_every": "decoded tokens are evicted when the buffers are full",
    },
)
