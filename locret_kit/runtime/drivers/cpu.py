"""Decoding on a CPU by one compiled call per token, for one text or for many (see ``locret_kernels.decoder_step``).

Attention, rows and matrix products are that call's; evictions, and scores that it does not know, are the cache's own, between
two calls. So any text may be decoded the plain way at any token, and be here again at the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel

from locret_kernels import cpp, decoder_step
from locret_kernels import quantise as quantiser
from locret_kernels.decoder_step import DECODER, LAYER, LINEAR, PACKED, ROWS, Bf16Copies
from locret_kernels.ragged_decode import ByteRows, PackedRows

from ...backbones.rope import Rope
from ...backbones.spec import text_config
from ...backbones.weights import PRODUCTS, Dense, NotDense, Product, check_dense, dense
from ...cache.bounded import BoundedCache
from ...cache.context import Context
from ...cache.step import evict_if_due, make_room
from ...cache.storage.codec import Plain
from ...cache.storage.quantised import GroupedBits, RowBits
from ...cache.view import entry_scores, scores_of
from ...heads import RetainingHeads
from ...policies.capabilities import reason
from .graph import NoDriver, warn

# ---- weights as the call reads them: addresses, and copies in half the bytes ---------------------------------------------

NORMS = ("norm", "query_norm", "key_norm", "mlp_norm")
NO_HEADS = {name: (0,) * len(LINEAR.points) for name in ("fc1", "fc2")}
"""Fields of a layer without a retaining head."""


@dataclass
class WeightTable:
    """The decoder as the call reads it, its layers' addresses, copies of the weights that bfloat16 holds, and the weights, whose
    memory stays as long as these."""

    decoder: np.ndarray
    layers: np.ndarray
    copies: Bf16Copies
    weights: Dense | list[Tensor]

    @classmethod
    def of(cls, w: Dense, channels: int, library: cpp.Library) -> WeightTable:
        """The table of a backbone whose heads have ``channels`` channels."""
        dtype, layers = w.dtype, np.zeros(len(w.layers), LAYER.dtype)
        products = [product for layer in w.layers for product in layer.products]
        copies = Bf16Copies((product.weight for product in (*products, w.head)), library)
        for i, layer in enumerate(w.layers):
            norms = {name: getattr(layer, name) for name in NORMS}
            layers[i] = LAYER.of(
                dtype, **{name: norm and norm.weight for name, norm in norms.items()}, **NO_HEADS,
                **{name: _linear(getattr(layer, name), dtype, copies) for name in PRODUCTS}, norm_eps=layer.norm.eps,
                head_eps=layer.query_norm.eps if layer.query_norm is not None else 0.0, mlp_eps=layer.mlp_norm.eps,
                scaling=layer.scaling,
            )  # fmt: skip
        query, key, *_ = products
        decoder = DECODER.of(
            dtype, layers=len(w.layers), width=len(w.norm.weight), query_heads=len(query.weight) // channels,
            heads=len(key.weight) // channels, channels=channels, vocabulary=len(w.head.weight), words=_linear(w.words, dtype),
            norm=w.norm.weight, eps=w.norm.eps, head=_linear(w.head, dtype, copies), layer=layers.ctypes.data,
        )  # fmt: skip
        return cls(decoder, layers, copies, w)

    def with_heads(self, heads: RetainingHeads, dtype: torch.dtype, library: cpp.Library) -> WeightTable:
        """The same table with retaining heads, which the call then asks."""
        weights = [x.detach() for x in heads.parameters()]
        decoder, layers, copies = self.decoder.copy(), self.layers.copy(), Bf16Copies(weights, library)
        for i in range(len(layers)):
            for name in NO_HEADS:
                product = Product(getattr(heads[i], name).weight.detach(), None)
                layers[name][i] = _linear(product, dtype, copies)
        decoder["layer"] = layers.ctypes.data
        return WeightTable(decoder, layers, copies, weights)

    def is_current(self, weights: Dense | list[Tensor]) -> bool:
        """Whether the weights, of any shape, are still at the same addresses, and all copies still hold their
        numbers."""
        mine, theirs = (tree_map_only(Tensor, _place, x) for x in (self.weights, weights))
        return mine == theirs and self.copies.unchanged()


def _linear(product: Product, dtype: torch.dtype, copies: Bf16Copies | None = None) -> tuple[int, ...]:
    """A product as the call reads it; ``copies`` may hold its weight in half the size."""
    half = None if copies is None else copies.of(product.weight)
    weight, stored = (product.weight, dtype) if half is None else (half, torch.bfloat16)
    at = cpp.address(weight, stored if product.form is None else torch.uint8)
    return LINEAR.of(
        dtype, weight=at, bias=product.bias, rows=len(weight), halved=half is not None,
        format=product.form and decoder_step.format_at(product.form).ctypes.data,
    ).item()  # fmt: skip


def _place(x: Tensor) -> tuple[int, torch.Size, torch.dtype]:
    """Address, sizes and type of a weight."""
    return x.data_ptr(), x.shape, x.dtype


# ---- a text's rows as the call reads them: addresses, lengths and tables of rotation, until its next boundary --------------


def point_at(at: np.ndarray, packed: PackedRows | ByteRows, codec: GroupedBits | RowBits) -> None:
    """Write the addresses of rows in few bits into an element of ``PACKED``."""
    named = {name.rpartition("_")[0]: x for name, x in packed._asdict().items()}  # the names of C++, without sizes
    sizes = {"bits": 8}
    if isinstance(packed, PackedRows) and isinstance(codec, GroupedBits):
        sizes = {"bits": packed.bits, "group_bytes": packed.group_N.itemsize, "groups": packed.key_step_PMD.shape[1]}
        sizes |= {"tail": codec.tail, "tail_room": packed.tail_keys_PRD.shape[1]}
    PACKED.point(at, codec.dtype, **named | sizes, value_groups=packed.value_step_NC.shape[1])


class PositionTables:
    """cos and sin ``[positions, R]`` of each rotation, as far as they were needed: made in ``dtype``, held in ``sums``."""

    def __init__(self, dtype: torch.dtype, sums: torch.dtype) -> None:
        self.dtype, self.sums = dtype, sums
        self._made: dict[tuple[bytes, float], tuple[Tensor, Tensor]] = {}

    def below(self, rope: Rope, length: int) -> tuple[Tensor, Tensor]:
        """Tables ``[N, R]`` of the positions from 0 on, for at least ``length`` positions."""
        # By their numbers: texts have objects of their own for the same rotation.
        key = rope.inv_freq.float().numpy().tobytes(), rope.scaling
        made = self._made.get(key)
        if made is None or len(made[0]) < length:
            cos, sin = rope.tables(torch.arange(length, device=rope.inv_freq.device), self.dtype)
            made = self._made[key] = cos.to(self.sums).contiguous(), sin.to(self.sums).contiguous()
        return made  # not what another thread has put there meanwhile, which may be shorter


@dataclass
class RowPointers:
    """A text's rows as the call reads them, until its next boundary.

    Attributes:
        left: tokens until a boundary, where rows are evicted or a group is quantised.
        seen, context: those of the cache; a difference shows another writer or another text.
    """

    rows: np.ndarray
    packed: np.ndarray
    starts_LH: np.ndarray
    lengths_LH: np.ndarray
    left: int
    seen: int
    context: Context
    heads: RetainingHeads | None
    """Retaining heads that the call can ask."""
    scores: bool
    """Whether new tokens are scored."""
    recent: bool
    """Whether their queries are kept."""
    tables: PositionTables
    own: list[tuple[Rope, Tensor]] = field(default_factory=list)
    """Rotations of stored new keys, and the memory ``[2, R]`` with the tables of the next token."""
    keepalive: list[object] = field(default_factory=list)
    """Objects to whose memory addresses point."""

    @classmethod
    def of(cls, cache: BoundedCache, H: int, tables: PositionTables) -> RowPointers:
        """The addresses of a cache's rows, with ``H`` heads in every layer and room for a token, and how long they hold."""
        ctx, seen, L = cache.context, cache.get_seq_length(), len(cache.bounded)
        ctx.tables.clear()
        make_room(ctx, cache.bounded, 1)
        starts_LH, lengths_LH = (np.zeros((L, H), np.int64) for _ in range(2))
        rows_L, packed_L = np.zeros(L, ROWS.dtype), np.zeros(L, PACKED.dtype)
        score, heads = ctx.policy.score, ctx.heads
        asked = heads if score.is_head and heads is not None and heads.config.activation == "silu" else None
        recent = any(rows.recent for rows in cache.bounded)
        made = cls(
            rows_L, packed_L, starts_LH, lengths_LH, ctx.until_cut(cache.bounded), seen, ctx, asked, score.scores_new_tokens,
            recent, tables,
        )  # fmt: skip
        own: dict[int, tuple[Rope, Tensor]] = {}
        for layer, rows in enumerate(cache.bounded):
            flat = rows.varlen()
            starts_LH[layer], lengths_LH[layer] = (x[0].numpy() for x in flat.spans[:2])
            fields: dict[str, object] = dict(
                starts=starts_LH[layer].ctypes.data, lengths=lengths_LH[layer].ctypes.data,
                positions=flat.positions_N, scores=rows.scores, window=rows.window, before=0 if ctx.positions.span else -1,
            )  # fmt: skip
            if rows.statistics:
                statistics = sum(cpp.STATISTICS[name] for name in ctx.statistics)
                fields |= dict(stats=flat.stats_XN[0], stats_stride=flat.stats_XN.stride(0))
                fields |= dict(by_head=bool(ctx.group), statistics=statistics)
            if (rope := ctx.read_rope(rows)) is not None:
                longest = rows.capacity * (H if rows.layout.ragged else 1)
                cos, sin = tables.below(rope, max(longest, ctx.positions.span or 0))
                fields |= dict(cos=cos, sin=sin, rotated=cos.shape[1])
            elif (rope := ctx.write_rope(rows)) is not None:
                R = 2 * len(rope.inv_freq)
                _, held = own.setdefault(id(rope), (rope, torch.empty(2, R, dtype=tables.sums, device=rows.device)))
                fields |= dict(own_cos=held[0], own_sin=held[1], rotated=R)
            if isinstance(rows.codec, GroupedBits | RowBits):
                point_at(packed_L[layer], flat.rows, rows.codec)
                fields["packed"] = packed_L[layer : layer + 1].ctypes.data
            else:
                fields |= dict(keys=flat.rows[0], values=flat.rows[1])
            if isinstance(rows.codec, GroupedBits):
                made.left = min(made.left, rows.codec.max_tail - rows.codec.tail + 1)
            ROWS.point(rows_L[layer], tables.dtype, **fields)
            made.keepalive.append((flat, fields))
        made.own = list(own.values())
        return made

    def are_of(self, cache: BoundedCache) -> bool:
        """Whether a cache's rows still lie as they were found, with room for a token."""
        return self.left > 0 and self.context is cache.context and self.seen == cache.get_seq_length()

    def place(self) -> None:
        """Say where in the text the next token stands."""
        self.rows["position"], span = self.seen, self.context.positions.span
        if span:
            self.rows["before"] = max(0, self.seen + 1 - span)
        for rope, held in self.own:
            cos, sin = rope.tables(torch.tensor([self.seen], device=held.device), self.tables.dtype)
            held[0], held[1] = cos[0], sin[0]

    def score(self, cache: BoundedCache, q_LQD: Tensor, k_LHD: Tensor, v_LHD: Tensor, *, scored: bool) -> None:
        """Hand the new token's q, k and v before RoPE to the policy: entry scores, where they are not there, and recent
        queries."""
        for layer, rows in enumerate(cache.bounded):
            q, k, v = (x[layer][None, :, None] for x in (q_LQD, k_LHD, v_LHD))
            if scored and self.scores and rows.window is None:
                newest = torch.from_numpy(self.starts_LH[layer] + self.lengths_LH[layer])
                score_BHT = scores_of(entry_scores(self.context, rows, self.seen, q, k, v), k)
                rows.scores.view(-1)[newest] = score_BHT.reshape(-1).to(rows.scores.dtype)
            if rows.recent:
                rows.append_queries(q)

    def count(self, cache: BoundedCache) -> None:
        """A row more in every layer, and the evictions that are due."""
        self.lengths_LH += 1
        self.packed["tail"] += 1
        self.left -= 1
        self.seen += 1
        for rows in cache.bounded:
            rows.codec.count()
            rows.count(1)
            if not self.left:
                evict_if_due(self.context, [rows])
                rows.codec.finish_block()
        cache.state.unfinished = False


# ---- the driver ------------------------------------------------------------------------------------------------------------


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
        state, rows = cache.state, self._rows.get(cache)
        if state.unfinished:
            return False
        if rows is not None and rows.are_of(cache):
            return True
        return not state.needs_reread and state.seen > 0 and not any(layer.codec.open for layer in state.layers)

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
