"""Layers of a bound cache: where and how the rows of each are stored, and how many."""

from __future__ import annotations

from ..backbones.spec import AttentionLayer
from ..policies.policy import Policy
from .context import Context
from .storage.bits import FLOAT8
from .storage.blocks import BlockStore
from .storage.codec import Codec, Float8, Plain, Scratch
from .storage.compiled import CompiledBits
from .storage.layouts import EqualRows, RaggedRows
from .storage.quantised import SPARE, GroupedBits
from .storage.rows import BoundedLayer


def make_layers(ctx: Context, scratch: Scratch) -> list[BoundedLayer]:
    """Rows of every layer; those in few bits are read through ``scratch``."""
    policy, s, compiled = ctx.policy, ctx.schedule, ctx.backend.packs(ctx.model.dtype)
    layers = []
    for layer, budget in zip(ctx.spec.layers, ctx.budgets, strict=True):
        capacity = s.prompt_length or 0 if policy.keeps_everything else budget + s.chunk
        rows = layer_rows(policy, layer, capacity, s.chunk, ctx.settings.kv_bits, scratch, compiled=compiled)
        if policy.recall is not None and layer.window is None:
            # Blocks for the whole prompt, where its length is known: the store then never grows.
            room = -(-(s.prompt_length or 0) // policy.recall.size)
            views = policy.recall.count(layer.n_heads // layer.n_kv_heads)
            rows.store = BlockStore(policy.recall.size, policy.recall.representatives, views, room)
        rows.backend, rows.grows = ctx.backend.name, policy.keeps_everything
        layers.append(rows)
    return layers


def layer_rows(
    policy: Policy,
    layer: AttentionLayer,
    capacity: int,
    chunk: int,
    bits: int | None,
    scratch: Scratch,
    *,
    compiled: bool = False,
) -> BoundedLayer:
    """Rows of one layer: ``capacity`` of them a head, with keys and values in ``bits`` bits; of one with a window those that it
    can still see beside a chunk, as they came. ``compiled``: read and quantised by compiled calls."""
    if layer.window is not None:
        # A chunk forgets everything at its end; before a sliding block stands the window of its first token.
        capacity = layer.window if layer.chunked else layer.window - 1 + chunk
        return BoundedLayer(EqualRows(capacity), Plain(), layer.window, chunked=layer.chunked)
    codec: Codec = Plain()
    if bits == FLOAT8:
        codec = Float8()
    elif bits is not None:
        # Under full attention no group ever gets sparse, so the table needs no spare ones.
        kind = CompiledBits if compiled else GroupedBits
        codec = kind(bits, scratch, spare=0.0 if policy.keeps_everything else SPARE)
    statistics = recent = 0
    if not policy.keeps_everything:
        # Those of the group first, then of each of its query heads where the policy asks for them.
        group = layer.n_heads // layer.n_kv_heads if policy.by_query_head else 0
        statistics, recent = len(policy.statistics - {"count"}) * (1 + group), policy.recent(chunk)
    layout = RaggedRows if policy.ragged else EqualRows
    merges = policy.merge is not None and policy.merge.remembers
    return BoundedLayer(layout(capacity), codec, None, statistics, recent, merges=merges)
