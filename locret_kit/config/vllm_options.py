"""The options of ``locret-vllm``; those of ``vllm serve`` may stand among them. No torch."""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from annotated_types import Ge

from ..settings import RunSettings
from .machine import Plugin
from .schema import COMMON_OPTIONS, Command, Repeatable, options_of

USAGE = """usage: locret-vllm [--key value | key=value ...] [options of vllm serve ...]

Serve with vLLM, whose requests then have a fixed key/value budget each: `vllm serve` with what must go together set.

  locret-vllm --ckpt checkpoints/smollm2-135m-locret --budget 4096 --sessions 16
  locret-vllm --ckpt user/heads --documents library --max-model-len 131072 --host 0.0.0.0 --api-key KEY"""


@dataclass(frozen=True, kw_only=True)
class VllmOptions(RunSettings, Plugin):
    """The server. Other words go to vLLM."""

    HIDDEN: ClassVar[tuple[str, ...]] = ("kv_bits", "one_shot", "seed")

    ckpt: str | None = None
    """Retaining heads: a folder, a .pt or .bin file, or a Hub repository. Default: with --model none, else the demo's."""
    model: str | None = None
    """The backbone: a folder or a Hub id. Default: the one the heads name."""
    policy: str | None = None
    """A policy's name or an expression. Default: what the heads were published with; without heads compactor, or the
    nearest that a page can hold."""
    policies: Annotated[list[str], Repeatable()] = field(default_factory=list)
    """A policy that requests may ask for; several times for several."""
    sessions: Annotated[int, Ge(1)] | None = None
    """Requests that run at once, each with a page; more wait. Default: as many as vLLM finds room for."""
    documents: str | None = None
    """Folder of documents that locret-read made: a prompt that begins with one goes on from its file."""


VLLM = Command(
    "locret-vllm",
    VllmOptions,
    USAGE,
    ("model", "ckpt", "budget", "policy", "policies", "sessions", "documents", "chunk", "protect", "plugin"),
)


def shared_out(argv: list[str]) -> tuple[list[str], list[str]]:
    """The words of a command line that are the kit's options, and those that are vLLM's."""
    known = {*options_of(VllmOptions), *(name.replace("-", "_") for name in COMMON_OPTIONS)}
    ours, theirs, rest = list[str](), list[str](), deque(argv)
    while rest:
        word = rest.popleft()
        match = re.match(r"(--)?([A-Za-z_][\w.-]*)(=|$)", word)
        name = match[2].replace("-", "_") if match else ""
        if word == "-h" or (name in known and match and (match[1] or match[3])):
            ours.append(word)
            alone = word == "-h" or name in ("help", "version", "print_config")
            if not alone and match and not match[3] and rest:
                ours.append(rest.popleft())
            if name == "help" and rest and rest[0] == "all":
                ours.append(rest.popleft())
        else:
            theirs.append(word)
    return ours, theirs
