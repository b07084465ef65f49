"""Bytes of tensors alive, operation by operation: an oracle for memory plans that needs no GPU.

On the meta device a model of any size runs without memory, and what PyTorch would have allocated is counted.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts storages that operations create inside the block; ``peak`` is the largest sum alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, tuple[StorageWeakRef, int, str]] = {}
        self.peak, self.at_peak = 0, []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.live = {key: entry for key, entry in self.live.items() if not entry[0].expired()}
        given = {
            leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)
        }
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                if storage._cdata not in given and storage._cdata not in self.live:
                    self.live[storage._cdata] = (
                        StorageWeakRef(storage),
                        storage.nbytes(),
                        f"{func} {tuple(leaf.shape)}",
                    )
        total = sum(size for _, size, _ in self.live.values())
        if total > self.peak:
            self.peak, self.at_peak = total, sorted(((s, n) for _, s, n in self.live.values()), reverse=True)
        return out


class FusedAttention(TorchFunctionMode):
    """Attention as a fused kernel allocates: its output and nothing else. A meta tensor is true where one is asked
    (transformers asks whether positions are consecutive)."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            return torch.empty_like(args[0])
        if func is torch.Tensor.__bool__ and args[0].is_meta:
            return True
        return func(*args, **(kwargs or {}))
