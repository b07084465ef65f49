"""Texts of a worker of vLLM: the pages of its layers, and the rows of each request in them.

Attention of a step, layer by layer: new tokens are scored at once, the texts that have one new token are decoded in one call,
and the others are read one after another by the kit's own ``cache.step``. What a layer counts follows from what it was given, so
nothing is told to vLLM, and a request that is preempted begins anew.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from ..backbones.decoder_attention import Described, same_rotation
from ..backbones.probe import assumed
from ..backbones.rope import Rope
from ..backbones.spec import BackboneSpec, spec_of
from ..cache.bounded import BoundedCache
from ..cache.context import CacheCounters, Context, make_layers
from ..cache.due import Schedule
from ..cache.rotation import RotationTables
from ..cache.step import read_tokens
from ..cache.storage.codec import Scratch
from ..cache.storage.rows import STATE, BoundedLayer, export_rows, restore_rows
from ..cache.together import PageShape, RowPool, Step, decode_together, kind
from ..cache.view import first_pins, score_alike, shared_scores
from .ranks import Ranks, config_of_rank, heads_of_rank
from .request_pages import page_shape
from .server_settings import ServerSettings

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


@dataclass
class PagedText:
    """A request that has a page."""

    context: Context
    layers: list[BoundedLayer]
    seen: int = 0
    """Tokens that it has read, those of the step that runs included."""


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
        self.tables, self.counters = RotationTables(), CacheCounters()
        self.context(RequestInfo(1, {}))  # what is wrong is said here

    # ---- texts -------------------------------------------------------------------------------------------------------

    def context(self, info: RequestInfo) -> Context:
        """The context of a request, which stays the same for its whole life."""
        policy, settings = self.server.request(info.own, info.prompt_length)
        schedule = Schedule.of(settings, info.prompt_length)
        heads = self.heads if policy.needs_heads else None
        ctx = Context.of(self.model, policy, schedule, heads, settings, self.counters)  # type: ignore[arg-type]
        return replace(ctx, pins=first_pins(settings), tables=self.tables, ropes=self._shared(ctx.ropes))

    def _shared(self, ropes: Sequence[Rope] | None) -> Sequence[Rope] | None:
        """Rotations; those of a text that is here in place of equal ones, so that texts share tables."""
        if ropes is None:
            return None
        here = (text.context.ropes for text in self.texts.values())
        return next((known for known in here if known is not None and same_rotation(known, ropes)), ropes)

    def begin(self, info: RequestInfo, page: int) -> PagedText:
        """A new request, in a page that held another one."""
        ctx = self.context(info)
        text = self.texts[page] = PagedText(ctx, make_layers(ctx, Scratch()))
        return text

    def take(self, info: RequestInfo, page: int, document: BoundedCache, kv_caches: Mapping[int, Tensor]) -> None:
        """A new request, that has read a document of all ranks."""
        text = self.begin(info, page)
        for number, kv_cache in kv_caches.items():
            empty = self.pool(number, kv_cache).keys.new_empty(1, self.spec.n_kv_heads, 0, self.spec.head_dim)
            rows, (counts, tensors) = self.layer(text, number, page), export_rows(document.bounded[number])
            queries = rows.queries if rows.recent else None
            own = {name: of_rank(name, x, self.ranks, self.spec) for name, x in tensors.items()}
            restore_rows(rows, counts, own, empty, empty)
            if queries is not None:  # they stay in the page
                queries.copy_(rows.queries)
                rows.queries = queries
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

    def layer(self, text: PagedText, number: int, page: int) -> BoundedLayer:
        """A request's rows in a layer."""
        rows = text.layers[number]
        if not rows.is_initialized:
            self.pools[number].lend(page, rows)
        return rows

    def pool(self, number: int, kv_cache: Tensor) -> RowPool:
        """Pages of a layer in vLLM's memory ``[pages, H, rows, ...]``."""
        if number not in self.pools:
            self.pools[number] = RowPool(self.shape, kv_cache, len(kv_cache))
        return self.pools[number]

    # ---- a step ------------------------------------------------------------------------------------------------------

    def attend(
        self,
        number: int,
        q_NQD: Tensor,
        k_NHD: Tensor,
        v_NHD: Tensor,
        kv_cache: Tensor,
        batch: StepBatch,
        scaling: float,
        out_NQD: Tensor,
    ) -> None:
        """Attention of a step's new tokens in one layer, into ``out``; they become rows, and what is due is evicted."""
        pool = self.pool(number, kv_cache)
        texts = batch.texts(self)
        if not texts:
            return
        rows = [self.layer(text, number, turn.page) for turn, text in zip(batch.turns, texts, strict=True)]
        for mine in rows:
            if mine.scaling != scaling:
                mine.scaling = scaling
        # [1, heads, N, D], without the padding that may follow the last text.
        q, k, v = (x[: batch.end].transpose(0, 1)[None] for x in (q_NQD, k_NHD, v_NHD))
        scores = None
        if batch.scored_alike:
            scores = shared_scores(batch.contexts[0], number, q, k, v, batch.positions(q.device))
        for group in batch.together:
            at = group.at
            out_NQD[at] = decode_together(
                group.contexts, number, [rows[i] for i in group.turns], pool, group.pages, batch.step,
                q_NQD[at], k_NHD[at], v_NHD[at], None if scores is None else scores[0].T[at],
            )  # fmt: skip
        for i in batch.alone:
            new = slice(batch.turns[i].start, batch.turns[i].end)
            score = None if scores is None else scores[:, :, new]
            out = read_tokens(batch.contexts[i], number, rows[i], q[:, :, new], k[:, :, new], v[:, :, new], score)
            out_NQD[new] = out[0].transpose(0, 1)


def of_rank(name: str, x: Tensor, ranks: Ranks, spec: BackboneSpec) -> Tensor:
    """The part of a document's tensor that belongs to the heads of one rank; ``spec`` is the rank's."""
    heads = spec.n_heads if name == "queries" else spec.n_kv_heads
    return x.narrow(int(name == "stats" or name.startswith(STATE)), ranks.rank * heads, heads)


@dataclass(frozen=True)
class DecodingGroup:
    """Turns of one token that are decoded in one call."""

    turns: list[int]
    contexts: list[Context]
    pages: list[int]
    at: Tensor | slice
    """Their rows of the batch."""


class StepBatch:
    """The plan of a step, the same for all of its layers: made by the builder of attention metadata.

    Attributes:
        end: rows of the batch that are tokens. contexts: of each turn. scored_alike: whether all tokens are scored in one call.
        alone: turns that are read each by itself.
    """

    def __init__(self, turns: list[RequestTurn]) -> None:
        self.turns, self.end = turns, turns[-1].end if turns else 0
        self.step = Step()
        self.contexts: list[Context] = []
        self.scored_alike = False
        self.together: list[DecodingGroup] = []
        self.alone: list[int] = []
        self._texts: list[PagedText] | None = None
        self._position_1N: Tensor | None = None

    def texts(self, worker: Worker) -> list[PagedText]:
        """The request of each turn. The first layer finds them: by then documents are loaded."""
        if self._texts is None:
            worker.tables.clear()
            self._texts = [worker.text(turn) for turn in self.turns]
            self.contexts = [text.context for text in self._texts]
            self.scored_alike = bool(self.contexts) and score_alike(self.contexts)
            kinds: dict[Hashable, list[int]] = {}
            for i, (turn, text) in enumerate(zip(self.turns, self._texts, strict=True)):
                new, alike = turn.end - turn.start, kind(text.context)
                text.seen = turn.seen + new
                if new == 1 and alike is not None:
                    kinds.setdefault(alike, []).append(i)
                else:
                    self.alone.append(i)
            self.together = [self._group(turns, worker.model.device) for turns in kinds.values()]
        return self._texts

    def _group(self, turns: list[int], device: torch.device) -> DecodingGroup:
        starts = [self.turns[i].start for i in turns]
        first, end = starts[0], starts[0] + len(starts)
        # Tokens side by side, as they mostly are, need no index.
        at = slice(first, end) if starts == list(range(first, end)) else torch.tensor(starts, device=device)
        return DecodingGroup(turns, [self.contexts[i] for i in turns], [self.turns[i].page for i in turns], at)

    def positions(self, device: torch.device) -> Tensor:
        """Position ``[1, N]`` of each token in its text."""
        if self._position_1N is None:
            places = [0] * self.end
            for turn in self.turns:
                places[turn.start : turn.end] = range(turn.seen, turn.seen + turn.end - turn.start)
            self._position_1N = torch.tensor([places], device=device)
        return self._position_1N
