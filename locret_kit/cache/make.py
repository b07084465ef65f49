"""Layers of a bound cache: which store each of them has, and its size."""

from __future__ import annotations

from ..sizes import parse_bytes
from .context import Context
from .storage.blocks import BlockStore
from .storage.compiled import CompiledLayer
from .storage.float8 import Float8Layer
from .storage.groups import SPARE
from .storage.host import HostMemory, RowForm
from .storage.quantised import FLOAT8, QuantisedLayer, Scratch, check_head_size
from .storage.ragged import RaggedLayer
from .storage.ragged_quantised import RaggedQuantisedLayer
from .storage.rows import BoundedLayer


def make_layers(ctx: Context, scratch: Scratch) -> list[BoundedLayer]:
    """One store per layer; quantised ones are read through ``scratch``."""
    chunk, policy = ctx.schedule.chunk, ctx.policy
    memory, layers = host_memory(ctx), []
    for window, budget in zip(ctx.spec.windows, ctx.budgets, strict=True):
        if window is not None:  # the rows that the window can still see beside one block, and no more
            rows = BoundedLayer(window - 1 + chunk, window)
        elif policy.keeps_everything:
            rows = _store(ctx, scratch, ctx.schedule.prompt_length or 0, spare=0.0)
        else:
            statistics = len(ctx.statistics) * (1 + ctx.group)
            rows = _store(ctx, scratch, budget + chunk, statistics, policy.recent(chunk))
            if policy.recall is not None:
                room = -(-(ctx.schedule.prompt_length or 0) // policy.recall.size)
                views = policy.recall.count(ctx.spec.n_heads // ctx.spec.n_kv_heads)
                size, representatives = policy.recall.size, policy.recall.representatives
                rows.store = BlockStore(size, representatives, views, room, memory=memory, bits=ctx.settings.store_bits)
        rows.backend = ctx.backend.name
        layers.append(rows)
    return layers


def host_memory(ctx: Context) -> HostMemory:
    """Host memory of all stores of a cache. Raises ValueError where it has no room for a block of each, or their bits do not fit
    the heads."""
    s, spec = ctx.settings, ctx.spec
    limit = None if s.store_memory is None else parse_bytes(s.store_memory, "store_memory")
    memory = HostMemory(limit, s.store_file, spec.windows.count(None))
    if ctx.policy.recall is not None and spec.windows.count(None):
        if s.store_bits is not None:
            check_head_size(s.store_bits, spec.head_dim, "store_bits")
        form = RowForm(spec.head_dim, ctx.model.dtype, s.store_bits)
        memory.most(2 * spec.n_kv_heads * ctx.policy.recall.size * form.nbytes)
    return memory


def _store(
    ctx: Context, scratch: Scratch, capacity: int, statistics: int = 0, recent: int = 0, spare: float = SPARE
) -> BoundedLayer:
    """Rows of one layer without a window."""
    policy, bits = ctx.policy, ctx.settings.kv_bits
    if bits == FLOAT8:
        return Float8Layer(capacity, None, statistics, recent)
    if bits is not None:
        stored = (
            RaggedQuantisedLayer if policy.ragged else CompiledLayer if ctx.backend.name == "cpu" else QuantisedLayer
        )
        return stored(capacity, statistics, recent, bits=bits, scratch=scratch, spare=spare)
    make = RaggedLayer if policy.ragged else BoundedLayer
    merges = policy.merge is not None and policy.merge.remembers
    return make(capacity, None, statistics, recent, merges=merges)
