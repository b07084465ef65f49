"""Texts of a worker of vLLM: the pages of its layers, and the rows of each request in them.

Attention of a step, layer by layer: new tokens are scored at once, the texts that have one new token are decoded in one call,
and the others are read one after another by the kit's own ``cache.step``. What a layer counts follows from what it was given, so
nothing is told to vLLM, and a request that is preempted begins anew.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from ..backbones.decoder_attention import Described, Softmax
from ..backbones.load import load_config
from ..backbones.patches import lacks_bfloat16
from ..backbones.probe import assumed
from ..backbones.spec import BackboneSpec, spec_of
from ..cache.bounded import BoundedCache
from ..cache.context import CacheCounters, Context, make_layers
from ..cache.due import Schedule
from ..cache.pages import PageShape, RowPool, SharedRotations
from ..cache.storage.codec import Scratch
from ..cache.storage.rows import STATE, BoundedLayer, export_rows, restore_rows
from ..cache.texts import TextBatch
from ..cache.view import first_pins
from .refusals import refuse_engine
from .request_pages import Ranks, config_of_rank, heads_of_rank, page_shape
from .server_settings import ServerSettings, VllmSettings

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig


NOBODY = 0
"""vLLM's block that belongs to no request: of padding, and of runs that warm it up."""


class Standin(nn.Module, Described):
    """The model of a ``Context``: the language model's configuration of one rank, its rotary embedding, and its device. Its
    attention is what the configuration says, as the tests hold for ``refusals.MODELS``."""

    def __init__(self, config: PretrainedConfig, ranks: Ranks, dtype: torch.dtype, device: torch.device) -> None:
        from transformers import AutoModelForCausalLM

        super().__init__()
        with torch.device("meta"):
            made = AutoModelForCausalLM.from_config(deepcopy(config), dtype=torch.float32)
        self.config, self.dtype, self.device = config_of_rank(config, ranks), dtype, device
        kind_of_rope = type(made.get_decoder().rotary_emb)
        self.rotary_emb = kind_of_rope(config=deepcopy(config)).to(device)
        self.description = assumed(self.config, self.rotary_emb)

    def get_decoder(self) -> Standin:
        return self


@dataclass
class RequestInfo:
    """A request's settings: the length of its prompt, and what it asks for by itself."""

    prompt_length: int
    own: Mapping[str, object]


@dataclass(eq=False)
class PagedText:
    """A request that has a page."""

    context: Context
    layers: list[BoundedLayer]
    page: int
    pools: Mapping[int, RowPool]
    """Of each layer that has run."""
    seen: int = 0
    """Tokens that it has read, those of the step that runs included."""

    def open(self, layer: int, softmax: Softmax, k_BH0D: Tensor, v_BH0D: Tensor) -> BoundedLayer:
        """The rows of a layer, in the request's page."""
        rows = self.layers[layer]
        if not rows.is_initialized:
            self.pools[layer].lend(self.page, rows)
        rows.softmax = softmax
        return rows

    def close(self, layer: int) -> None:
        pass


@dataclass
class RequestTurn:
    """New tokens of a request in one step: rows ``start`` to ``end`` of the batch, after ``seen`` others."""

    start: int
    end: int
    seen: int
    page: int
    info: RequestInfo


class Worker:
    """The texts of one worker.

    Attributes:
        requests: those in the rows of vLLM's batch, see ``requests``.

    Raises:
        ValueError: heads or settings that do not fit the model.
    """

    def __init__(
        self, server: ServerSettings, config: PretrainedConfig, dtype: torch.dtype, device: torch.device, ranks: Ranks
    ) -> None:
        self.server, self.ranks = server, ranks
        if server.heads is not None:
            server.heads.check_backbone(spec_of(config))
        # A copy: documents are checked with the server's own, on the host.
        own = None if server.heads is None else heads_of_rank(deepcopy(server.heads), ranks)
        self.heads = own and own.to(device, dtype)
        self.model = Standin(config, ranks, dtype, device)
        self.spec = self.model.description.spec
        self.shape: PageShape = page_shape(self.spec, server.settings, server.policies.values(), dtype)
        self.requests: dict[int, RequestInfo] = {}
        self.texts: dict[int, PagedText] = {}
        self.pools: dict[int, RowPool] = {}
        self.rotations, self.counters = SharedRotations(), CacheCounters()
        self.context(RequestInfo(1, {}))  # what is wrong is said here

    # ---- texts -------------------------------------------------------------------------------------------------------

    def context(self, info: RequestInfo) -> Context:
        """The context of a request, which stays the same for its whole life."""
        policy, settings = self.server.request(info.own, info.prompt_length)
        schedule = Schedule.of(settings, info.prompt_length)
        heads = self.heads if policy.needs_heads else None
        ctx = Context.of(self.model, policy, schedule, heads, settings, self.counters)  # type: ignore[arg-type]
        return self.rotations.of(replace(ctx, pins=first_pins(settings)))

    def begin(self, info: RequestInfo, page: int) -> PagedText:
        """A new request, in a page that held another one."""
        ctx = self.context(info)
        text = self.texts[page] = PagedText(ctx, make_layers(ctx, Scratch()), page, self.pools)
        return text

    def take(self, info: RequestInfo, page: int, document: BoundedCache, kv_caches: Mapping[int, Tensor]) -> None:
        """A new request, that has read a document of all ranks."""
        text = self.begin(info, page)
        for number, kv_cache in kv_caches.items():
            empty = self.pool(number, kv_cache).keys.new_empty(1, self.spec.n_kv_heads, 0, self.spec.head_dim)
            rows = text.open(number, Softmax(1.0), empty, empty)
            counts, tensors = export_rows(document.bounded[number])
            own = {name: of_rank(name, x, self.ranks, self.spec) for name, x in tensors.items()}
            restore_rows(rows, counts, own, empty, empty)
        text.seen = document.get_seq_length()

    def text(self, turn: RequestTurn) -> PagedText:
        """The request whose turn it is.

        Raises:
            RuntimeError: the page holds another text than vLLM says.
        """
        if turn.seen == 0:
            return self.begin(turn.info, turn.page)
        text = self.texts.get(turn.page)
        if text is None or text.seen != turn.seen:
            tokens = "nothing" if text is None else f"{text.seen} tokens"
            raise RuntimeError(f"page {turn.page} holds {tokens}, and vLLM says {turn.seen} tokens: please report this")
        return text

    def pool(self, number: int, kv_cache: Tensor) -> RowPool:
        """Pages of a layer in vLLM's memory ``[pages, H, rows, ...]``."""
        if number not in self.pools:
            self.pools[number] = RowPool(self.shape, kv_cache, len(kv_cache))
        return self.pools[number]

    # ---- a step ------------------------------------------------------------------------------------------------------

    def attend(
        self, number: int, q_NQD: Tensor, k_NHD: Tensor, v_NHD: Tensor, kv_cache: Tensor, step: Step, scaling: float,
        out_NQD: Tensor,
    ) -> None:  # fmt: skip
        """Attention of a step's new tokens in one layer, into ``out``; they become rows, and what is due is evicted."""
        self.pool(number, kv_cache)
        if step.batch is None:  # in the first layer: by then documents are loaded
            self.rotations.tables.clear()
            texts = [self.text(turn) for turn in step.turns]
            for text, turn in zip(texts, step.turns, strict=True):
                text.seen = turn.seen + turn.end - turn.start
            spans = [(turn.start, turn.end) for turn in step.turns]
            step.batch = TextBatch(texts, spans, [turn.seen for turn in step.turns])
        step.batch.attend(number, q_NQD, k_NHD, v_NHD, Softmax(scaling), out_NQD)


def of_rank(name: str, x: Tensor, ranks: Ranks, spec: BackboneSpec) -> Tensor:
    """The part of a document's tensor that belongs to the heads of one rank; ``spec`` is the rank's."""
    heads = spec.n_heads if name == "queries" else spec.n_kv_heads
    return x.narrow(int(name == "stats" or name.startswith(STATE)), ranks.rank * heads, heads)


@dataclass
class Step:
    """New tokens of one step, the same in all of its layers: made by the builder of attention metadata."""

    turns: list[RequestTurn]
    batch: TextBatch | None = None


# ---- the worker of this process ------------------------------------------------------------------------------------


LOG = logging.getLogger("locret_kit")
SECTION = "locret"
"""Name of the kit's settings in vLLM's ``--additional-config``."""
PROCESSOR = "locret_kit.vllm:Requests"
"""The logits processor by which an engine asks for a bounded cache."""


class State:
    """One for a process."""

    worker: Worker | None = None
    server: ServerSettings | None = None
    """Settings by which requests are checked."""
    section: object = None
    """The section of the configuration of which the worker was made."""


def engine_options(
    server: ServerSettings, config: Mapping[str, object] | None = None, processors: Sequence[object] | None = None
) -> dict[str, object]:
    """Options of an engine, as ``LLM(model, **engine_options(server))``, whose requests are checked in this process. ``config``
    and ``processors`` are what it is told beside them."""
    State.server = server
    return {
        "additional_config": {**(config or {}), SECTION: server.section.given()},
        "logits_processors": [*(processors or ()), PROCESSOR],
        "enable_prefix_caching": False,
    }


def section_of(vllm_config: VllmConfig) -> object:
    """The kit's settings in an engine's configuration."""
    config = vllm_config.additional_config
    return config.get(SECTION) if isinstance(config, dict) else None


def server_of(vllm_config: VllmConfig) -> ServerSettings:
    """Settings of an engine's server. Raises ValueError: there are none, or they do not go together."""
    section = section_of(vllm_config)
    if not isinstance(section, dict):
        raise ValueError(
            f"additional_config must hold the settings of {PROCESSOR}: {{{SECTION!r}: {{'budget': 4096}}}}"
        )
    return ServerSettings(VllmSettings.read(section))


def begin(vllm_config: VllmConfig, device: torch.device) -> Worker:
    """Make the worker of this process. Raises ValueError: an engine that does not go with a bounded cache."""
    server, model = server_of(vllm_config), vllm_config.model_config
    refuse_engine(vllm_config, server.section.documents)
    if device.type == "cpu" and model.dtype == torch.bfloat16 and lacks_bfloat16():
        LOG.warning("warning: dtype=bfloat16: this processor widens each number of it: --dtype float32 is faster")
    State.server, State.section = server, section_of(vllm_config)
    State.worker = Worker(server, config_of(model), model.dtype, device, _ranks())
    return State.worker


def worker_here() -> Worker:
    """The texts of this worker, which vLLM's parts are not told. Raises RuntimeError where there is none."""
    if State.worker is None:
        raise RuntimeError(f"a bounded cache in vLLM needs --logits-processors {PROCESSOR}")
    return State.worker


def config_of(model_config: ModelConfig) -> PretrainedConfig:
    """The configuration of the language model as its files say: vLLM may have been told of longer texts.

    Raises:
        ValueError: vLLM was told otherwise of more than the longest text.
    """
    overrides = model_config.hf_overrides
    if not isinstance(overrides, dict) or overrides.keys() - {"max_position_embeddings"}:
        raise ValueError(
            f"hf_overrides={overrides}: a bounded cache reads the model's own configuration, but for max_position_embeddings"
        )
    return load_config(model_config.model, model_config.revision)


def _ranks() -> Ranks:
    from vllm import distributed as among

    rank, size = among.get_tensor_model_parallel_rank(), among.get_tensor_model_parallel_world_size()
    return Ranks(rank, size, among.tensor_model_parallel_all_reduce)
