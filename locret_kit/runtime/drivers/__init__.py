"""Drivers, which compute the next token of a text: one is chosen once for a cache, by its settings and the device. Here are
their registry, and their assignment to the sequences of an engine."""

from collections import abc
from collections.abc import Callable, Hashable, Iterable
from contextlib import suppress
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...backbones.libraries import forward
from ...backbones.wrapped import unwrapped
from ...cache.batch import Packed
from ...cache.bounded import BoundedCache
from ...registry import Registry, load_installed
from ..sequence import Sequence
from .cpu import cpu_driver
from .graph import CHUNKS, MOST_GRAPHS, GraphDriver, NoDriver, TextsDriver, graph_key, warn


class Driver(Protocol):
    """Makes a token of each of several texts, or of one.

    Attributes:
        name: in ``cache.counters.decoding``. shares: whether a call may take several texts.
    """

    name: str
    shares: bool = True

    def refusal(self, cache: BoundedCache) -> str | None:
        """Reason why a cache is decoded by the plain forward; None where it is not, as far as settings tell."""
        return None

    def ready(self, cache: BoundedCache) -> bool:
        """Whether the next token of a cache can come here."""
        return True

    def __call__(self, caches: abc.Sequence[BoundedCache], tokens: abc.Sequence[int]) -> Tensor:
        """Logits ``[texts, V]`` (float32) after one token more of each text."""


def logits_after(
    model: PreTrainedModel, caches: abc.Sequence[BoundedCache], ids_1T: Tensor, counts: abc.Sequence[int]
) -> Tensor:
    """Logits ``[texts, V]`` in the model's type after the last new token of each text, in one forward.

    Args:
        model: attached.
        ids_1T: new tokens of the texts, end to end. counts: how many are each text's.
    """
    if len(caches) == 1:
        return forward(model, ids_1T, caches[0], logits_to_keep=1)[:, -1]
    if not caches[0].context.description.packs_texts:
        own = zip(caches, ids_1T.split(list(counts), 1), strict=True)
        return torch.cat([logits_after(model, [cache], ids, [ids.shape[1]]) for cache, ids in own])
    packed = Packed(caches, counts)
    last = torch.tensor(packed.ends, device=model.device) - 1
    return forward(model, ids_1T, packed, logits_to_keep=last)[0]


DRIVERS: Registry[Callable[[PreTrainedModel, BoundedCache, bool | None], Driver | None]] = Registry("driver")
"""Makers of a cache's driver. Each takes the model, the cache and ``graph`` (see ``driver_of``). It returns a driver, or None to
leave the cache to the next; it raises NoDriver where the plain forward is due. The newest is asked first."""


def driver_of(model: PreTrainedModel, cache: BoundedCache, graph: bool | None = None) -> Driver | None:
    """The driver of a cache's next tokens; None for the plain forward. ``cache.counters.decoding`` names it, or says why.

    Args:
        model: attached.
        cache: bound to it, after its prompt.
        graph: None replays a CUDA graph for each token where it is possible, True refuses where it is not, False never does.

    Raises:
        ValueError: ``graph=True`` where it is not possible; says why. A reason may also show after a few tokens.
    """
    model = unwrapped(model)
    load_installed()
    try:
        asked = (make(model, cache, graph) for make in reversed(DRIVERS.values()))
        driver = next((made for made in asked if made is not None), None)
        if driver is not None and (reason := driver.refusal(cache)) is not None:
            raise NoDriver(reason)
    except NoDriver as reason:
        refuse(cache, graph, str(reason))
        return None
    cache.counters.decoding = "dynamic" if driver is None else driver.name
    return driver


def refuse(cache: BoundedCache, graph: bool | None, reason: str) -> None:
    """Note why the plain forward makes a cache's tokens. Raises ValueError where a graph was asked for."""
    if graph:
        raise ValueError(f"graph=True is not possible here: {reason}")
    cache.counters.decoding = f"dynamic: {reason}"


@DRIVERS.register("graph")
def _graph(model: PreTrainedModel, cache: BoundedCache, graph: bool | None) -> Driver | None:
    device = model.device.type
    if graph is False or (graph is None and device != "cuda"):
        return None
    if device != "cuda":
        raise NoDriver(f"CUDA graphs need a CUDA device, not {device}")
    return GraphDriver(model, cache)


@DRIVERS.register("cpu")
def _compiled(model: PreTrainedModel, cache: BoundedCache, graph: bool | None) -> Driver | None:
    return None if graph or model.device.type != "cpu" else cpu_driver(model, cache.context.heads)


def prepare(model: PreTrainedModel) -> None:
    """Make what drivers of any text of a model share, so that the first token does not wait for it."""
    with suppress(NoDriver):
        cpu_driver(model)


def chunk_driver(model: PreTrainedModel, cache: BoundedCache, graph: bool | None) -> GraphDriver | None:
    """Driver of a prompt's chunks by CUDA graphs; None if that is impossible or few chunks are left. ``graph`` is as in
    ``driver_of``, but nothing is refused."""
    s, seen = cache.schedule, cache.get_seq_length()
    left = (s.body or 0) - seen
    worth = seen and s.chunk > 1 and not s.one_shot and left >= CHUNKS * s.chunk
    return GraphDriver(model, cache, s.chunk) if worth and graph is not False and model.device.type == "cuda" else None


# ---- assignment ------------------------------------------------------------------------------------------------------

Forward = tuple[Driver | None, list[Sequence]]
"""A driver and the sequences of one forward; None is the forward that texts share."""


class Drivers:
    """Drivers of the sequences of one engine.

    Args:
        graph: see ``Engine``. alone: whether one sequence runs; several have one graph for the tokens of all.
    """

    def __init__(self, model: PreTrainedModel, graph: bool | None, alone: bool) -> None:
        self.model, self.graph, self.alone = model, graph, alone
        self._tokens: dict[BoundedCache, Driver | None] = {}
        self._chunks: dict[BoundedCache, GraphDriver] = {}
        self.of_texts: dict[Hashable, TextsDriver] = {}
        """Graphs of texts that are alike, by ``graph_key``."""

    def assign(self, turns: Iterable[Sequence], running: abc.Sequence[Sequence]) -> list[Forward]:
        """The forwards of a step, of the sequences whose turn it is among those that run.

        Raises:
            ValueError: a graph is asked for where none is possible.
        """
        forwards: dict[tuple[Driver | None, Sequence | None], list[Sequence]] = {}
        for sequence in turns:
            assert sequence.cache is not None
            # A prompt whose logits are all wanted has a forward of its own.
            own = sequence if sequence.reading and sequence.wants_prompt_logits else None
            choose = self._of_chunk if sequence.reading else self._of_token
            forwards.setdefault((choose(sequence, sequence.cache, running), own), []).append(sequence)
        return [(driver, members) for (driver, _), members in forwards.items()]

    def keep(self, running: Iterable[Sequence]) -> None:
        """Forget the drivers of sequences that have ended."""
        caches = {sequence.cache for sequence in running}
        self._tokens = {cache: driver for cache, driver in self._tokens.items() if cache in caches}
        self._chunks = {cache: driver for cache, driver in self._chunks.items() if cache in caches}

    def _of_chunk(self, sequence: Sequence, cache: BoundedCache, running: abc.Sequence[Sequence]) -> Driver | None:
        if len(running) > 1 or sequence.wants_prompt_logits:
            return None
        driver = self._chunks.get(cache) or chunk_driver(self.model, cache, self.graph)
        if driver is None:
            return None
        self._chunks[cache] = driver
        return driver if sequence.piece_len == driver.tokens and driver.ready(cache) else None

    def _of_token(self, sequence: Sequence, cache: BoundedCache, running: abc.Sequence[Sequence]) -> Driver | None:
        self._chunks.pop(cache, None)  # and with it a chunk's memory
        if cache not in self._tokens:
            self._tokens[cache] = driver_of(self.model, cache, self.graph)
        driver = self._tokens[cache]
        if driver is not None and not driver.ready(cache):
            if (reason := driver.refusal(cache)) is not None:  # it was found on the way
                refuse(cache, self.graph, reason)
                self._tokens[cache] = None
            return None
        if driver is None or driver.shares or self.alone:
            return driver
        return self._of_several(cache, running) or (driver if len(running) == 1 else None)

    def _of_several(self, cache: BoundedCache, running: abc.Sequence[Sequence]) -> Driver | None:
        """The graph of texts like this one; None where its token goes into the shared forward, which reads the weights once
        for prompts too."""
        try:
            key = graph_key(cache)
            if key not in self.of_texts:
                if len(self.of_texts) >= MOST_GRAPHS:
                    raise NoDriver("texts of many kinds")
                self.of_texts[key] = TextsDriver(self.model, cache)
            driver = self.of_texts[key]
            if (reason := driver.refusal(cache)) is not None:
                raise NoDriver(reason)
        except NoDriver as reason:
            if len(running) > 1:
                warn(f"beside other texts: {reason}")
                cache.counters.decoding = f"dynamic beside other texts: {reason}"
            return None
        return None if any(other.reading for other in running) else driver
