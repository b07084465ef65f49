"""Example calls of every operation of the kernels, at the sizes of a prefill: one table for the timings and their gate
(``bench.py``) and for the compilations (``compile_check.py``)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from math import log

import torch

from locret_kernels import backend, common
from locret_kernels.attend import STATISTICS, Blocks
from locret_kernels.decoder_step import RowProducts
from locret_kernels.product import FORMATS
from locret_kernels.quantise import CHANNELS
from locret_kernels.ragged_decode import Angles, ByteRows, PackedRows, Rotation, Spans, angle_steps
from locret_kernels.rows import HeadProduct, RowBuffers


@dataclass(frozen=True)
class Shape:
    """Sizes of a prefill at a full cache."""

    query_heads: int
    heads: int
    """Key/value heads."""
    head_size: int
    budget: int
    chunk: int
    prompt: int = 10240
    """Slots of a training sample, for `column_max`."""
    answer: int = 256
    """Queries at the end of that sample which are read."""


@dataclass(frozen=True)
class Case:
    """Operation with its inputs: the calls to compare and time, and their least work."""

    operation: str
    shape: str
    runs: dict[str, Callable[[], object]]
    """Backend -> call. Without ``reference`` there is nothing to compare with."""
    flops: float | None = None
    nbytes: float | None = None
    state: tuple[torch.Tensor, ...] = ()
    """Tensors that a call changes in place."""
    exact: bool = False
    """Whether a kernel must equal its reference bit for bit."""

    @property
    def function(self) -> str:
        """The operation without its form."""
        return self.operation.split()[0].rstrip(",")


def runnable(name: str, device: torch.device) -> tuple[str, ...]:
    """Backends whose form of function ``name`` runs on a device; on ``meta`` kernels are launched nowhere, so Triton's does."""
    on_cpu = device.type == "cpu"
    runs = {"reference": True, "triton": not on_cpu or common.INTERPRETED, "cpu": on_cpu}
    return tuple(key for key, here in runs.items() if here and backend.form_of(name, key))


def cases(name: str, at: Shape, device: torch.device) -> Iterator[Case]:
    """Every operation as a prefill of the model ``name`` meets it: a full cache and one chunk, of
    bfloat16. On the meta device too."""
    layer = Layer(name, at, device)
    for kind in (of_attention, of_moving_rows, of_entering_rows, of_matrices, of_a_token):
        yield from kind(layer)


class Layer:
    """Tensors of a layer: queries of a chunk, and the rows of a full cache with that chunk."""

    def __init__(self, name: str, at: Shape, device: torch.device) -> None:
        self.name, self.at, self.device = name, at, device
        Q, H, D, T = at.query_heads, at.heads, at.head_size, at.chunk
        self.rows, self.scaling = at.budget + T, D**-0.5
        self.q, self.k, self.v = self.x(1, Q, T, D), self.x(1, H, self.rows, D), self.x(1, H, self.rows, D)

    def x(self, *size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """Random numbers of a shape and a dtype."""
        return torch.randn(*size, dtype=torch.float32, device=self.device).to(dtype)

    def case(self, form: str, sizes: str, *args: object, flops: float | None = None, nbytes: float | None = None,
             state: tuple[torch.Tensor, ...] = (), exact: bool = False, **rest: object) -> Case:  # fmt: skip
        """The case of one function, the first word of ``form``."""
        name, at = form.split()[0].rstrip(","), self.at
        forms = runnable(name, self.device)
        runs = {key: partial(backend.function(name, key), *args, **rest) for key in forms}
        shape = f"{self.name} Q={at.query_heads} H={at.heads} D={at.head_size} {sizes}"
        return Case(form, shape, runs, flops, nbytes, state, exact)


def of_attention(layer: Layer) -> Iterator[Case]:
    """A chunk's attention, in full and over blocks, its statistics, and the target of training."""
    at, x, case, (q, k, v) = layer.at, layer.x, layer.case, (layer.q, layer.k, layer.v)
    Q, H, D, T, P, A = at.query_heads, at.heads, at.head_size, at.chunk, at.prompt, at.answer
    S, W, scaling, device = layer.rows, min(32, T), layer.scaling, layer.device
    lse = torch.full((1, Q, T), log(S) + 0.5, dtype=torch.float32, device=device)  # about theirs
    seen = T * (S - T) + T * (T + 1) / 2  # pairs of a query and a slot that it sees
    chunk = f"T={T} S={S}"
    for want in ({"sum"}, {"sum", "square"}, {"above"}, STATISTICS):
        form = f"column_stats {'+'.join(sorted(want))}"
        yield case(form, chunk, q, k, scaling, lse, flops=2 * Q * D * seen, want=frozenset(want))
    yield case("window_attention", f"W={W} S={S}", q[:, :, -W:], k, scaling, flops=4 * Q * D * W * S)
    answer, prompt, pos = x(1, Q, A, D), x(1, H, P, D), torch.arange(P - A, P, device=device)
    for log_prob in (False, True):
        form, flops = f"column_max log_prob={log_prob}", 2 * Q * D * A * P
        yield case(form, f"T={A} S={P}", answer, prompt, pos, scaling, flops=flops, log_prob=log_prob)

    yield case("attend_and_count", chunk, q, k, v, scaling, flops=6 * Q * D * seen, want=frozenset({"sum"}))
    parts = [part for _ in range(2) for part in (x(1, Q, T, D), x(1, Q, T, dtype=torch.float32))]
    yield case("join_parts", f"T={T}", *parts, nbytes=1.5 * sum(part.nbytes for part in parts))

    for queries, unit in ((128, 128), (64, 1)):  # a third of the rows: blocks of them, or each by itself
        seen_BQNU = torch.rand(1, Q, -(-T // queries), -(-S // unit), dtype=torch.float32, device=device) < 1 / 3
        seen_BQNU[..., 0] = True
        form, work = f"sparse_attend, units of {unit}", 4 * Q * D * T * S / 3
        yield case(form, chunk, q, k, v, scaling, Blocks(seen_BQNU, queries, unit), flops=work)


def of_moving_rows(layer: Layer) -> Iterator[Case]:
    """An eviction: the choice of rows, and their way to the front; and their rotation."""
    at, case, device = layer.at, layer.case, layer.device
    H, D, budget, S = at.heads, at.head_size, at.budget, layer.rows
    numbers = layer.x(H, S, dtype=torch.float32)
    buffers = [layer.k[0].clone(), layer.v[0].clone(), numbers.clone(), numbers.int()]
    stay = torch.rand(1, H, S, dtype=torch.float32, device=device).argsort(-1)[..., :budget].sort(-1).values.int()
    moved, sizes = 2 * sum(t[:, :budget].nbytes for t in buffers), f"S={S} K={budget}"
    yield case("compact_rows", sizes, [buffers], stay, {}, nbytes=moved, state=tuple(buffers), exact=True)

    scores, most = numbers[None], torch.full((1, H), budget, dtype=torch.int64, device=device)
    guard, nbytes = torch.zeros(1, H, S, dtype=torch.uint8, device=device), scores.nbytes + stay.nbytes
    choice = scores, budget, at.chunk // 4
    yield case("select_index", sizes, *choice, nbytes=nbytes)
    yield case("select_index, guarded", sizes, *choice, guard, nbytes=nbytes + guard.nbytes)
    marks = guard.bool(), guard == 0
    yield case("select_rows", sizes, scores, *marks, most, nbytes=scores.nbytes + 3 * guard.nbytes)
    table = layer.x(S, D // 2).repeat(1, 2)
    yield case("rotate_rows", f"S={S}", layer.k, table, table, nbytes=2 * layer.k.nbytes)


def of_entering_rows(layer: Layer) -> Iterator[Case]:
    """A chunk and a token, with a head, in 8 bits, and with statistics."""
    at, x, device = layer.at, layer.x, layer.device
    H, D, T, S = at.heads, at.head_size, at.chunk, layer.rows
    flat = (layer.k.reshape(-1, D), layer.v.reshape(-1, D))
    codes = [torch.zeros(H * S, D, dtype=torch.uint8, device=device) for _ in range(2)]
    levels = [x(H * S, D // CHANNELS, dtype=torch.float16) for _ in range(4)]
    kinds_of_rows = (0, flat, None), (0, codes, levels), (2, flat, None)
    for n, (kinds, rows, coded) in ((n, one) for n in (T, 1) for one in kinds_of_rows):
        places = torch.zeros(H * S, dtype=torch.int32, device=device), x(H * S, dtype=torch.float32)
        buffers = RowBuffers(*rows, *places, x(kinds, H * S, dtype=torch.float32), coded)
        new, score = x(n, 2 * H, D).transpose(0, 1), None if kinds else HeadProduct(x(1, n, 1024), x(H, 1024))
        # A token's place is known to the device alone.
        place, seen = (S - n, 10000) if n > 1 else torch.tensor([[S - n], [10000]], device=device)
        written = new.numel() * buffers.keys_ND.element_size() + H * n * 4 * (2 + kinds)
        work = new.nbytes + written + (0 if score is None else sum(one.nbytes for one in score))
        form = f"enter_rows, {kinds} statistics" + ", 8 bits" * (coded is not None)
        yield layer.case(form, f"T={n}", buffers, place, new[:H], new[H:], seen, score, apart=S, nbytes=work,
                         state=buffers[: 5 if kinds else 4])  # fmt: skip


def of_matrices(layer: Layer) -> Iterator[Case]:
    """A backbone's norms, gates and products: those of a chunk, and a token's, which are fused."""
    at, x, case = layer.at, layer.x, layer.case
    Q, H, D, T = at.query_heads, at.heads, at.head_size, at.chunk
    C = Q * D
    wide, weight = x(1, T, C), x(C)
    for form, residual in (("rms_norm", None), ("rms_norm, residual", x(1, T, C))):
        passes = 2 if residual is None else 4
        yield case(form, f"T={T} C={C}", wide, weight, 1e-5, residual, nbytes=passes * wide.nbytes)
    gated = x(1, T, 8 * C)
    yield case("swiglu", f"T={T} C={4 * C}", *gated.chunk(2, -1), nbytes=1.5 * gated.nbytes)

    token, wider = wide[0, :1], (x(4 * C, C), x(4 * C, C))  # a token's vector
    entered = tuple(x(rows, C) for rows in (C, H * D, H * D, 1024))
    for form, stage, residual in (
        ("norm", RowProducts(entered, (None,) * 4, weight, 1e-5), None),
        ("norm, gated", RowProducts(wider, (None,) * 2, weight, 1e-5, gated=True), None),
        ("residual", RowProducts((wider[0].view(C, -1),), (None,)), token),
    ):
        K, nbytes = stage.weights[0].shape[1], sum(one.nbytes for one in stage.weights)
        yield case(f"row_products, {form}", f"K={K}", x(1, K), stage, residual, nbytes=nbytes)

    for form in FORMATS:
        matrix = packed_matrix(C, C, form, layer.device)
        work = 2 * T * C**2
        yield case(f"product {form}", f"T={T} K={C} N={C}", wide, matrix, form, flops=work, nbytes=matrix.nbytes)


def of_a_token(layer: Layer) -> Iterator[Case]:
    """One token's attention over all rows: in full and in few bits, keys turned to their rank or rotated to a place."""
    at, x, device, S = layer.at, layer.x, layer.device, layer.rows
    Q, H, D = at.query_heads, at.heads, at.head_size
    table, one = x(S, D // 2).repeat(1, 2), layer.q[:, :, 0].contiguous()
    lengths = torch.full((1, H), S, dtype=torch.int64, device=device)
    spans = Spans(torch.arange(H, device=device)[None] * S, lengths, S)
    angles = Angles(*[angle_steps(x(D // 2, dtype=torch.float32), S)] * 2)
    placed = Rotation(table, table, torch.arange(S, dtype=torch.int32, device=device).repeat(H))
    flat = (layer.k.reshape(-1, D), layer.v.reshape(-1, D))
    eight, four, two = byte_rows(H, S, D, device), *(packed_rows(H, S, D, bits, device) for bits in (4, 2))
    turned = ((", turned", flat, angles), (" 8 bits, turned", eight, angles), (" 4 bits", four, angles))
    others = (
        ("", flat, None),
        (" 2 bits", two, angles),
        (", keys placed, received", flat, placed),
        (" 4 bits, received", four, placed),
    )
    # One query a head goes by another form of the kernel.
    lone, alone = one[:, :: Q // H].contiguous(), f"S={S}, one query a head"
    for q, size, forms in ((one, f"S={S}", turned + others), (lone, alone, turned if Q > H else ())):
        for form, rows, turn in forms:
            nbytes, received = sum(t.nbytes for t in rows), turn is placed
            call = q, rows, spans, layer.scaling, turn, received
            yield layer.case(f"ragged_decode{form}", size, *call, nbytes=nbytes)


# ---- tensors that are stored in few bits ---------------------------------------------------------------------------


HALVES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
"""Bytes of a block at which a float16 number begins; of other formats the first alone."""


def packed_matrix(
    N: int, K: int, form: str, device: torch.device | str = "cpu", generator: torch.Generator | None = None
) -> torch.Tensor:
    """Random codes of a matrix ``[N, K]`` as they lie in a file, with steps of about 0.001 and numbers of about zero mean."""
    size = FORMATS[form]
    sizes = N, K // size.block
    blocks = torch.randint(0, 256, (*sizes, size.nbytes), dtype=torch.uint8, device=device, generator=generator)
    # The step, then the lowest number (of blocks of 256 the step of those that are taken off).
    middle = (2 ** int(form[1]) - 1) / 2
    scales = 1, middle if size.block == 256 else -middle
    for at, scale in zip(HALVES.get(form, (0,)), scales, strict=False):
        number = 1e-3 * scale * (1 + torch.rand(*sizes, 1, dtype=torch.float32, device=device, generator=generator))
        blocks[..., at : at + 2] = number.half().view(torch.uint8)
    return blocks.flatten(1)


def byte_rows(H: int, S: int, D: int, device: torch.device) -> ByteRows:
    """Random codes in 8 bits, with steps of about 0.01 and numbers of about zero mean."""
    codes = [torch.randint(0, 256, (H * S, D), dtype=torch.uint8, device=device) for _ in range(2)]
    steps = [torch.rand(H * S, D // CHANNELS, dtype=torch.float32, device=device).half() / 64 for _ in range(2)]
    return ByteRows(*codes, steps[0], -128 * steps[0], steps[1], -128 * steps[1])


def packed_rows(H: int, S: int, D: int, bits: int, device: torch.device) -> PackedRows:
    """Random codes and levels as the cache keeps them: the 63 newest rows in full, and 3 key groups per 64 rows."""
    M, tail = max(1, S * 3 // 64), 63

    def levels(*size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Steps and zero points, random, of a shape."""
        step, zero = (make(*size, dtype=torch.float16, device=device) for make in (torch.rand, torch.randn))
        return step / 2**bits, zero

    codes = [torch.randint(0, 256, (H * S, D * bits // 8), dtype=torch.uint8, device=device) for _ in range(2)]
    newest = [torch.randn(H, tail, D, dtype=torch.bfloat16, device=device) for _ in range(2)]
    group = torch.randint(0, M, (H * S,), dtype=torch.int16, device=device)
    tails = torch.full((1, H), tail, dtype=torch.int32, device=device)
    return PackedRows(*codes, group, *levels(H, M, D), *levels(H * S, D // 32), *newest, tails)
