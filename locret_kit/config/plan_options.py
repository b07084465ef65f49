"""The options of ``locret-plan``. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge

from ..settings import Bytes, RunSettings, Slots
from .machine import Plugin
from .schema import Command

USAGE = """usage: locret-plan --model NAME --gpu-memory SIZE [--key value | key=value ...]

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
    USAGE,
    ("model", "gpu_memory", "context", "budget", "chunk", "kv_bits", "weight_bits", "sessions", "train"),
    gone=dict.fromkeys(("speed", "gpu"), "scripts/launches.py counts launches and bytes of a layer"),
)
