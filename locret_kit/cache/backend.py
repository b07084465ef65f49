"""Backends: who computes for a cache. One is chosen when the cache meets its model, and every step asks that one."""

import logging
from copy import copy
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from locret_kernels import cpp
from locret_kernels import quantise as quantiser
from locret_kernels.attend import Blocks, ChunkRotation, ColumnStats, attend_and_count
from locret_kernels.attend import cpu as attend_on_cpu
from locret_kernels.backend import BackendUnavailable, choose, function
from locret_kernels.fused import rms_norm, swiglu

from ..backbones.bfloat16 import product
from ..backbones.handlers import LayerOperations, Linear, Softmax
from ..backbones.rope import rotate_lean
from ..registry import Registry
from .attend import attend_rows, attend_window, chunk_attention, steady_attention, varlen_operator

logger = logging.getLogger(__name__)

Counted = tuple[Tensor, list[ColumnStats]]
"""Attention ``[B, Q, T, D]``, and what its weights add up to: of the mean over each group, then of each of its query heads."""


class Backend:
    """PyTorch, and the definitions of ``locret_kernels``, on any device. The other backends derive from it and
    replace the operations that they have in a faster form."""

    name = kernels = "reference"
    """The setting ``backend``, and the name in ``locret_kernels.backend`` under which policies and rows choose their
    operations."""
    linear: ClassVar[Linear] = staticmethod(F.linear)
    """Matrix product for the kit's own layers, besides the backbone."""
    launches: ClassVar[bool] = False
    """Whether each operation is a launch, which costs the host more than its work on a few rows: new rows of all heads, their
    scores and evictions of several layers are then one operation each, and one token's attention rotates as it reads."""
    steady: tuple[int, int] | None = None
    """Tokens and rows, their own included, of chunks over a full cache; None without such."""

    def operations(self, x: Tensor) -> LayerOperations | None:
        """Operations of a layer besides attention, for hidden states of a dtype and device like ``x [B, T, C]``.
        None leaves the backbone's own."""
        return None

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rows ``[B, H, T, D]`` after RoPE, by tables ``[..., T, R]``."""
        return function("rotate_rows", self.kernels)(x, cos, sin)

    def attend(
        self,
        q_BQTD: Tensor,
        k_BHSD: Tensor,
        v_BHSD: Tensor,
        softmax: Softmax,
        *,
        window: int | None = None,
        want: frozenset[str] = frozenset(),
        by_head: bool = False,
        rotation: ChunkRotation | None = None,
    ) -> Counted:
        """Attention of a chunk over rows whose newest ``T`` are its own, with the wanted statistics. With sinks or a
        cap on the logits it is the definition's, on every backend.

        Args:
            window: rows up to each query's own that it sees; no statistics are wanted then.
            want: some of ``attend.STATISTICS`` of ``locret_kernels``. by_head: also of each query head of a group alone.
            rotation: of queries and keys that come before RoPE.
        """
        if softmax.is_plain and window is None and self.is_one_call(q_BQTD, k_BHSD, v_BHSD, rotation):
            return attend_on_cpu.attend_and_count(
                q_BQTD, k_BHSD, v_BHSD, softmax.scaling, want=want, by_head=by_head, rotation=rotation
            )
        q_BQTD, k_BHSD = self.rotated(q_BQTD, k_BHSD, rotation)
        # Sinks and caps have one definition, which no kernel repeats.
        if not softmax.is_plain:
            form = softmax._asdict()
            out, counted = attend_and_count(q_BQTD, k_BHSD, v_BHSD, **form, want=want, by_head=by_head, window=window)
            return out.to(v_BHSD.dtype), counted
        return self._attend(q_BQTD, k_BHSD, v_BHSD, softmax.scaling, window, want, by_head)

    def attend_blocks(self, q_BQTD: Tensor, k_BHSD: Tensor, v_BHSD: Tensor, scaling: float, blocks: Blocks) -> Tensor:
        """Attention ``[B, Q, T, D]`` of a chunk over chosen blocks of rows."""
        return function("sparse_attend", self.kernels)(q_BQTD, k_BHSD, v_BHSD, scaling, blocks)

    def is_one_call(self, q_BQTD: Tensor, k_BHSD: Tensor, v_BHSD: Tensor, rotation: ChunkRotation | None) -> bool:
        """Whether one compiled call rotates the rows of a chunk as it reads them, attends to them and counts."""
        return False

    def attends_ragged(self, device: torch.device, dtype: torch.dtype, head_size: int) -> bool:
        """Whether heads of different lengths are one call (``attend.attend_heads``)."""
        return False

    def packs(self, dtype: torch.dtype) -> bool:
        """Whether rows of this type are brought into few bits by compiled calls (``storage.quantised``)."""
        return False

    def folds(self, device: torch.device) -> bool:
        """Whether retaining heads are folded into the projections before them (``folded``)."""
        return False

    def rotated(self, q_BQTD: Tensor, k_BHSD: Tensor, rotation: ChunkRotation | None) -> tuple[Tensor, Tensor]:
        """Queries and keys of a chunk after RoPE."""
        if rotation is None:
            return q_BQTD, k_BHSD
        # A decoded token reads all rows for one query: on a CPU most of its time is this rotation.
        turned = rotate_lean if q_BQTD.shape[2] == 1 and q_BQTD.device.type == "cpu" else self.rotate
        keys = turned(k_BHSD, rotation.cos_SR, rotation.sin_SR)
        return turned(q_BQTD, rotation.q_cos_TR, rotation.q_sin_TR), keys

    def reads_by(self, device: torch.device, dtype: torch.dtype, head_size: int, heads: tuple[int, int]) -> str:
        """Name of the operator that reads chunks of a prompt, for reports."""
        return "sdpa"

    def _attend(
        self, q_BQTD: Tensor, k_BHSD: Tensor, v_BHSD: Tensor, scaling: float, window: int | None, want: frozenset[str],
        by_head: bool,
    ) -> Counted:  # fmt: skip
        if want:
            return attend_and_count(q_BQTD, k_BHSD, v_BHSD, scaling, want=want, by_head=by_head)
        return attend_rows(q_BQTD, k_BHSD, v_BHSD, scaling, window), []


class TritonBackend(Backend):
    """Kernels of ``locret_kernels`` on a card, and PyTorch's FlashAttention where it runs."""

    name = kernels = "triton"
    launches = True

    def operations(self, x: Tensor) -> LayerOperations | None:
        """Triton's norm and gate for hidden states like ``x [B, T, C]`` on a GPU; None on a CPU, where kernels are
        interpreted."""
        if x.device.type == "cpu":  # kernels are interpreted there
            return None
        return LayerOperations(function("rms_norm", self.kernels), function("swiglu", self.kernels), F.linear)

    def attends_ragged(self, device: torch.device, dtype: torch.dtype, head_size: int) -> bool:
        return varlen_operator(device, dtype, head_size) is not None

    def folds(self, device: torch.device) -> bool:
        return device.type != "cpu"

    def reads_by(self, device: torch.device, dtype: torch.dtype, head_size: int, heads: tuple[int, int]) -> str:
        chosen, sizes = chunk_attention(device, dtype, head_size, heads), (device, dtype, head_size, heads)
        other = "sdpa" if chosen is None else chosen[0]
        steady = None if self.steady is None else steady_attention(*sizes, self.steady)
        return other if steady is None or steady[0] == other else f"{steady[0]}, until the cache is full {other}"

    def _attend(
        self, q_BQTD: Tensor, k_BHSD: Tensor, v_BHSD: Tensor, scaling: float, window: int | None, want: frozenset[str],
        by_head: bool,
    ) -> Counted:  # fmt: skip
        (_, Q, T, D), (H, S) = q_BQTD.shape, k_BHSD.shape[1:3]
        if v_BHSD.shape[3] != D:  # latent attention, which FlashAttention does not take
            return super()._attend(q_BQTD, k_BHSD, v_BHSD, scaling, window, want, by_head)
        sizes, chosen = (q_BQTD.device, q_BQTD.dtype, D), None
        if want or (window is None and 1 < T < S):
            steady = steady_attention(*sizes, (Q, H), self.steady) if self.steady == (T, S) else None
            chosen = steady or chunk_attention(*sizes, (Q, H))
        if chosen is not None:
            out, lse_BQT = chosen[1](q_BQTD, k_BHSD, v_BHSD, scaling)
            column_stats = function("column_stats", self.kernels)
            # First the whole group's, then that of each of its query heads.
            heads = [slice(None), *(slice(g, None, Q // H) for g in range(Q // H * by_head))] if want else []
            return out, [column_stats(q_BQTD[:, own], k_BHSD, scaling, lse_BQT[:, own], want=want) for own in heads]
        if window is not None and (T > 1 or window < S) and varlen_operator(*sizes) is not None:
            return attend_window(q_BQTD, k_BHSD, v_BHSD, scaling, window), []
        return super()._attend(q_BQTD, k_BHSD, v_BHSD, scaling, window, want, by_head)


class CpuBackend(Backend):
    """C++ of ``locret_kernels`` on a CPU, for the tensors that it supports; PyTorch elsewhere."""

    name = kernels = "cpu"
    linear: ClassVar[Linear] = staticmethod(product)

    def packs(self, dtype: torch.dtype) -> bool:
        return dtype in cpp.DTYPES and quantiser.runs()

    def reads_by(self, device: torch.device, dtype: torch.dtype, head_size: int, heads: tuple[int, int]) -> str:
        return self.name

    def operations(self, x: Tensor) -> LayerOperations | None:
        """The definitions of norm and gate, and the compiled product, for hidden states like ``x [B, T, C]``; None for
        tensors that C++ does not take."""
        if type(x) is not Tensor or x.device.type != "cpu" or x.dtype not in cpp.DTYPES:
            return None
        return LayerOperations(rms_norm, swiglu, product)

    def is_one_call(self, q_BQTD: Tensor, k_BHSD: Tensor, v_BHSD: Tensor, rotation: ChunkRotation | None) -> bool:
        one_table = rotation is None or rotation.cos_SR.dim() == 2  # for all heads
        return one_table and q_BQTD.shape[2] > 1 and attend_on_cpu.takes(q_BQTD, k_BHSD, v_BHSD)


@cache
def _say_without_kernels(head_size: int) -> None:
    logger.warning("heads of %d have no kernels (of 64, 96, 128 and 256 have), so PyTorch's operations run", head_size)


REFERENCE = Backend()
"""The definitions, where no other backend will do."""
BACKENDS: Registry[Backend] = Registry("backend")
"""Backends by name, one of each."""
for backend in (REFERENCE, TritonBackend(), CpuBackend()):
    BACKENDS.register(backend.name)(backend)


def backend_for(
    name: str | None,
    device: torch.device,
    head_size: int,
    dtype: torch.dtype,
    heads: tuple[int, int] = (32, 8),
    steady: tuple[int, int] | None = None,
) -> Backend:
    """The backend that is named; without a name ``cpu`` on a CPU where it compiles, ``triton`` on CUDA in half precision, and
    ``reference`` elsewhere. ``steady``: see ``Backend``.

    Raises:
        ValueError: an unknown backend, or one that does not take the device, head size or type.
        BackendUnavailable: its compiler or Triton is missing.
    """
    # Decided once for a cache: no step asks again what runs here.
    if name is None and device.type == "cpu" and dtype in cpp.TYPES and cpp.runs(attend_on_cpu.SOURCE):
        name = "cpu"
    chosen = name or choose(None, device, head_size, dtype)
    if name is None and chosen == "reference" and choose(None, device, 64, dtype) == "triton":
        _say_without_kernels(head_size)
    backend = BACKENDS[chosen]
    if backend.kernels == "cpu" and not cpp.runs(attend_on_cpu.SOURCE):
        raise BackendUnavailable(f"backend={backend.name!r} needs a C++ compiler with OpenMP: see the warning before")
    choose(backend.kernels, device, head_size, dtype)
    if backend.launches:
        backend = copy(backend)
        backend.steady = steady
        backend.reads_by(device, dtype, head_size, heads)  # now: a package may compile for seconds
    return backend
