"""Time every operation on the GPU at hand: correctness first, then rows with their provenance.

    python kernels/benchmarks/bench.py --out FILE.csv [--model phi3-mini llama3.1-8b] [--quick]

Run from the repository's root; `scripts/gpu.py` does the same and end to end after it. An operation is timed only after its
kernel agrees with its reference on random inputs of the same shape (`agree`); here one that does not ends the run. Times are of
the device (CUDA events), the L2 cache is flushed between runs, and p20, p50 and p80 are over the repetitions. The card's own
ceilings, a bfloat16 matmul and a copy, come first. On a CPU the references alone are timed, by the clock.
"""

from __future__ import annotations

import argparse
import csv
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from datetime import datetime, timezone
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import triton
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right

from locret_kernels import backend, tiles
from locret_kernels.ragged_decode import PackedRows

ERROR, LARGEST = 1e-2, 0.1
"""Of bfloat16 kernels against float32 references, as shares of the reference's root mean square: the root mean square of
the errors (8 bits of mantissa are 0.2% to 0.3% of it), and the largest one."""


class Disagreement(RuntimeError):
    """A kernel does not equal its reference."""


@dataclass(frozen=True)
class Shape:
    """What a prefill gives the operations."""

    query_heads: int
    heads: int
    """Of keys and values."""
    head_size: int
    budget: int
    chunk: int
    prompt: int = 10240
    """Slots of a training sample, for `column_max`; its last ``answer`` queries are read."""
    answer: int = 256
    hidden: int = 1024
    """Width of a retaining head."""


SHAPES = {"phi3-mini": Shape(32, 32, 96, 6000, 3072), "llama3.1-8b": Shape(32, 8, 128, 16384, 1024)}
"""By recipe (Locret, table 6)."""
TINY = Shape(4, 2, 64, 96, 48, prompt=150, answer=20, hidden=64)
"""For a CPU."""


@dataclass(frozen=True)
class Row:
    """One timing and where it comes from."""

    operation: str
    backend: str
    shape: str
    dtype: str
    p20_ms: float
    p50_ms: float
    p80_ms: float
    tflops: float | None
    """Useful floating-point operations over the median time."""
    gb_s: float | None
    """Bytes that must move over the median time, decimal."""
    peak_mib: float
    """Memory that the call allocated on top of its inputs."""
    device: str
    driver: str
    torch: str
    triton: str
    commit: str
    date: str


@dataclass(frozen=True)
class Case:
    """An operation with its inputs: what to time, what it must equal, and its least work."""

    operation: str
    shape: str
    runs: dict[str, Callable[[], Any]]
    """Backend -> call. The reference is there too: it gates, and it is timed for comparison."""
    flops: float | None = None
    nbytes: float | None = None
    checked: dict[str, Callable[[], Any]] | None = None
    """What the gate compares instead of ``runs``."""
    exact: bool = False
    """Whether floats must be equal bit for bit, too: of what only moves them."""

    @property
    def function(self) -> str:
        """The operation without its form."""
        return self.operation.split()[0].rstrip(",")


def provenance(device: torch.device) -> dict[str, str]:
    """Device, driver, versions, commit (with + where the tree is not clean; LOCRET_COMMIT names it for a tree without git's
    folder) and date."""

    def said(*command: str) -> str:
        try:
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            return "unknown"

    on_gpu = device.type == "cuda"
    driver = (
        said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()[0] if on_gpu else "-"
    )
    dirty = "+" if said("git", "status", "--porcelain", "--untracked-files=no") not in ("", "unknown") else ""
    return {
        "device": torch.cuda.get_device_name(device) if on_gpu else "cpu", "driver": driver,
        "torch": torch.__version__, "triton": triton.__version__,
        "commit": os.environ.get("LOCRET_COMMIT") or said("git", "rev-parse", "--short", "HEAD") + dirty,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
    }  # fmt: skip


def backends(device: torch.device) -> tuple[str, ...]:
    """Those that run on the device."""
    return backend.BACKENDS if device.type == "cuda" or tiles.INTERPRETED else ("reference",)


def ceilings(device: torch.device) -> Iterator[Case]:
    """What the card can do: a large bfloat16 matmul, and a copy of 2 GiB. On a CPU small ones, so that something is there."""
    n, elements = (8192, 2**30) if device.type == "cuda" else (256, 2**20)
    a, b = (torch.randn(n, n, dtype=torch.bfloat16, device=device) for _ in range(2))
    yield Case("matmul", f"{n}x{n}x{n}", {"torch": lambda: a @ b}, flops=2 * n**3)
    x = torch.empty(elements, dtype=torch.bfloat16, device=device)
    y = torch.empty_like(x)
    yield Case("copy", f"{x.nbytes / 2**30:.3g} GiB", {"torch": lambda: y.copy_(x)}, nbytes=2 * x.nbytes)


def cases(name: str, at: Shape, device: torch.device) -> Iterator[Case]:
    """Every operation as a prefill of this model meets it: a full cache and one chunk."""
    Q, H, D, budget, T, P, A = at.query_heads, at.heads, at.head_size, at.budget, at.chunk, at.prompt, at.answer
    S, W, R = budget + T, min(32, T), at.hidden
    shape, scaling = f"{name} Q={Q} H={H} D={D}", D**-0.5

    def x(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(*size, dtype=torch.float32, device=device).to(dtype)

    def both(function: str, *args: Any, **kwargs: Any) -> dict[str, Callable[[], Any]]:
        calls = {key: backend.function(function, key) for key in backends(device)}
        return {key: lambda call=call: call(*args, **kwargs) for key, call in calls.items()}

    q, k, v = x(1, Q, T, D), x(1, H, S, D), x(1, H, S, D)
    seen = T * (S - T) + T * (T + 1) / 2  # pairs of a query and a slot it sees
    runs = both("attend", q, k, v, scaling)
    mask = causal_lower_right(T, S)
    runs["sdpa"] = lambda: F.scaled_dot_product_attention(q, k, v, mask, scale=scaling, enable_gqa=Q > H)
    yield Case("attend", f"{shape} T={T} S={S}", runs, 4 * Q * D * seen)
    lse = backend.function("log_sum_exp", "reference")(q, k, scaling).float()
    for want in (frozenset({"sum"}), frozenset({"sum", "square"})):
        runs = both("column_stats", q, k, scaling, lse, want=want)
        yield Case(f"column_stats {'+'.join(sorted(want))}", f"{shape} T={T} S={S}", runs, 2 * Q * D * seen)
    yield Case("log_sum_exp", f"{shape} T={T} S={S}", both("log_sum_exp", q, k, scaling), 2 * Q * D * seen)
    window = q[:, :, -W:]
    runs = both("window_attention", window, k, scaling)
    yield Case("window_attention", f"{shape} W={W} S={S}", runs, 4 * Q * D * W * S)
    answer, prompt, pos = x(1, Q, A, D), x(1, H, P, D), torch.arange(P - A, P, device=device)
    for log_prob in (False, True):
        runs = both("column_max", answer, prompt, pos, scaling, log_prob=log_prob)
        yield Case(f"column_max log_prob={log_prob}", f"{shape} T={A} S={P}", runs, 2 * Q * D * A * P)
    new_k, new_v, E = x(1, H, T, D), x(1, H, T, D), (Q + 2 * H) * D
    fc1, fc2 = x(R, E) * E**-0.5, x(H, R) * R**-0.5
    runs = both("score_head", q, new_k, new_v, fc1, fc2)

    def with_cublas() -> torch.Tensor:
        rows = torch.cat((q, new_k, new_v), 1).transpose(1, 2).flatten(2)
        return (F.silu(rows @ fc1.T) @ fc2.T).transpose(1, 2).float()

    yield Case("score_head", f"{shape} T={T} R={R}", {**runs, "cublas": with_cublas}, 2 * T * R * (E + H))
    score = x(1, H, S, dtype=torch.float32)
    protected = (torch.arange(S, device=device) >= S - 64).expand_as(score)
    yield Case("select_rows", f"{shape} S={S} keep={budget}", both("select_rows", score, protected, budget))
    yield compaction(f"{shape} S={S} K={budget}", [k.clone(), v.clone(), score], protected, budget, device)
    flat_k, flat_v = (t[0].reshape(-1, D) for t in (k, v))
    starts = torch.arange(H, device=device)[None] * S
    lengths = torch.full((1, H), S, device=device)
    one, table = q[:, :, 0].contiguous(), x(S, D)
    yield Case("rotate_rows", f"{shape} S={S}", both("rotate_rows", k, table, table), nbytes=2 * k.nbytes)
    for tables in ({}, {"cos_SR": table, "sin_SR": table}):
        runs = both("ragged_decode", one, flat_k, flat_v, starts, lengths, scaling, longest=S, **tables)
        rotated = ", keys rotated" if tables else ""
        if not tables:
            runs["sdpa"] = lambda: F.scaled_dot_product_attention(
                one[:, :, None], k, v, scale=scaling, enable_gqa=Q > H
            )
        yield Case(f"ragged_decode{rotated}", f"{shape} S={S}", runs, nbytes=2 * H * S * D * 2)
        for bits in (4, 2):
            rows = packed_rows(H, S, D, bits, device)
            runs = both("packed_decode", one, rows, starts, lengths, scaling, longest=S, **tables)
            moved = sum(t.nbytes for t in rows)
            yield Case(f"packed_decode {bits} bits{rotated}", f"{shape} S={S}", runs, nbytes=moved)


def compaction(
    shape: str, buffers: list[torch.Tensor], protected: torch.Tensor, keep: int, device: torch.device
) -> Case:
    """Moves in place. Each run that is checked begins from the same rows; which rows the buffers hold does not change the
    time, so timed runs go on from the last."""
    index = backend.function("select_rows", "reference")(buffers[-1], protected, keep)
    before = [t.clone() for t in buffers]

    def moved(call: Callable[..., None], restore: bool) -> list[torch.Tensor]:
        for mine, kept in zip(buffers, before, strict=True):
            if restore:
                mine.copy_(kept)
        call(buffers, index)
        return [t[:, :, :keep].clone() if restore else t for t in buffers]

    calls = {key: backend.function("compact_rows", key) for key in backends(device)}
    nbytes = 2 * sum(t[:, :, :keep].nbytes for t in buffers)
    return Case(
        "compact_rows", shape, {key: lambda call=call: moved(call, False) for key, call in calls.items()}, nbytes=nbytes,
        checked={key: lambda call=call: moved(call, True) for key, call in calls.items()}, exact=True,
    )  # fmt: skip


def packed_rows(H: int, S: int, D: int, bits: int, device: torch.device) -> PackedRows:
    """Random codes and levels as the cache keeps them: 63 newest rows in full, half as many key groups again as full ones."""
    M, tail = max(1, S * 3 // 64), 63
    half: dict[str, Any] = dict(dtype=torch.float16, device=device)

    def codes() -> torch.Tensor:
        return torch.randint(0, 256, (H * S, D * bits // 8), dtype=torch.uint8, device=device)

    def newest() -> torch.Tensor:
        return torch.randn(H, tail, D, dtype=torch.bfloat16, device=device)

    group = torch.randint(0, M, (H * S,), dtype=torch.int16, device=device)
    levels = (torch.rand(H, M, D, **half) / 2**bits, torch.randn(H, M, D, **half))
    by_row = (torch.rand(H * S, D // 32, **half) / 2**bits, torch.randn(H * S, D // 32, **half))
    tails = torch.full((1, H), tail, dtype=torch.int32, device=device)
    return PackedRows(codes(), codes(), group, *levels, *by_row, newest(), newest(), tails)


def agree(mine: Any, theirs: Any, what: str, *, exact: bool = False) -> None:
    """Raise Disagreement where a kernel does not equal its reference.

    Integers, booleans and infinities must be equal, floats within ``ERROR`` and ``LARGEST`` of the reference's root mean
    square, or with ``exact`` equal too. Rows that are selected are integers, and may not differ on ties: both backends
    select from the same float32 scores, and of equal ones the newer stays by definition. A selection from scores that two
    backends computed in low precision could differ; none is compared here.
    """
    pairs = zip(mine, theirs, strict=True) if isinstance(theirs, (tuple, list)) else [(mine, theirs)]
    for i, (a, b) in enumerate(pairs):
        if a is None and b is None:
            continue
        if reason := difference(a, b, exact=exact):
            raise Disagreement(f"{what} disagrees with its reference in output {i}: {reason}")


def difference(mine: torch.Tensor | None, theirs: torch.Tensor | None, *, exact: bool = False) -> str | None:
    """In what a result is not its reference; None where it is."""
    if mine is None or theirs is None:
        return f"it is {'there' if theirs is None else 'missing'}"
    if mine.shape != theirs.shape:
        return f"shape {tuple(mine.shape)}, not {tuple(theirs.shape)}"
    if mine.is_floating_point() != theirs.is_floating_point():
        return f"{mine.dtype}, not {theirs.dtype}"
    if exact or not theirs.is_floating_point():
        wrong = int((mine != theirs).sum())
        return f"{wrong} of {theirs.numel()} elements differ" if wrong else None
    a, b = mine.double(), theirs.double()
    finite = b.isfinite()
    if not torch.equal(a.isfinite(), finite) or not torch.equal(a[~finite], b[~finite]):
        return "infinities or NaN elsewhere than in the reference"
    size, errors = b[finite].square().mean().sqrt(), (a - b)[finite]
    for name, error, bound in (
        ("root mean square", errors.square().mean().sqrt(), ERROR), ("largest", errors.abs().amax(), LARGEST),
    ):  # fmt: skip
        if not error <= bound * size:
            return f"its {name} error is {float(error / size):.2g} of the reference's root mean square, above {bound}"
    return None


def gate(case: Case) -> None:
    """Raise Disagreement unless the case's kernel, where it runs, equals its reference."""
    runs = case.checked or case.runs
    if "triton" in runs:
        agree(runs["triton"](), runs["reference"](), f"{case.operation} at {case.shape}", exact=case.exact)


def measure(
    case: Case, run: Callable[[], Any], key: str, milliseconds: int, where: dict[str, str], device: torch.device
) -> Row:
    """Warm up, then p20, p50, p80 over ``milliseconds`` of repetitions."""
    run()
    peak = 0
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        run()
        peak = torch.cuda.max_memory_allocated() - held
        low, middle, high = triton.testing.do_bench(run, warmup=25, rep=milliseconds, quantiles=[0.2, 0.5, 0.8])
    else:
        low, middle, high = clocked(run, milliseconds)
    return Row(
        case.operation, key, case.shape, "bfloat16", low, middle, high,
        case.flops / middle / 1e9 if case.flops else None, case.nbytes / middle / 1e6 if case.nbytes else None,
        peak / 2**20, **where,
    )  # fmt: skip


def clocked(run: Callable[[], Any], milliseconds: int) -> tuple[float, float, float]:
    """p20, p50 and p80 in milliseconds by the host's clock, over at least three runs."""
    took: list[float] = []
    while len(took) < 3 or sum(took) < milliseconds:
        began = time.perf_counter()
        run()
        took.append(1e3 * (time.perf_counter() - began))
    low, middle, high = (
        torch.tensor(took, dtype=torch.float64).quantile(torch.tensor([0.2, 0.5, 0.8]).double()).tolist()
    )
    return low, middle, high


def every(shapes: dict[str, Shape], device: torch.device) -> Iterator[Case]:
    """The card's ceilings, then every operation of every shape."""
    return chain(ceilings(device), *(cases(name, at, device) for name, at in shapes.items()))


def timed(case: Case, milliseconds: int, where: dict[str, str], device: torch.device) -> Iterator[Row]:
    """A row for each backend, behind the gate."""
    gate(case)
    for key, run in case.runs.items():
        yield measure(case, run, key, milliseconds, where, device)


def append(path: Path, row: Any) -> None:
    """Add a row (a dataclass) to a CSV file, which is on disk when this returns. No row joins those of another device.

    Raises:
        ValueError: the file holds other columns, or rows of another device.
    """
    names = [f.name for f in fields(row)]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+", newline="") as file:
        file.seek(0)
        first = next(reader := csv.DictReader(file), None)
        if reader.fieldnames is not None and list(reader.fieldnames) != names:
            raise ValueError(f"{path} has other columns: {', '.join(reader.fieldnames)}")
        if first is not None and first["device"] != row.device:
            raise ValueError(f"{path} holds rows of {first['device']}, not of {row.device}: name another file")
        writer = csv.DictWriter(file, names, lineterminator="\n")
        if reader.fieldnames is None:
            writer.writeheader()
        writer.writerow({k: f"{v:.4g}" if isinstance(v, float) else v for k, v in asdict(row).items()})
        file.flush()
        os.fsync(file.fileno())


def line(row: Row) -> str:
    """A row for people."""
    return f"{row.operation:<32} {row.backend:<10} {row.shape:<48} {row.p50_ms:9.3f} ms"


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--out", type=Path, required=True, help="CSV file; rows are appended")
    p.add_argument("--model", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    p.add_argument("--quick", action="store_true", help="few repetitions: to see that everything runs")
    args = p.parse_args()
    if not torch.cuda.is_available():
        print("bench: PyTorch sees no CUDA device here; nothing is timed on anything else", file=sys.stderr)
        return 1
    torch.manual_seed(0)
    device, milliseconds = torch.device("cuda"), 20 if args.quick else 200
    where = provenance(device)
    try:
        for case in every({name: SHAPES[name] for name in args.model}, device):
            for row in timed(case, milliseconds, where, device):
                append(args.out, row)
                print(line(row), flush=True)
    except Disagreement as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
