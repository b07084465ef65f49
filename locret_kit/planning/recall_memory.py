"""Memory of recall: what is stored on the host, and on the device what finds it and what comes back."""

from __future__ import annotations

import torch

from ..backbones.spec import BackboneSpec
from ..cache.stages.bring_back import TILE
from ..cache.storage.host import HostMemory, RowForm
from ..policies.base import Recall
from ..settings import RunSettings
from ..sizes import parse_bytes


def stored_blocks(recall: Recall, context: int) -> int:
    """Blocks of a head for a text of so many tokens."""
    return -(-context // recall.size)


def host_bytes(spec: BackboneSpec, recall: Recall, context: int, dtype: str, run: RunSettings) -> int:
    """Bytes of the store of all layers without a window: room for every token of the text, as far as ``store_memory`` goes.

    Raises:
        ValueError: it has no room for a block of each.
    """
    layers = spec.windows.count(None)
    a_block = spec.n_kv_heads * recall.size * 2 * RowForm(spec.head_dim, getattr(torch, dtype), run.store_bits).nbytes
    limit = None if run.store_memory is None else parse_bytes(run.store_memory, "store_memory")
    max_blocks = HostMemory(limit, layers=layers).most(a_block) if layers else None
    blocks = stored_blocks(recall, context)
    return layers * a_block * (blocks if max_blocks is None else min(blocks, max_blocks))


def device_bytes(spec: BackboneSpec, recall: Recall, context: int, item: int) -> int:
    """Bytes of all layers on the device: representatives with their worth, which rows are stored, and the slots that come back
    with their positions."""
    blocks, D = stored_blocks(recall, context), spec.head_dim
    keys = recall.representatives * recall.count(spec.n_heads // spec.n_kv_heads)
    index = blocks * (keys * (D * item + 4) + recall.size)
    back = min(recall.take, blocks) * (recall.size * (2 * D * item + 8 + 1) + 8)
    return spec.windows.count(None) * spec.n_kv_heads * (index + back)


def phases(spec: BackboneSpec, recall: Recall, context: int, rows: int, tokens: int, item: int) -> dict[str, int]:
    """Bytes at the widest moments, with so many ``rows`` a head and ``tokens`` of a block; an upper bound."""
    H, Q, D, wide = spec.n_kv_heads, spec.n_heads, spec.head_dim, max(item, 4)
    seen = rows + recall.take * recall.size
    keys = rows + recall.representatives * recall.count(Q // H) * stored_blocks(recall, context)
    copies = (
        H * seen * 2 * D * (item + wide) + H * seen * D * 4 * item
    )  # side by side, exact, and rotated with their tables
    tile = min(tokens, TILE) * Q
    return {
        "look up": H * keys * D * (item + wide) + tile * keys * 3 * wide,
        "attend to recalled": copies + tile * seen * 4 * wide + 2 * tokens * Q * D * wide,
    }
