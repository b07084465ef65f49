"""Memory of recall: what is stored on the host, and on the device what finds it and what comes back."""

from __future__ import annotations

from ..backbones.spec import BackboneSpec
from ..cache.stages.bring_back import TILE
from ..policies.base import Recall


def stored_blocks(recall: Recall, context: int) -> int:
    """Blocks of a head for a text of so many tokens."""
    return -(-context // recall.size)


def host_bytes(spec: BackboneSpec, recall: Recall, context: int, item: int) -> int:
    """Bytes of the store of all layers without a window: room for every token of the text."""
    a_block = spec.n_kv_heads * recall.size * 2 * spec.head_dim * item
    return spec.windows.count(None) * a_block * stored_blocks(recall, context)


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
