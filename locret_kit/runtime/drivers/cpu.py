"""Decoding on a CPU by one compiled call per token, for one text or for many (see ``locret_kernels.decoder_step``).

Attention, rows and matrix products are that call's; evictions, and scores that it does not know, are the cache's own, between
two calls. So any text may be decoded the plain way at any token, and be here again at the next.
"""

from collections.abc import Sequence
from functools import partial
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from locret_kernels import cpp, decoder_step
from locret_kernels import quantise as quantiser

from ...backbones.spec import text_config
from ...backbones.weights import Dense, NotDense, check_dense, dense
from ...cache.bounded import BoundedCache
from ...cache.storage.codec import Plain
from ...cache.storage.quantised import GroupedBits, RowBits
from ...heads import RetainingHeads
from ...policies.capabilities import reason
from .capture import NoDriver, warn
from .row_pointers import PositionTables, RowPointers
from .weight_table import WeightTable

CODECS = (Plain, GroupedBits, RowBits)
"""Forms of keys and values that the call reads where they lie."""


class CpuDriver:
    """``driver(caches, tokens)`` gives the logits ``[texts, V]`` (float32) after one token more of each text.

    Weights are read where they are. Those of float32 that bfloat16 holds without a change are copied to it: most checkpoints
    are of bfloat16, and half the bytes are read in half the time. When an answer begins, ``cpu_driver`` compares the copies
    with the weights: writers need not report it.

    Args:
        model: attached or not. weights: its own, where they are known.

    Raises:
        NotDense, cpp.Unavailable: why it cannot be.
    """

    name = "cpu"
    shares = True

    def __init__(self, model: PreTrainedModel, weights: Dense | None = None) -> None:
        weights = dense(model) if weights is None else weights
        self.dtype, device = weights.dtype, weights.norm.weight.device
        if device.type != "cpu":
            raise NotDense(f"the backbone is on {device.type}")
        first = weights.layers[0]
        self.channels = len(first.query.weight) // text_config(model).num_attention_heads
        if weights.is_packed and self.dtype == torch.float64:
            raise cpp.Unavailable("packed matrices beside numbers of float64")
        self.library = decoder_step.load(self.dtype, self.channels)
        self.sums = cpp.SUMS[self.dtype]
        self.weights = weights
        self.shape = len(first.query.weight) // self.channels, len(first.key.weight) // self.channels
        self._plain = WeightTable.of(weights, self.channels, self.library)
        self._with_heads: WeakKeyDictionary[RetainingHeads, WeightTable] = WeakKeyDictionary()
        self._rows: WeakKeyDictionary[BoundedCache, RowPointers] = WeakKeyDictionary()
        self._tables = PositionTables(self.dtype, self.sums)

    def refusal(self, cache: BoundedCache) -> str | None:
        """Reason why a cache is decoded by the plain forward; None where it is not, as far as settings tell."""
        ctx = cache.context
        if ctx.backend.name != "cpu":
            return f"backend={ctx.backend.name!r}"
        if (why := reason("compiled call", ctx.subject)) is not None:
            return why
        if any(not isinstance(rows.codec, CODECS) for rows in cache.bounded):
            return "rows of another kind"
        if any(isinstance(rows.codec, GroupedBits) for rows in cache.bounded) and not quantiser.runs():
            return "rows in few bits, whose calls do not compile"
        if any(rows.is_initialized and rows.dtype != self.dtype for rows in cache.bounded):
            return "rows of another type than the weights"
        return None

    def ready(self, cache: BoundedCache) -> bool:
        """Whether the next token of a cache can come here."""
        if cache.state.unfinished:
            return False
        if (rows := self._rows.get(cache)) is not None and rows.are_of(cache):
            return True
        return (
            not cache.state.needs_reread and cache.get_seq_length() > 0 and not any(x.codec.open for x in cache.bounded)
        )

    def weight_bytes(self, heads: RetainingHeads | None = None) -> int:
        """Bytes of matrices that are read for a token, with those of retaining heads."""
        return self._plain.copies.read + self._held(heads).copies.read * (heads is not None)

    def __call__(self, caches: Sequence[BoundedCache], tokens: Sequence[int]) -> Tensor:
        """Logits ``[N, V]`` (float32) after one more token of each of ``N`` texts. Raises IndexError for a token
        outside the vocabulary."""
        N, L, V = len(caches), len(self.weights.layers), len(self.weights.head.weight)
        words, (Q, H), D = len(self.weights.words.weight), self.shape, self.channels
        if not all(0 <= token < words for token in tokens):  # the call would read other memory
            raise IndexError(f"tokens={[*tokens]} must be below {words}, the rows of the backbone's words")
        texts = [self._next(cache) for cache in caches]
        # The call itself asks retaining heads that all texts have.
        heads = texts[0].heads if all(text.heads is texts[0].heads for text in texts) else None
        new = partial(torch.empty, dtype=self.sums, device=self.weights.norm.weight.device)
        asks = [text.recent or (heads is None and text.scores) for text in texts]
        line = new(L, N, Q + 2 * H, D) if any(asks) else None
        rows = np.concatenate([text.rows for text in texts])
        ids, logits = np.array(tokens, dtype=np.int64), new(N, V)
        self.library.locret_step(
            self._held(heads).decoder.ctypes.data, N, ids.ctypes.data, rows.ctypes.data, logits.data_ptr(),
            0 if line is None else line.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        for n, (cache, text) in enumerate(zip(caches, texts, strict=True)):
            if line is not None:
                q_LQD, k_LHD, v_LHD = line[:, n].to(self.dtype).split((Q, H, H), 1)
                text.score(cache, q_LQD, k_LHD, v_LHD, scored=heads is None)
            text.count(cache)
        return logits.float()

    def _next(self, cache: BoundedCache) -> RowPointers:
        """A cache's rows, with room for a token."""
        rows = self._rows.get(cache)
        cache.state.unfinished = True
        if rows is None or not rows.are_of(cache):
            rows = self._rows[cache] = RowPointers.of(cache, self.shape[1], self._tables)
        rows.place()
        return rows

    def _held(self, heads: RetainingHeads | None) -> WeightTable:
        """Every layer's addresses, with those of the retaining heads that the call asks."""
        if heads is not None and heads not in self._with_heads:
            self._with_heads[heads] = self._plain.with_heads(heads, self.dtype, self.library)
        return self._plain if heads is None else self._with_heads[heads]

    def is_current(self, weights: Dense, heads: RetainingHeads | None = None) -> bool:
        """Whether a model's weights are still those that this decoder reads. Its copies of retaining heads that have
        changed are dropped."""
        if heads is not None and heads in self._with_heads and not self._held(heads).is_current([*heads.parameters()]):
            self._with_heads.pop(heads, None)
        return self._plain.is_current(weights)


_KNOWN: WeakKeyDictionary[PreTrainedModel, CpuDriver] = WeakKeyDictionary()


def cpu_driver(model: PreTrainedModel, heads: RetainingHeads | None = None) -> CpuDriver:
    """The decoder for a model on a CPU. A missing compiler is logged, once.

    Call it when an answer begins: copies of weights that have changed since are made anew.

    Raises:
        NoDriver: it has none.
    """
    if model.device.type != "cpu":
        raise NoDriver(f"the backbone is on {model.device.type}")
    try:
        weights = dense(model)
        known = _KNOWN.get(model)
        if known is None or not known.is_current(weights, heads):
            known = None
            _KNOWN.pop(model, None)  # before another takes as much memory
            check_dense(model, weights)
            known = _KNOWN[model] = CpuDriver(model, weights)
        return known
    except (NotDense, cpp.Unavailable) as error:
        if isinstance(error, cpp.Unavailable):
            warn(str(error), "tokens are decoded by the plain forward, which is slower here")
        raise NoDriver(str(error)) from error
