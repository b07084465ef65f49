"""Time every operation on the GPU at hand: correctness first, then rows with their provenance.

    python kernels/benchmarks/bench.py --out FILE.csv [--model phi3-mini llama3.1-8b] [--quick]

Run from the repository's root. An operation is timed only after its kernel agrees with its reference on random inputs of the
same shape; one that does not agree ends the run. Times are of the device (CUDA events), the L2 cache is flushed between runs,
and p20, p50 and p80 are over the repetitions. The card's own ceilings, a bfloat16 matmul and a copy, come first.
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import triton
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right

from locret_kernels import backend
from locret_kernels.ragged_decode import PackedRows

SHAPES = {"phi3-mini": (32, 32, 96, 6000, 3072), "llama3.1-8b": (32, 8, 128, 16384, 1024)}
"""Recipe -> query heads, key/value heads, head size, budget, chunk (Locret, table 6)."""
TOLERANCE = dict(rtol=2e-2, atol=2e-2)
"""Of bfloat16 kernels against float32 references: weights of a few per mille of rows, and 8 bits of mantissa."""


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


def provenance() -> dict[str, str]:
    """Device, driver, versions, commit (with + where the tree is not clean) and date."""

    def said(*command: str) -> str:
        try:
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            return "unknown"

    driver = said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()[0]
    dirty = "+" if said("git", "status", "--porcelain", "--untracked-files=no") not in ("", "unknown") else ""
    return {
        "device": torch.cuda.get_device_name(), "driver": driver, "torch": torch.__version__, "triton": triton.__version__,
        "commit": said("git", "rev-parse", "--short", "HEAD") + dirty,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
    }  # fmt: skip


def ceilings() -> Iterator[Case]:
    """What the card can do: a large bfloat16 matmul, and a copy of 2 GiB."""
    n = 8192
    a, b = (torch.randn(n, n, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    yield Case("matmul", f"{n}x{n}x{n}", {"torch": lambda: a @ b}, flops=2 * n**3)
    x = torch.empty(2**30, dtype=torch.bfloat16, device="cuda")
    y = torch.empty_like(x)
    yield Case("copy", "2 GiB", {"torch": lambda: y.copy_(x)}, nbytes=2 * x.nbytes)


def cases(name: str) -> Iterator[Case]:
    """Every operation as a prefill of this model meets it: a full cache and one chunk."""
    Q, H, D, budget, chunk = SHAPES[name]
    S, T, W, A, R = budget + chunk, chunk, 32, 256, 1024
    shape, scaling = f"{name} Q={Q} H={H} D={D}", D**-0.5

    def x(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(*size, dtype=torch.float32, device="cuda").to(dtype)

    def both(function: str, *args: Any, **kwargs: Any) -> dict[str, Callable[[], Any]]:
        calls = {key: backend.function(function, key) for key in backend.BACKENDS}
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
    yield Case(
        "window_attention", f"{shape} W={W} S={S}", both("window_attention", window, k, scaling), 4 * Q * D * W * S
    )
    answer, prompt = q[:, :, -A:], x(1, H, 10240, D)
    pos = torch.arange(10240 - A, 10240, device="cuda")
    for log_prob in (False, True):
        runs = both("column_max", answer, prompt, pos, scaling, log_prob=log_prob)
        yield Case(f"column_max log_prob={log_prob}", f"{shape} T={A} S=10240", runs, 2 * Q * D * A * 10240)
    new_k, new_v, E = x(1, H, T, D), x(1, H, T, D), (Q + 2 * H) * D
    fc1, fc2 = x(R, E) * E**-0.5, x(H, R) * R**-0.5
    runs = both("score_head", q, new_k, new_v, fc1, fc2)

    def with_cublas() -> torch.Tensor:
        rows = torch.cat((q, new_k, new_v), 1).transpose(1, 2).flatten(2)
        return (F.silu(rows @ fc1.T) @ fc2.T).transpose(1, 2).float()

    yield Case("score_head", f"{shape} T={T} R={R}", {**runs, "cublas": with_cublas}, 2 * T * R * (E + H))
    score = x(1, H, S, dtype=torch.float32)
    protected = (torch.arange(S, device="cuda") >= S - 64).expand_as(score)
    yield Case("select_rows", f"{shape} S={S} keep={budget}", both("select_rows", score, protected, budget))
    index = backend.function("select_rows", "reference")(score, protected, budget)
    before = [t.clone() for t in (k, v, score)]

    def compact(call: Callable[..., None]) -> list[torch.Tensor]:
        call([k, v, score], index)
        return [t[:, :, :budget] for t in (k, v, score)]

    def gate(call: Callable[..., None]) -> list[torch.Tensor]:
        for mine, kept in zip((k, v, score), before, strict=True):
            mine.copy_(kept)
        return [t.clone() for t in compact(call)]

    # Rows move wherever the index says; which rows they hold does not change the time, so only the gate restores them.
    checked = {key: gate(backend.function("compact_rows", key)) for key in backend.BACKENDS}
    agree(checked["triton"], checked["reference"], "compact_rows")
    movers = {key: (lambda key=key: compact(backend.function("compact_rows", key))) for key in backend.BACKENDS}
    yield Case("compact_rows", f"{shape} S={S} K={budget}", movers, nbytes=4 * H * budget * D * 2)
    flat_k, flat_v = (t[0].reshape(-1, D) for t in (x(1, H, S, D), x(1, H, S, D)))
    starts = torch.arange(H, device="cuda")[None] * S
    lengths = torch.full((1, H), S, device="cuda")
    one, table = q[:, :, 0].contiguous(), x(S, D)
    for tables in ({}, {"cos_SR": table, "sin_SR": table}):
        runs = both("ragged_decode", one, flat_k, flat_v, starts, lengths, scaling, longest=S, **tables)
        runs["sdpa"] = lambda: F.scaled_dot_product_attention(one[:, :, None], k, v, scale=scaling, enable_gqa=Q > H)
        rotated = ", keys rotated" if tables else ""
        yield Case(f"ragged_decode{rotated}", f"{shape} S={S}", runs, nbytes=2 * H * S * D * 2)
        for bits in (4, 2):
            rows = packed_rows(H, S, D, bits)
            runs = both("packed_decode", one, rows, starts, lengths, scaling, longest=S, **tables)
            yield Case(
                f"packed_decode {bits} bits{rotated}", f"{shape} S={S}", runs, nbytes=sum(t.nbytes for t in rows)
            )


def packed_rows(H: int, S: int, D: int, bits: int) -> PackedRows:
    """Random codes and levels as the cache keeps them: 63 newest rows in full, half as many key groups again as full ones."""
    M, tail, half = S * 3 // 64, 63, dict(dtype=torch.float16, device="cuda")

    def codes() -> torch.Tensor:
        return torch.randint(0, 256, (H * S, D * bits // 8), dtype=torch.uint8, device="cuda")

    def newest() -> torch.Tensor:
        return torch.randn(H, tail, D, dtype=torch.bfloat16, device="cuda")

    group = torch.randint(0, M, (H * S,), dtype=torch.int16, device="cuda")
    levels = (torch.rand(H, M, D, **half) / 2**bits, torch.randn(H, M, D, **half))
    by_row = (torch.rand(H * S, D // 32, **half) / 2**bits, torch.randn(H * S, D // 32, **half))
    tails = torch.full((1, H), tail, dtype=torch.int32, device="cuda")
    return PackedRows(codes(), codes(), group, *levels, *by_row, newest(), newest(), tails)


def agree(mine: Any, theirs: Any, what: str) -> None:
    """End the run where a kernel does not equal its reference."""
    pairs = zip(mine, theirs, strict=True) if isinstance(mine, (tuple, list)) else [(mine, theirs)]
    for a, b in pairs:
        if a is None and b is None:
            continue
        try:
            torch.testing.assert_close(a.float(), b.float(), **TOLERANCE)
        except AssertionError as error:
            raise SystemExit(f"bench: {what} disagrees with its reference, nothing was timed: {error}") from error


def measure(case: Case, run: Callable[[], Any], key: str, milliseconds: int, where: dict[str, str]) -> Row:
    """Warm up, then p20, p50, p80 over ``milliseconds`` of repetitions."""
    run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    run()
    peak = torch.cuda.max_memory_allocated() - held
    low, middle, high = triton.testing.do_bench(run, warmup=25, rep=milliseconds, quantiles=[0.2, 0.5, 0.8])
    return Row(
        case.operation, key, case.shape, "bfloat16", low, middle, high,
        case.flops / middle / 1e9 if case.flops else None, case.nbytes / middle / 1e6 if case.nbytes else None,
        peak / 2**20, **where,
    )  # fmt: skip


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
    where, milliseconds = provenance(), 20 if args.quick else 200
    new = not args.out.exists()
    with args.out.open("a", newline="") as file:
        writer = csv.DictWriter(file, [f.name for f in fields(Row)], lineterminator="\n")
        if new:
            writer.writeheader()
        for case in (*ceilings(), *(case for name in args.model for case in cases(name))):
            if "triton" in case.runs and case.operation != "compact_rows":
                agree(case.runs["triton"](), case.runs["reference"](), case.operation)
            for key, run in case.runs.items():
                row = measure(case, run, key, milliseconds, where)
                writer.writerow({k: f"{v:.4g}" if isinstance(v, float) else v for k, v in asdict(row).items()})
                file.flush()
                print(f"{row.operation:<32} {row.backend:<10} {row.shape:<48} {row.p50_ms:9.3f} ms", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
