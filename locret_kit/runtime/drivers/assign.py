"""Assignment of drivers to the sequences of an engine."""

from collections.abc import Hashable, Iterable
from collections.abc import Sequence as Several

from transformers import PreTrainedModel

from ...cache.bounded import BoundedCache
from ..sequence import Sequence
from . import Driver, chunk_driver, driver_of, refuse
from .capture import NoDriver, warn
from .graph import MOST_GRAPHS, GraphDriver
from .texts import TextsDriver, graph_key

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

    def assign(self, turns: Iterable[Sequence], running: Several[Sequence]) -> list[Forward]:
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

    def _of_chunk(self, sequence: Sequence, cache: BoundedCache, running: Several[Sequence]) -> Driver | None:
        if len(running) > 1 or sequence.wants_prompt_logits:
            return None
        driver = self._chunks.get(cache) or chunk_driver(self.model, cache, self.graph)
        if driver is None:
            return None
        self._chunks[cache] = driver
        return driver if sequence.piece_len == driver.tokens and driver.ready(cache) else None

    def _of_token(self, sequence: Sequence, cache: BoundedCache, running: Several[Sequence]) -> Driver | None:
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

    def _of_several(self, cache: BoundedCache, running: Several[Sequence]) -> Driver | None:
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
