"""CUDA graphs of steps of fixed shapes, of one text and of several. What makes the host wait cannot be captured.

A step of one text appends one token, or a chunk of a prompt, to every layer and attends to its rows. Where in the text its tokens
stand is a number on the device. So is the number of rows before a single token: rows are written at an index, and attention masks
by length. Once the cache is full, every chunk sees the same number of rows.

A step of several texts makes a token of each. Rows are pages of one pool. The place of each text comes from a buffer on the
device (``cache.texts.StepTables``), so a graph serves every set of texts of the same number.
"""

import logging
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Generic, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from ...backbones.libraries import forward
from ...backbones.weight_bits import weight_bits_of
from ...cache.batch import Packed
from ...cache.bounded import BoundedCache
from ...cache.context import Context
from ...cache.graphs import Captured, capture
from ...cache.step import StaticStep, evict_if_due, make_room
from ...cache.texts import batch_key, row_numbers
from ...cache.view import score_alike
from ...naming import first_line
from ...policies.capabilities import reason
from .dense import dense_step

logger = logging.getLogger(__name__)
F = TypeVar("F", bound=Hashable)

WARM = 3
"""Tokens before the first capture: kernels are compiled and workspaces allocated in them, and a short answer ends with them."""
READ_BY_HOST = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
"""PyTorch's marks of operators whose result, or its shape, the host waits for."""


class NoDriver(ValueError):
    """Reason why a driver does not take a text."""


@cache
def warn(reason: str, what: str = "steps run without CUDA graphs") -> None:
    """Log why something runs in a slower way, once a process for each reason."""
    logger.warning("%s: %s", what, reason)


class SyncDetector(TorchDispatchMode):
    """Collects the names of operators that make the host wait for the device, or that copy between the two."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if host_waits(func, args, kwargs):
            self.found.add(name)
        if len({x.device.type for x in tree_leaves((args, kwargs, out)) if isinstance(x, Tensor)}) > 1:
            self.found.add(f"{name} between host and device")
        return out


def host_waits(func: OpOverload, args: tuple[object, ...], kwargs: dict[str, object]) -> bool:
    """Whether an operator makes the host read numbers on the device, some by their arguments alone. Inference mode shows composed
    operators, which have no marks, as they are called."""
    name = func.overloadpacket.__name__
    if name in ("index", "index_put", "index_put_"):
        return any(isinstance(x, Tensor) and x.dtype in (torch.bool, torch.uint8) for x in tree_leaves(args[1]))
    if name == "repeat_interleave":
        return any(isinstance(x, Tensor) for x in args[-1:]) and kwargs.get("output_size") is None
    composed = name in ("is_nonzero", "nonzero_numpy") or (name == "where" and len(args) == 1)
    return composed or not READ_BY_HOST.isdisjoint(func.tags)


class StepState(NamedTuple):
    """A text as the last step left it."""

    context: Context
    seen: int
    left: int
    """Tokens until rows are cut."""


class StepGraphs(ABC, Generic[F]):
    """Forms of a step that makes ``tokens`` new tokens of one text, or one of each of several. A form runs uncaptured at first,
    is then captured, and replayed from then on. Texts are cut between two steps, and the host's counts follow every step, so any
    other forward may come in between.

    On CUDA that is; elsewhere the very same functions run as they are. ``reason`` says why nothing (more) is captured, once
    that is known.

    Args:
        warm: steps before the first capture. most: captured forms; one beyond them runs without a graph.
    """

    name = "graph"
    shares, tokens = True, 1
    what: str
    """The step, for messages."""

    def __init__(self, model: PreTrainedModel, warm: int, most: float) -> None:
        self.model, self.captures = model, model.device.type == "cuda"
        self.warm, self.most = warm, most
        self.reason: str | None = None
        self.dense: Callable[..., Tensor] | None = None
        """Forward of a token without the decoder's modules, where possible."""
        self.graphs: dict[F, Captured] = {}
        self.ran = Counter[F]()
        self._tables: list[object] = []
        """Tables of rotation that graphs read: a dynamic forward in between would free them."""
        self._states: WeakKeyDictionary[BoundedCache, StepState] = WeakKeyDictionary()

    def refusal(self, cache: BoundedCache) -> str | None:
        """Reason why a cache is not decoded so (any more); None where it is, as far as known."""
        return self.reason

    def ready(self, cache: BoundedCache) -> bool:
        """Whether the next step can come here."""
        return self.reason is None

    def __call__(self, caches: Sequence[BoundedCache], tokens: Sequence[int] | Tensor) -> Tensor:
        """Logits ``[N, V]`` (float32) after the new tokens of ``N`` texts: one of each, or a piece ``[tokens]`` of one."""
        states = [self._with_room(text) for text in caches]
        form = self._write(caches, tokens)
        known = form in self.graphs
        logits_NV = self._run(form, partial(self._step, form, caches), partial(_undo, caches, states)).clone()
        if form in self.graphs and not known:
            self._tables.append([text.context.tables.made() for text in caches])
        for text, (ctx, seen, left) in zip(caches, states, strict=True):
            state = self._states[text] = StepState(ctx, seen + self.tokens, left - self.tokens)
            text.state.unfinished = True
            for rows in text.bounded:
                rows.count(state.seen - rows.seen)  # a step that is not replayed has counted
            if not state.left:
                evict_if_due(ctx, text.bounded)
            text.state.unfinished = False
        return logits_NV

    @abstractmethod
    def _write(self, caches: Sequence[BoundedCache], tokens: Sequence[int] | Tensor) -> F:
        """Bring tokens and places of the next step to the device; its form, all that tells it from others."""

    @abstractmethod
    def _step(self, form: F, caches: Sequence[BoundedCache]) -> Tensor:
        """The captured step: logits ``[N, V]`` (float32). Of the host only the form may matter."""

    def _with_room(self, cache: BoundedCache) -> StepState:
        """A text as it stands, with room for its new tokens in every layer."""
        ctx, seen, state = cache.context, cache.get_seq_length(), self._states.get(cache)
        if state is not None and state.context is ctx and state.seen == seen and state.left >= self.tokens:
            return state
        make_room(ctx, cache.bounded, self.tokens)
        return StepState(ctx, seen, ctx.until_cut(cache.bounded))

    def _run(self, form: F, step: Callable[[], Tensor], undo: Callable[[], None]) -> Tensor:
        """Logits ``[N, V]`` of one form of the step. ``undo`` follows a capture that fails: nothing of it has run, and the
        step is still to come."""
        self.ran[form] += 1
        known, ran = form in self.graphs, self.ran.total()
        room = self.captures and self.reason is None and len(self.graphs) < self.most
        if not known and room and self.ran[form] > 1 and ran > self.warm:
            try:
                self.graphs[form] = self._captured(step)
            except RuntimeError as error:
                undo()
                failed = f"its capture failed: {first_line(error)}"
                if self.dense is not None:
                    self.dense = None
                    logger.warning("a token runs through the decoder's modules: %s", failed)
                else:
                    self._refuse(failed)
                torch.cuda.empty_cache()  # what the capture had, where memory was short
        if form in self.graphs:
            graph, logits_NV = self.graphs[form]
            graph.replay()
            return logits_NV
        with SyncDetector() as reads:
            logits_NV = step()
        if reads.found and ran > 1:  # the very first one prepares what later ones need not
            self._refuse(f"{self.what} makes the host wait ({', '.join(sorted(reads.found))})")
        return logits_NV

    def _captured(self, step: Callable[[], Tensor]) -> Captured:
        torch.cuda.empty_cache()  # a chunk's tensors are large, and the graph has its own
        return capture(self.model.device, self.graphs.values(), step)

    def _refuse(self, reason: str) -> None:
        self.reason = reason
        warn(reason)


def _undo(caches: Sequence[BoundedCache], states: Sequence[StepState]) -> None:
    for text, state in zip(caches, states, strict=True):
        for rows in text.bounded:
            rows.count(state.seen - rows.seen)
        text.context.tables.clear()
        text.state.unfinished = False


# ---- of one text ---------------------------------------------------------------------------------------------------

CHUNKS = 6
"""Fewest chunks left of a prompt for a capture. The third chunk that leaves a full cache is captured."""
MOST_GRAPHS = 4
"""Captured forms of a chunk; a form beyond them runs without a graph."""


def _reason_against(model: PreTrainedModel, cache: BoundedCache) -> str | None:
    """Why this cache cannot be decoded with fixed shapes; None where it can, as far as settings tell."""
    if (why := reason("graph", cache.context.subject)) is not None:
        return why
    if len({parameter.device for parameter in model.parameters()}) > 1:
        return "the backbone lies on several devices"
    if weight_bits_of(model) == 8:
        return "weights of 8 bits, whose products make the host look for large activations"
    if any(rows.state for rows in cache.bounded):
        return f"the score of policy={cache.policy.name!r} keeps tensors of its own between tokens"
    return None


ChunkForm = tuple[tuple[int, int], ...]
"""Rows of each layer before a chunk, and its tokens since the last eviction (0 with a window); of a token nothing."""


class GraphDriver(StepGraphs[ChunkForm]):
    """``driver([cache], [token])`` gives the logits ``[1, V]`` after a token of its one text, as the dynamic forward does; with
    ``tokens`` above 1 ``driver([cache], ids)`` those after a chunk ``[tokens]`` of its prompt.

    Args:
        model: attached, and bound to the cache.
        cache: after its prompt, or after a chunk. Before it ``refusal`` may be asked, and no token comes.
    """

    shares = False

    def __init__(self, model: PreTrainedModel, cache: BoundedCache, tokens: int = 1) -> None:
        super().__init__(model, WARM if tokens == 1 else 2, MOST_GRAPHS)
        self.cache, self.tokens, self.reason = cache, tokens, _reason_against(model, cache)
        self.what = f"a {'token' if tokens == 1 else 'chunk'} of policy={cache.policy.name!r}"
        if tokens > 1 and cache.context.stages:
            self.reason = f"policy={cache.policy.name!r} does more with a chunk than attend and evict"
        if self.reason is not None or not cache.get_seq_length():
            return
        if tokens == 1:
            self.dense = dense_step(model, cache.context)
        with torch.inference_mode(False):
            self.numbers = torch.zeros(tokens + 1 + len(cache.bounded), dtype=torch.int64, device=model.device)
            self.host = np.zeros(len(self.numbers), np.int64)
            self.offset_T = torch.arange(tokens, dtype=torch.int32, device=model.device)
            self.flats = [rows.varlen() for rows in cache.bounded] if tokens == 1 else []
            # Tokens, the number of those before them, and before a single token the rows of each layer.
            self.ids, self.seen, self.length_L = (
                self.numbers[None, :tokens], self.numbers[tokens], self.numbers[tokens + 1 :]
            )  # fmt: skip

    def ready(self, cache: BoundedCache) -> bool:
        """Whether the next step can come here: any token, and a chunk after which every layer without a window is cut."""
        T, dues = self.tokens, ((rows, cache.context.due(rows, self.tokens)) for rows in cache.bounded)
        steady = T == 1 or all(due.tokens == T and (due.evict_after or rows.window) is not None for rows, due in dues)
        return steady and self.reason is None

    def _write(self, caches: Sequence[BoundedCache], tokens: Sequence[int] | Tensor) -> ChunkForm:
        (cache,) = caches
        if isinstance(tokens, Tensor):  # on the device already: the host does not wait for it
            self.ids[0] = tokens
            self.seen.fill_(cache.get_seq_length())
            return tuple((rows.rows, rows.since_eviction if rows.window is None else 0) for rows in cache.bounded)
        self.host[:] = [*tokens, cache.get_seq_length(), *cache.kept_rows]
        self.numbers.copy_(torch.from_numpy(self.host))
        return ()

    def _step(self, form: ChunkForm, caches: Sequence[BoundedCache]) -> Tensor:
        position_T = self.seen + self.offset_T  # int32, as the offsets
        if self.tokens > 1:
            self.cache.handler.fixed = lambda layer: StaticStep(self.seen, position_T)
        else:
            # Once for all layers: the rows of every head, the new token's included.
            lengths_LBH = self.length_L[:, None, None].expand(-1, *self.flats[0].spans.starts_BH.shape) + 1
            self.cache.handler.fixed = partial(self._static_step, position_T, lengths_LBH)
        try:
            if self.dense is not None:
                return self.dense(self.ids, self.cache.handler)
            return forward(self.model, self.ids, self.cache, logits_to_keep=1)[:, -1].float()
        finally:
            self.cache.handler.fixed = None

    def _static_step(self, position_T: Tensor, lengths_LBH: Tensor, layer: int) -> StaticStep:
        """Place of a layer's new token, and the rows that it sees. The device has their number."""
        flat, rows = self.flats[layer], self.cache.bounded[layer]
        seen = replace(flat, spans=flat.spans._replace(lengths_BH=lengths_LBH[layer])).newest(rows.window)
        seen = replace(seen, spans=seen.spans._replace(longest=rows.capacity))
        return StaticStep(self.seen, position_T, self.length_L[layer : layer + 1], seen)


# ---- of several texts ----------------------------------------------------------------------------------------------


def graph_key(cache: BoundedCache) -> Hashable:
    """Texts of equal keys share a graph. Raises NoDriver for a text that shares none."""
    ctx, pages = cache.context, [rows.page for rows in cache.bounded]
    if pages[0] is None:
        raise NoDriver("its rows are no pages of a pool")
    if (key := batch_key(ctx)) is None:
        raise NoDriver(f"positions={ctx.settings.positions!r} places rows of each text in its own way")
    if not score_alike([ctx]):
        raise NoDriver(f"policy={cache.policy.name!r} scores the new tokens of each text by themselves")
    return key, id(pages[0].pool), ctx.policy.score, ctx.settings.seed, ctx.first, id(ctx.heads)


class TextsForm(NamedTuple):
    """All that tells one step from another: the texts, and which layers have rows of the same numbers."""

    texts: int
    layers: tuple[int, ...]


class TextsDriver(StepGraphs[TextsForm]):
    """``driver(caches, tokens)`` gives the logits ``[texts, V]`` after a token more of each text, as the shared forward does.

    Args:
        model: attached. first: one of the texts; all texts have its ``graph_key``.
    """

    what = "a token of several texts"

    def __init__(self, model: PreTrainedModel, first: BoundedCache) -> None:
        super().__init__(model, WARM, math.inf)
        self.dense = dense_step(model, first.context)
        self.keepalive = first.context.ropes, first.context.heads, first.bounded[0].page
        """Objects by whose identity texts are alike."""
        self.given: dict[TextsForm, Tensor] = {}
        """Buffers of the device: tokens ``[N]``, then four ``row_numbers`` for each kind of layers."""

    def _write(self, caches: Sequence[BoundedCache], tokens: Sequence[int] | Tensor) -> TextsForm:
        layers = [row_numbers(rows) for rows in zip(*(cache.bounded for cache in caches), strict=True)]
        kinds = list(dict.fromkeys(layers))
        form = TextsForm(len(caches), tuple(map(kinds.index, layers)))
        columns = [column for _, pages in kinds for column in zip(*pages, strict=True)]
        numbers = torch.tensor([tokens, *columns], device="cpu")
        if form not in self.given:
            with torch.inference_mode(False):
                self.given[form] = torch.zeros_like(numbers, device=self.model.device)
        self.given[form].copy_(numbers)
        return form

    def _step(self, form: TextsForm, caches: Sequence[BoundedCache]) -> Tensor:
        given = self.given[form]
        packed = Packed(caches, [1] * form.texts, given[1:].unflatten(0, (-1, 4)))
        if self.dense is not None and form.texts == 1:
            logits_NV = self.dense(given[:1], packed)
        else:  # one matrix product reads weights once for all texts
            logits_NV = forward(self.model, given[:1], packed)[0].float()
        caches[0].context.tables.clear()  # they lie in the memory of graphs
        return logits_NV
