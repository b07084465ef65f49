"""Launches of a forward on PyTorch's meta device: each with its work, its bytes and the part of a layer that it belongs to."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, prod
from types import FrameType
from typing import Literal, Protocol

from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..heads import RetainingHeads
from ..planning.cards import ELEMENTWISE, KERNELS, PASS, SORT, STEP, Card
from .graph_decoder import SYNCING_OPS

PRODUCTS, HEADS, ATTENTION, NORMS = "products of the layer", "heads' products", "attention", "norms"
IDENTITY, ACTIVATION, COPIES = "rotation by ones and zeros", "activation", "cat, contiguous"
COMPACTION, ROTATION, SELECTION = "compaction", "rotation of rows", "selection"
RESIDUAL, SCORING, OTHER = "residual, append", "scoring", "other"
PARTS = (
    PRODUCTS, ATTENTION, NORMS, IDENTITY, HEADS, ACTIVATION, COPIES, COMPACTION, ROTATION, SELECTION, RESIDUAL, SCORING, OTHER,
)  # fmt: skip
"""Parts of a layer, in the order in which they are shown."""
Kind = Literal["product", "attention", "elementwise", "kernel", "sort"]
SELECT_STEPS = 32 + 2
"""Sums of a selection: one per bit, and two counts."""
ALLOCATES = frozenset(
    {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "lift_fresh", "detach", "_unsafe_view"}
)


@dataclass(frozen=True)
class Operation:
    """One launch."""

    name: str
    part: str
    kind: Kind
    flops: float
    nbytes: float
    passes: int = 0
    """Blocks of rows that a kernel takes one after another."""
    steps: int = 0
    """Sums over what a program holds in registers, one after another."""

    def seconds(self, card: Card) -> float:
        """On a card."""
        if self.kind == "sort":
            return SORT
        share = {"product": card.weights, "kernel": KERNELS, "attention": KERNELS}.get(self.kind, ELEMENTWISE)
        busy = self.flops / (card.matmul * (card.attention if self.kind == "attention" else card.products))
        waits = self.passes * PASS + self.steps * STEP
        return max(busy, self.nbytes / (card.copy * share), waits, card.launch)


class Kernel(Protocol):
    """A Triton kernel."""

    __name__: str
    arg_names: Sequence[str]


class Recorder(TorchDispatchMode):
    """Collects operations while ``where`` says into which list."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[str, list[Operation]] = defaultdict(list)
        self.where = self.inside = ""
        self.waits: list[str] = []
        self.rows = 0
        """Rows of a head that one token's attention reads."""

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        kwargs, name = kwargs or {}, func.overloadpacket.__name__
        if name in SYNCING_OPS:
            self.waits.append(name)
            if name in ("_local_scalar_dense", "item", "is_nonzero"):
                return True
        out = func(*args, **kwargs)
        devices = {x.device.type for x in tree_leaves((args, kwargs, out)) if isinstance(x, Tensor) and x.dim()}
        if len(devices) > 1:
            self.waits.append(f"{name} between host and device")
        if self.where and name not in ALLOCATES and not _is_view(func) and _has_work(out):
            self.made[self.where].append(_operation(name, args, kwargs, out))
        return out

    def launch(self, kernel: Kernel, grid: tuple[int, ...], *args: object, **constants: object) -> None:
        """In the place of ``locret_kernels.common.launch``."""
        if not self.where:
            return
        name = kernel.__name__.strip("_")
        given = dict(zip(kernel.arg_names[: len(args)], args, strict=True)) | constants
        tensors = {key: x for key, x in given.items() if isinstance(x, Tensor)}
        sizes = {key: x for key, x in given.items() if isinstance(x, int)}
        # What stands in for a tensor that a kernel does not read is one of the others.
        nbytes, passes, steps = sum(map(extent, {id(x): x for x in args}.values())), 0, 0
        if name == "compact_rows":  # rows that stay are read and written, whatever the buffer holds
            per_row = sizes["D"] * tensors["x"].element_size()
            heads = prod(tensors["index"].shape[:2])
            nbytes = 2 * heads * sizes["K"] * per_row + extent(tensors["index"])
            passes = ceil(sizes["K"] / sizes["BLOCK_K"])
        elif name == "kept_rows":
            passes = ceil(sizes["S"] / sizes["BLOCK_S"])
        elif name == "select_rows":
            steps = SELECT_STEPS * ceil(sizes["S"] / sizes["BLOCK_S"])
            passes = ceil(sizes["S"] / sizes["BLOCK_E"])
        elif name == "ragged_decode":
            row = sum(tensors[x].shape[-1] * tensors[x].element_size() for x in ("keys", "values"))
            nbytes = grid[0] * self.rows * row
        kind: Kind = "attention" if name in ("ragged_decode", "attend", "join") else "kernel"
        part = _part(kind)
        self.made[self.where].append(Operation(name, part, kind, 0.0, nbytes, passes, steps))


def _is_view(func: OpOverload) -> bool:
    returns = func._schema.returns
    return bool(returns) and all(x.alias_info is not None and not x.alias_info.is_write for x in returns)


def _has_work(out: object) -> bool:
    """Whether anything is written: nothing is launched for tensors without elements."""
    return any(x.numel() for x in tree_leaves(out) if isinstance(x, Tensor))


def extent(x: object) -> int:
    """Bytes of a tensor's different elements: an axis of stride 0 repeats what is there."""
    if not isinstance(x, Tensor):
        return 0
    return x.element_size() * prod(n for n, stride in zip(x.shape, x.stride(), strict=True) if stride)


def _operation(name: str, args: tuple[object, ...], kwargs: dict[str, object], out: object) -> Operation:
    given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    made = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
    flops, nbytes = 0.0, float(sum(map(extent, given)) + sum(map(extent, made)))
    kind: Kind = "elementwise"
    if name in ("mm", "addmm", "bmm", "addmv", "mv"):
        kind, flops = "product", 2.0 * made[0].numel() * given[-2].shape[-1]
    elif name.startswith("_scaled_dot_product"):
        q, k = given[:2]
        T, S = q.shape[2], k.shape[2]
        kind, flops = "attention", 4.0 * q.shape[0] * q.shape[1] * q.shape[3] * (T * (S - T) + T * (T + 1) / 2)
    elif name in ("sort", "argsort", "topk"):
        kind = "sort"
    elif name == "copy_":  # what is written is not read
        nbytes = float(extent(given[0]) + extent(given[1]))
    elif name in ("index", "gather", "index_select", "embedding"):
        nbytes = 2.0 * extent(made[0]) + sum(extent(x) for x in given[1:] if not x.is_floating_point())
    elif name in ("index_put_", "scatter_", "index_copy_"):
        nbytes = 2.0 * extent(given[-1]) + sum(extent(x) for x in given[1:-1])
    elif name in ("fill_", "zero_"):
        nbytes = float(extent(given[0]))
    return Operation(name, _part(kind), kind, flops, nbytes)


def _part(kind: str) -> str:
    """The part of a layer in which an operation is launched, by the innermost function that says."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        owner = type(frame.f_locals.get("self")).__name__
        part = _part_of(str(frame.f_globals.get("__name__", "")), frame.f_code.co_name, owner, kind)
        if part:
            return part
        frame = frame.f_back
    return OTHER


def _part_of(module: str, function: str, owner: str, kind: str) -> str:
    """The part that a function's work belongs to; empty where it does not say."""
    if kind == "attention":
        return ATTENTION
    if owner.endswith("RMSNorm") or function == "rms_norm":
        return NORMS
    if function in ("apply_rotary_pos_emb", "rotate_half"):
        return IDENTITY
    if module == RetainingHeads.__module__:
        return HEADS if kind == "product" else ACTIVATION if function == "act" else COPIES
    if owner.endswith("MLP"):
        return PRODUCTS if kind == "product" else ACTIVATION
    if owner.endswith("Activation") or function == "swiglu":
        return ACTIVATION
    if function in ("keep", "compact_rows"):
        return COMPACTION
    if function == "evict":
        return SELECTION
    if function in ("append", "put", "remember"):
        return RESIDUAL
    if function in ("_attend_part", "rotate_rows", "tables", "decode_rows"):
        return ROTATION
    if function == "entry_scores":
        return SCORING
    if owner.endswith("Attention"):
        return PRODUCTS if kind == "product" else COPIES
    return RESIDUAL if owner.endswith("DecoderLayer") else ""
