"""The options of ``locret-serve``, of ``locret-vllm`` (those of ``vllm serve`` may stand among them), and of ``locret-plan``.

No torch.
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Interval

from ..settings import Bytes, RunSettings, Slots, Thoughts
from .infer_options import Backbone, Machine, Plugin
from .schema import COMMON_OPTIONS, Command, Repeatable, options_of

SERVE_USAGE = """usage: locret-serve [--key value | key=value ...]

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
    """Tokens of an answer, at most; a request that asks for more gets so many, and x-max-tokens says it."""
    strict_max_tokens: bool = False
    """Refuse a request that asks for more tokens than --max-answer-tokens."""
    thoughts: Thoughts = "evicted"
    """Thoughts of earlier answers in the caches of conversations: evicted like all else; dropped, so that every prompt is read as
    by a fresh run, from what it shares with the one before on, which takes a second cache a session; or pinned."""
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
    SERVE_USAGE,
    ("model", "ckpt", "budget", "policy", "host", "port", "sessions", "documents", "session_dir", "api_key_file"),
    gone={
        "share_session_dir": "a folder of sessions is one server's, docs/howto/scale.md says how several share the work",
        "share_beginnings": "each API key has its own",
        "queue": "64 requests may wait, whatever --sessions is",
        **dict.fromkeys(("top_p", "top_k", "min_p"), _SAMPLING),
        "one_shot": "a conversation has no last chunk that is known before",
        "decode_every": "decoded tokens are evicted when the buffers are full",
    },
)


VLLM_USAGE = """usage: locret-vllm [--key value | key=value ...] [options of vllm serve ...]

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
    VLLM_USAGE,
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


PLAN_USAGE = """usage: locret-plan --model NAME --gpu-memory SIZE [--key value | key=value ...]

What a run needs, before it is run: no GPU, no weights, no Hub.

  locret-plan --model phi3-mini --gpu-memory 24GiB --context 131072
  locret-plan --model phi3-mini --gpu-memory 24GiB --sessions 16
  locret-plan --model phi3-mini --gpu-memory 24GiB --engine vllm
  locret-plan --model qwen3-8b --gpu-memory 24GiB --train 10240 --batch 4"""


@dataclass(frozen=True, kw_only=True)
class PlanOptions(RunSettings, Plugin):
    """The plan."""

    HIDDEN: ClassVar[tuple[str, ...]] = ("positions", "protect", "decode_every", "seed", "backend")

    model: str
    """A recipe, a folder with config.json, a Hub id, or a GGUF file. A recipe's settings stand in for those that are not
    given."""
    gpu_memory: Bytes
    """Memory that the run may take, such as 24GiB."""
    reserve: Bytes = "1GiB"
    """Kept free for the CUDA context, libraries and fragmentation: an assumption."""
    context: int = 131072
    """Prompt tokens."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Type of weights, heads, keys and values."""
    policy: str = "locret"
    """A policy's name or an expression."""
    d_hidden: Slots | None = None
    """Width of the retaining heads, for policies that need them. Default: the recipe's, or 1024."""
    weight_bits: Literal[8, 4] | None = None
    """Bits of the layers' weights. Default: as ``dtype``."""
    engine: Literal["kit", "vllm"] = "kit"
    """The server that is planned: locret-serve, or locret-vllm, in which each request has a page and nothing else is held."""
    sessions: Annotated[int, Ge(1)] | None = None
    """Plan the server with so many sessions instead. With vllm by default as many as fit."""
    ranks: Annotated[int, Ge(1)] = 1
    """Cards that share every layer, of ``engine=vllm``: its --tensor-parallel-size. The memory is that of each."""
    documents: Annotated[int, Ge(0)] = 8
    """Documents that the server holds."""
    beginnings: Annotated[int, Ge(0)] = 2
    """Equal beginnings of prompts that the server holds."""
    train: int | None = None
    """Plan a training step of samples of so many tokens instead."""
    batch: int | None = None
    """Samples of one forward in training. Default: the recipe's data.batch, or 1."""


PLAN = Command(
    "locret-plan",
    PlanOptions,
    PLAN_USAGE,
    ("model", "gpu_memory", "context", "budget", "chunk", "kv_bits", "weight_bits", "sessions", "train"),
    gone=dict.fromkeys(("speed", "gpu"), "scripts/launches.py counts launches and bytes of a layer"),
)
