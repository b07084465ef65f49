"""Bytes of tensors alive, operation by operation: an oracle for memory plans that needs no GPU.

On the meta device a model of any size runs without memory, and what PyTorch would have allocated is counted.
"""

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
        self.live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        made = {key: storage for key, storage in storages(out).items() if key not in self.live}
        if made:
            made = {key: made[key] for key in made.keys() - storages((args, kwargs)).keys()}
        if made:  # the sum grows here alone; a weak reference keeps its storage's key from being given out again
            self.live = {key: entry for key, entry in self.live.items() if not entry[0].expired()}
            self.live |= {key: (StorageWeakRef(storage), storage.nbytes()) for key, storage in made.items()}
            self.peak = max(self.peak, sum(size for _, size in self.live.values()))
        return out


def storages(values: Any) -> dict[int, torch.UntypedStorage]:
    """Storages of the tensors in a nest of values, by their keys."""
    found = [leaf.untyped_storage() for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
    return {storage._cdata: storage for storage in found}


class FusedAttention(TorchFunctionMode):
    """Attention as a fused kernel allocates: its output and nothing else. A meta tensor is true where one is asked
    (transformers asks whether positions are consecutive)."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            return torch.empty_like(args[0])
        if func is torch.Tensor.__bool__ and args[0].is_meta:
            return True
        return func(*args, **(kwargs or {}))
