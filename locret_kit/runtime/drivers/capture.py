"""CUDA graphs of steps. What makes the host wait cannot be captured."""

import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from functools import cache, partial
from typing import Generic, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from ...cache.bounded import BoundedCache
from ...cache.context import Context
from ...cache.graphs import Captured, capture
from ...cache.step import evict_if_due, make_room
from ...naming import first_line

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
