"""Shared parts of the Triton kernels: tiles of a head's rows, launches, and checks of arguments.

A head of 96 columns is read as 64 + 32, so that no lane works on padding: ``D0`` and ``D1`` are powers of two, and
``D1`` may be 0.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

HEAD_SIZES = {64: (64, 0), 96: (64, 32), 128: (128, 0), 256: (256, 0)}
"""Head size -> ``(D0, D1)``, its two blocks of columns."""
FLOAT32_HEAD = 64
"""Largest head size that the kernels take in float32, except in the interpreter."""
WIDEST = 16384
"""Most columns of a row that a program holds whole, to normalise it."""
DTYPES = ("float32", "bfloat16", "float16")
OPTIONS = {"enable_fp_fusion": True}
"""Compiler options of every launch. Softmax counts on fused multiply-adds, which Triton 3.10 turns off by default."""
INTERPRETED = bool(triton.knobs.runtime.interpret)
UPCAST = tl.constexpr(INTERPRETED)
"""Whether loads become float32: arithmetic in bfloat16 is wrong in Triton's interpreter."""
LOG2E = tl.constexpr(1.4426950408889634)
"""log2(e): the kernels take exponentials to base 2, which the hardware has."""
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def load_rows(base, rows, keep, stride, D0: tl.constexpr, D1: tl.constexpr):
    """Two tiles ``[rows, D0]`` and ``[rows, D1]`` of a matrix with contiguous columns, zeros where ``keep`` is false. Without a
    ``D1`` the second tile is the first one again."""
    at = base + rows[:, None] * stride  # [rows, 1]
    x0 = tl.load(at + tl.arange(0, D0)[None, :], mask=keep[:, None], other=0.0)  # [rows, D0]
    if UPCAST:
        x0 = x0.to(tl.float32)
    x1 = x0
    if D1 > 0:
        x1 = tl.load(at + D0 + tl.arange(0, D1)[None, :], mask=keep[:, None], other=0.0)  # [rows, D1]
        if UPCAST:
            x1 = x1.to(tl.float32)
    return x0, x1


@triton.jit
def dot_rows(a0, a1, b0, b1, out, D1: tl.constexpr):
    """``out`` plus the dot products ``[rows of a, rows of b]``, in float32."""
    out = tl.dot(a0, tl.trans(b0), out, input_precision="ieee")  # [A, D0] x [D0, B] -> [A, B]
    if D1 > 0:
        out = tl.dot(a1, tl.trans(b1), out, input_precision="ieee")  # [A, D1] x [D1, B] -> [A, B]
    return out


def launch(kernel: triton.KernelInterface[object], grid: tuple[int, ...], *args: object, **constants: object) -> None:
    """Start a kernel on the device of its first argument, which need not be PyTorch's current device.

    Every launch passes here, so who replaces it sees them all. With the constant ``PDL`` a kernel may begin before the previous
    launch has ended, so it must wait before it reads or writes anything of other launches.

    Args:
        constants: of the kernel, ``num_warps`` and ``num_stages``.
    """
    options = {**OPTIONS, "launch_pdl": True} if constants.get("PDL") else OPTIONS
    with torch.cuda.device_of(args[0]):
        kernel[grid](*args, **constants, **options)


def head_blocks(D: int, dtype: torch.dtype) -> tuple[int, int]:
    """``(D0, D1)`` of a head size.

    Raises:
        ValueError: a head size without kernels, or one too large for float32, whose products use no tensor cores and whose
            tiles do not fit the shared memory and the registers of every card.
    """
    if D not in HEAD_SIZES:
        raise ValueError(f"head size {D} must be one of: {', '.join(map(str, HEAD_SIZES))} (backend='triton')")
    if dtype == torch.float32 and D > FLOAT32_HEAD and not INTERPRETED:
        most = f"at most {FLOAT32_HEAD} (backend='triton'): bfloat16, float16 may"
        raise ValueError(f"float32 heads of {D} must be of {most}")
    return HEAD_SIZES[D]


def check_width(C: int) -> None:
    """Raise ValueError for a row of so many columns that no program holds it."""
    if C > WIDEST:
        raise ValueError(f"x has {C} columns, which must be at most {WIDEST} to be normalised (backend='triton')")


def check(*, longest: int | None = None, **tensors: Tensor) -> None:
    """Refuse tensors that the kernels cannot read. Meta tensors pass, so that launches can be compiled.

    Offsets inside a head, and among the queries of a group, are 32-bit integers, those of heads 64-bit.

    Args:
        longest: rows of the longest head, where 2-D tensors hold the rows of all heads one after another.

    Raises:
        ValueError: another device or type, columns that are not contiguous, or a head of 2**31 elements or more.
    """
    for name, x in tensors.items():
        if not (x.is_cuda or x.is_meta or INTERPRETED):
            raise ValueError(f"{name} is on {x.device}: backend='triton' takes CUDA tensors")
        if x.is_floating_point() and str(x.dtype).removeprefix("torch.") not in DTYPES:
            raise ValueError(f"{name} is {x.dtype}: backend='triton' takes {', '.join(DTYPES)}")
        if x.dim() and x.stride(-1) != 1:
            raise ValueError(f"{name} has stride {x.stride(-1)} in its last dimension, which must be 1")
        if x.dim() > 1:
            rows = x.shape[-2] if longest is None or x.dim() > 2 else min(longest, x.shape[0])
            if (span := rows * x.stride(-2)) >= 2**31:
                raise ValueError(f"{name} spans {span} elements per head, which must be below 2**31")


def check_heads(q_BQTD: Tensor, k_BHSD: Tensor, v_BHSD: Tensor | None = None) -> tuple[int, int, int, int, int, int]:
    """``B, H, G, T, S, D`` of queries and keys, and values where there are some, that fit each other.

    Raises:
        ValueError: shapes or types that do not, or what ``check`` refuses.
    """
    v_BHSD = k_BHSD if v_BHSD is None else v_BHSD
    check(q=q_BQTD, k=k_BHSD, v=v_BHSD)
    B, Q, T, D = q_BQTD.shape
    H, S = k_BHSD.shape[1:3]
    if Q % H or k_BHSD.shape[0] != B or k_BHSD.shape[3] != D:
        raise ValueError(f"q {tuple(q_BQTD.shape)} and k {tuple(k_BHSD.shape)} do not belong together")
    if (span := Q // H * q_BQTD.stride(1)) >= 2**31:  # kernels that read a group by turns count from its first head
        raise ValueError(f"q spans {span} elements per group, which must be below 2**31")
    if q_BQTD.dtype != k_BHSD.dtype:
        raise ValueError(f"q is {q_BQTD.dtype} and k is {k_BHSD.dtype}: they must be of one type")
    if v_BHSD.shape != k_BHSD.shape or v_BHSD.dtype != k_BHSD.dtype:
        kinds = (f"{name} {tuple(x.shape)} {x.dtype}" for name, x in (("k", k_BHSD), ("v", v_BHSD)))
        raise ValueError(f"{' and '.join(kinds)} must be alike")
    return B, H, Q // H, T, S, D


PROGRAMS = 3 * 132
"""Programs of four warps that run at once where no device can be asked: three for each multiprocessor of an H200."""
LEAST_BLOCKS = tl.constexpr(4)
"""Blocks of rows that a split has at least, so that its loop pays for its start."""


@cache
def programs(device: torch.device) -> int:
    """Programs of four warps and at most 168 registers a thread that run at once on a device."""
    there = device.type == "cuda" and torch.cuda.device_count()
    return 3 * torch.cuda.get_device_properties(device).multi_processor_count if there else PROGRAMS


@triton.jit
def join_parts(parts, norms, out, norm, n, N, splits, D0: tl.constexpr, D1: tl.constexpr, BLOCK: tl.constexpr):
    """Write the output row ``[D]`` of number ``n`` of ``N`` from its parts ``[splits, D]``, which other programs have left."""
    D: tl.constexpr = D0 + D1
    parts += n * D
    # A softmax over the splits, a block at a time: `total` and `y` are scaled by 2**-top, the largest norm so far.
    top = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    y0 = tl.zeros([D0], tl.float32)
    y1 = tl.zeros([D1 if D1 > 0 else 16], tl.float32)
    for first in range(0, splits, BLOCK):
        split = first + tl.arange(0, BLOCK)  # [BLOCK]
        there = split < splits
        x = tl.load(norms + n + split.to(tl.int64) * N, mask=there, other=float("-inf")) * LOG2E  # [BLOCK]
        new = tl.maximum(top, tl.max(x, 0))  # [1]
        shift = tl.where(new == float("-inf"), 0.0, new)  # -inf - -inf is NaN
        weight = tl.exp2(x - shift)  # [BLOCK]
        fade = tl.exp2(top - shift)  # [1]
        x0, x1 = load_rows(parts, split.to(tl.int64), there, N * D, D0, D1)  # [BLOCK, D0], [BLOCK, D1]
        total = total * fade + tl.sum(weight, 0)
        y0 = y0 * fade + tl.sum(weight[:, None] * x0, 0)  # [D0]
        if D1 > 0:
            y1 = y1 * fade + tl.sum(weight[:, None] * x1, 0)  # [D1]
        top = new
    tl.store(norm + n + tl.arange(0, 1), (top + tl.log2(total)) / LOG2E)  # -inf where no part has rows
    total = tl.where(total == 0.0, 1.0, total)
    to = out + n * D
    tl.store(to + tl.arange(0, D0), (y0 / total).to(out.dtype.element_ty))
    if D1 > 0:
        tl.store(to + D0 + tl.arange(0, D1), (y1 / total).to(out.dtype.element_ty))
