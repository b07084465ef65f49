"""Options of ``locret-serve``, ``locret-vllm`` (which also takes those of ``vllm serve``) and ``locret-plan``.
Imports no torch."""

import re
from collections import deque
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Interval

from ..settings import Bytes, RunSettings, Slots, Thoughts
from .infer_options import Backbone, Machine, Plugin, idle_one_shot
from .schema import COMMON_OPTIONS, Command, Idle, Repeatable, options_of


@dataclass(frozen=True, kw_only=True)
class Service:
    """The server."""

    host: str = "127.0.0.1"
    """Address to listen on. Use --api-key-file with any address other than loopback."""
    allowed_hosts: list[str] = field(default_factory=list)
    """Host names that requests may use without API keys, besides localhost and the server's address. Add a proxy's
    public name, or * for any. With --api-key-file any name is allowed."""
    cors_origins: list[str] = field(default_factory=list)
    """Origins of web pages that may call the server, such as http://localhost:3000. * allows any: safe with API
    keys; without them every page in your browser can use the server. Default: none."""
    port: Annotated[int, Interval(ge=0, le=65535)] = 8000
    """Port; 0 chooses a free port and prints it."""
    sessions: Annotated[int, Ge(1)] = 8
    """Maximum number of caches: running requests, and conversations that wait for their next turn."""
    documents: Annotated[int, Ge(0)] = 8
    """Maximum number of documents in memory."""
    document_budget: Slots | None = None
    """Maximum budget that the upload of a document may ask for; memory is then that of such caches. Default: --budget."""
    shared_prefixes: Annotated[int, Ge(0)] = 2
    """Maximum number of shared prefixes (system prompts) in memory. 0 disables sharing."""
    session_dir: str | None = None
    """Folder for saved conversations (after each turn) and documents. They then survive a restart and free memory
    for others. Default: none, kept in memory only."""
    session_disk: Bytes = "10GiB"
    """Maximum size of --session-dir. The least recently used files are removed."""
    max_prompt_tokens: Annotated[int, Ge(1)] = 131072
    """Maximum number of tokens per prompt."""
    max_answer_tokens: Annotated[int, Ge(1)] = 4096
    """Maximum number of tokens per answer. Requests for more are lowered to it, which the header x-max-tokens
    reports."""
    strict_max_tokens: bool = False
    """Refuse requests for more than --max-answer-tokens."""
    thoughts: Thoughts = "evicted"
    """Thoughts of earlier answers: 'evicted' like other tokens; 'dropped', so that each prompt is read as by a fresh
    run from the shared prefix on (a second cache per session); or 'pinned'."""
    temperature: Annotated[float, Interval(ge=0, le=2)] | None = None
    """Temperature for requests without one. Default: the backbone's generation_config.json, or OpenAI's 1."""
    grace: Annotated[float, Interval(ge=0, le=3600)] = 10.0
    """Seconds for running answers to finish after Ctrl-C or SIGTERM. Then they end with an error that gives the
    reason."""
    api_key_file: str | None = None
    """A file with one API key per line. Default: no key is required."""
    policies: Annotated[list[str], Repeatable()] = field(default_factory=list)
    """A policy that requests may select. Repeat the option for several."""
    model_name: str | None = None
    """Model name in the API. Default: the last part of the heads' or the backbone's name."""


@dataclass(frozen=True, kw_only=True)
class ServeOptions(Service, Backbone, RunSettings, Machine):
    """Serve OpenAI's protocol with a fixed key/value budget per session.

    Examples:
      locret-serve --port 8000
      locret-serve --ckpt user/heads --budget 4096 --sessions 16 --api-key-file keys.txt --host 0.0.0.0
    """

    HIDDEN: ClassVar[tuple[str, ...]] = ("one_shot", "decode_every", "list_policies")


SERVE = Command(
    "locret-serve",
    ServeOptions,
    main=("model", "ckpt", "budget", "policy", "host", "port", "sessions", "documents", "session_dir", "api_key_file"),
)


@dataclass(frozen=True, kw_only=True)
class VllmOptions(RunSettings, Plugin):
    """Serve with vLLM and a fixed key/value budget per request: `vllm serve` with the dependent options set.

    Examples:
      locret-vllm --ckpt checkpoints/smollm2-135m-locret --budget 4096 --sessions 16
      locret-vllm --ckpt user/heads --documents library --max-model-len 131072 --host 0.0.0.0 --api-key KEY
    """

    HIDDEN: ClassVar[tuple[str, ...]] = ("kv_bits", "one_shot", "seed")

    ckpt: str | None = None
    """Retaining heads: a folder, a .pt or .bin file, or a Hub repository. Default: those that ship for
    --model, if any; without --model the demo's."""
    model: str | None = None
    """The backbone: a folder or a Hub id. Default: the one named by the heads."""
    policy: str | None = None
    """A policy's name or an expression. Default: the heads' published policy; without heads compactor, or the
    nearest that fits a page."""
    policies: Annotated[list[str], Repeatable()] = field(default_factory=list)
    """A policy that requests may select. Repeat the option for several."""
    sessions: Annotated[int, Ge(1)] | None = None
    """Maximum number of running requests, one page each, and of answers (``n``) per request; others wait. Default: as many as
    fit into vLLM's memory. Give it on a CPU."""
    documents: str | None = None
    """Folder of documents written by locret-read. A prompt that begins with one continues from its file."""


VLLM = Command(
    "locret-vllm",
    VllmOptions,
    "[--key value | key=value ...] [options of vllm serve ...]",
    ("model", "ckpt", "budget", "policy", "policies", "sessions", "documents", "chunk", "protect", "plugin"),
)


def shared_out(argv: list[str]) -> tuple[list[str], list[str]]:
    """Split a command line into the kit's arguments and vLLM's."""
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


@dataclass(frozen=True, kw_only=True)
class PlanOptions(RunSettings, Plugin):
    """Memory of a run before it starts. Needs no GPU, weights or Hub.

    Examples:
      locret-plan --model phi3-mini --gpu-memory 24GiB --context 131072
      locret-plan --model phi3-mini --gpu-memory 24GiB --sessions 8 --budget 1024 --chunk 512
      locret-plan --model phi3-mini --gpu-memory 24GiB --engine vllm
    """

    HIDDEN: ClassVar[tuple[str, ...]] = ("positions", "protect", "decode_every", "seed", "backend")

    model: str
    """A recipe, a folder with config.json, a Hub id, or a GGUF file. A recipe also provides defaults for the other
    options."""
    gpu_memory: Bytes
    """GPU memory available to the run, such as 24GiB."""
    reserve: Bytes = "1GiB"
    """GPU memory kept free for the CUDA context, libraries and fragmentation (an assumption)."""
    context: int = 131072
    """Prompt length in tokens."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Data type of weights, heads, keys and values."""
    policy: str = "locret"
    """A policy's name or an expression."""
    d_hidden: Slots | None = None
    """Width of the retaining heads, if the policy needs them. Default: the recipe's, or 1024."""
    weight_bits: Literal[8, 4] | None = None
    """Bits per weight of the layers. Default: those of --dtype."""
    engine: Literal["kit", "vllm"] = "kit"
    """The server to plan: 'kit' is locret-serve, 'vllm' is locret-vllm with one page per request."""
    sessions: Annotated[int, Ge(1)] | None = None
    """Plan a server with n sessions. Default with vllm: as many as fit."""
    ranks: Annotated[int, Ge(1)] = 1
    """GPUs that share every layer: vLLM's --tensor-parallel-size, for engine=vllm. --gpu-memory is per GPU."""
    documents: Annotated[int, Ge(0)] = 8
    """Number of documents in the server's memory."""
    document_budget: Slots | None = None
    """Maximum budget of a document in the server's memory. Every cache is planned in its size. Default: --budget."""
    shared_prefixes: Annotated[int, Ge(0)] = 2
    """Number of shared prefixes in the server's memory."""
    thoughts: Thoughts = "evicted"
    """Thoughts of earlier answers in the server: 'dropped' takes a second cache per session."""


def _idle_plan(options: PlanOptions) -> Idle:
    yield from idle_one_shot(options)
    if options.sessions or options.engine == "vllm":
        yield ("one_shot",), "in a plan of a server, which evicts after every chunk"
    if options.sessions is None or options.engine == "vllm":
        server = "documents", "document_budget", "shared_prefixes", "thoughts"
        yield server, "but in a plan of locret-serve: give --sessions N, and no --engine vllm"


PLAN = Command(
    "locret-plan",
    PlanOptions,
    "--model NAME --gpu-memory SIZE [--key value | key=value ...]",
    ("model", "gpu_memory", "context", "budget", "chunk", "kv_bits", "weight_bits", "sessions"),
    idle=_idle_plan,
)
