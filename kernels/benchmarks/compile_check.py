"""Compile every kernel for cards that are not here, and print what each takes.

    python kernels/benchmarks/compile_check.py [--arch 80 89 90] [--head-size 64 96 128 256] [--every N] [--csv FILE]
                                               [--against FILE]

The wrappers run on meta tensors of real sizes; where they would launch, the kernel is compiled with the same arguments,
their types and their divisibility. A kernel above its card's shared memory fails, and so does one that spills.
``--against`` fails where a row takes more shared memory, spills more or takes over 10% more registers than the table's row
of the same Triton. Of a Triton that the table has not, a card's limits and spills are checked, and a line says so. ``--csv``
into the table puts the rows of this Triton in the place of its former ones.
"""

from __future__ import annotations

import argparse
import csv
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from locret_kernels import backend, tiles
from locret_kernels.ragged_decode import PackedRows

LIMIT_KIB = {80: 163, 86: 99, 89: 99, 90: 227}
"""Shared memory that one program may take, by compute capability (CUDA C++ Programming Guide, table of capabilities)."""
REGISTERS = 1.1
"""A kernel may take so many times the registers of the table: a compiler's choice varies, a rewrite's cost shows."""
TYPES = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int8: "i8", torch.int16: "i16",
    torch.int32: "i32", torch.int64: "i64", torch.uint8: "u8",
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One kernel on one architecture."""

    kernel: str
    options: str
    arch: int
    head_size: int
    dtype: str
    shared_bytes: int
    registers: int
    stack_bytes: int
    """Of one thread; above 0 where registers spill."""
    triton: str = triton.__version__

    @property
    def key(self) -> tuple:
        return self.kernel, self.options, self.arch, self.head_size, self.dtype


def calls(D: int, dtype: torch.dtype) -> Iterator[Callable[[], Any]]:
    """Every wrapper at sizes as in a prefill (chunk 1024 over 17,408 slots, 8 of 32 heads), on the meta device."""

    def x(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    B, Q, H, T, S = 1, 32, 8, 1024, 17408
    q, k, lse = x(B, Q, T, D), x(B, H, S, D), x(B, Q, T, dtype=torch.float32)
    pos, long = x(T, dtype=torch.int64), dict(dtype=torch.int64)
    f = {name: backend.function(name, "triton") for name in backend.FUNCTIONS}
    for want in ({"sum"}, {"sum", "square"}, {"above"}, {"sum", "square", "above", "last"}):
        yield lambda want=frozenset(want): f["column_stats"](q, k, 0.1, lse, want=want)
    yield lambda: f["log_sum_exp"](q, k, 0.1)
    yield lambda: f["column_max"](q, k, pos, 0.1)
    yield lambda: f["column_max"](q, k, pos, 0.1, log_prob=True)
    yield lambda: f["attend"](q, k, k, 0.1)
    yield lambda: f["attend"](q[:, :, :16], k, k, 0.1)
    kv = x(B, H, T, D)
    yield lambda: f["score_head"](q, kv, kv, x(1024, (Q + 2 * H) * D), x(H, 1024))
    yield lambda: f["score_head"](q, kv, kv, x(1024, (Q + 2 * H) * D), x(H, 1024), activation="gelu_pytorch_tanh")
    yield lambda: f["select_rows"](x(B, H, S, dtype=torch.float32), x(B, H, S, dtype=torch.bool), 16384)
    yield lambda: f["compact_rows"]([k, x(B, H, S, dtype=torch.float32)], x(B, H, 16384, **long))
    flat, heads, table = x(H * S, D), x(B, H, **long), x(S, D)
    by_rank = dict(cos_SR=table, sin_SR=table)
    by_place = dict(**by_rank, place_N=x(H * S, dtype=torch.int32))
    yield lambda: f["rotate_rows"](k, table, table)
    forms = ({}, by_rank, dict(**by_place, received=True))
    for form in forms:
        yield lambda form=form: f["ragged_decode"](x(B, Q, D), flat, flat, heads, heads, 0.1, longest=S, **form)
    for bits in (4, 2):
        codes, half, M = x(H * S, D * bits // 8, dtype=torch.uint8), dict(dtype=torch.float16), S * 3 // 64
        group, levels, by_row = x(H * S, dtype=torch.int16), x(H, M, D, **half), x(H * S, D // 32, **half)
        tail, tails = x(H, 63, D), x(B, H, dtype=torch.int32)
        packed = PackedRows(codes, codes, group, levels, levels, by_row, by_row, tail, tail, tails)
        for form in forms:
            yield lambda packed=packed, form=form: f["packed_decode"](
                x(B, Q, D), packed, heads, heads, 0.1, longest=S, **form
            )


def compile_launch(
    kernel: Any, arch: int, args: tuple[Any, ...], constants: dict[str, Any], num_warps: int, num_stages: int
) -> tuple[int, int, int]:
    """Shared memory, registers and stack (bytes) of one launch, compiled as a call with these arguments would be."""
    signature, constexprs, attributes = {}, dict(constants), {}
    for i, (name, value) in enumerate(zip(kernel.arg_names[: len(args)], args, strict=True)):
        if isinstance(value, torch.Tensor):
            signature[name] = f"*{TYPES[value.dtype]}"
            attributes[(i,)] = [["tt.divisibility", 16]]  # as PyTorch allocates
        elif isinstance(value, float):
            signature[name] = "fp32"
        elif value == 1:
            signature[name], constexprs[name] = "constexpr", 1
        else:
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0:
                attributes[(i,)] = [["tt.divisibility", 16]]
    signature |= dict.fromkeys(constants, "constexpr")
    signature = {name: signature[name] for name in kernel.arg_names}
    source = ASTSource(kernel, signature, constexprs, attributes)
    options = {"num_warps": num_warps, "num_stages": num_stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        said = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack = (int(re.search(rf"{word}:(\d+)", said)[1]) for word in ("REG", "STACK"))  # type: ignore[index]
    return compiled.metadata.shared, registers, stack


def table(archs: list[int], head_sizes: list[int], dtypes: list[torch.dtype], every: int = 1) -> list[Row]:
    """Every launch of every wrapper, compiled; or each ``every``-th of them, which go round cards and kernels where
    ``every`` has no factor in common with the number of cards."""
    rows: dict[tuple, Row | None] = {}
    real = tiles.launch

    for D in head_sizes:
        for dtype in dtypes:

            def record(kernel: Any, grid: Any, *args: Any, num_warps: int, num_stages: int, **constants: Any) -> None:
                shown = {k: v for k, v in constants.items() if k not in ("D0", "D1", "UPCAST", "G")}
                options = " ".join(
                    f"{k}={int(v)}" for k, v in {**shown, "warps": num_warps, "stages": num_stages}.items()
                )
                if kernel.__name__ == "_compact_rows":
                    options += f" {TYPES[args[0].dtype]}"
                for arch in archs:
                    row = Row(kernel.__name__.strip("_"), options, arch, D, TYPES[dtype], 0, 0, 0)  # noqa: B023
                    if row.key in rows:
                        continue
                    rows[row.key] = None
                    if len(rows) % every == 0:
                        taken = compile_launch(kernel, arch, args, constants, num_warps, num_stages)
                        rows[row.key] = Row(*row.key, *taken)
                        print(*row.key, *taken, sep="\t", flush=True)

            tiles.launch = record
            try:
                for call in calls(D, dtype):
                    call()
            finally:
                tiles.launch = real
    return [row for row in rows.values() if row is not None]


def problems(rows: list[Row], committed: list[Row]) -> list[str]:
    """One line for each row above its card's limit, with spills, or worse than the committed one of the same Triton."""
    found = []
    before = {row.key: row for row in committed if row.triton == triton.__version__}
    for row in rows:
        name = f"{row.kernel} ({row.options}) sm_{row.arch} head size {row.head_size} {row.dtype}"
        if row.shared_bytes > LIMIT_KIB[row.arch] * 1024:
            found.append(f"{name}: {row.shared_bytes} bytes of shared memory, above {LIMIT_KIB[row.arch]} KiB")
        old = before.get(row.key)
        if row.stack_bytes > (old.stack_bytes if old else 0):
            found.append(f"{name}: {row.stack_bytes} bytes of stack a thread: registers spill")
        if old and row.shared_bytes > old.shared_bytes:
            found.append(f"{name}: shared memory grew from {old.shared_bytes} to {row.shared_bytes} bytes")
        if old and row.registers > REGISTERS * old.registers:
            found.append(f"{name}: registers grew from {old.registers} to {row.registers}, by over 10%")
        if before and old is None:
            found.append(f"{name}: not in the committed table")
    return found


def read(path: Path) -> list[Row]:
    """Rows of a table on disk."""
    with path.open(newline="") as file:
        return [
            Row(*(int(row[f.name]) if f.type == "int" else row[f.name] for f in fields(Row)))
            for row in csv.DictReader(file)
        ]


def write(path: Path, rows: list[Row]) -> None:
    """Sorted, so that a change is a small difference; rows of other Tritons that are there stay."""
    there = [row for row in read(path) if row.triton != triton.__version__] if path.exists() else []
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [f.name for f in fields(Row)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(row) for row in sorted([*there, *rows], key=lambda row: (row.triton, row.key)))


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--arch", type=int, nargs="+", default=[80, 89, 90], choices=sorted(LIMIT_KIB))
    p.add_argument("--head-size", type=int, nargs="+", default=list(tiles.HEAD_SIZES), choices=list(tiles.HEAD_SIZES))
    p.add_argument("--dtype", nargs="+", default=["bfloat16"], choices=tiles.DTYPES)
    p.add_argument("--every", type=int, default=1, metavar="N", help="compile each N-th launch only")
    p.add_argument("--csv", type=Path, help="write the table")
    p.add_argument("--against", type=Path, help="a committed table that no row may be worse than")
    args = p.parse_args()
    if tiles.INTERPRETED:
        raise SystemExit("compile_check: TRITON_INTERPRET is set, so nothing would be compiled")
    rows = table(args.arch, args.head_size, [getattr(torch, name) for name in args.dtype], args.every)
    if args.csv:
        write(args.csv, rows)
    committed = read(args.against) if args.against else []
    found = problems(rows, committed)
    if args.against and triton.__version__ not in (known := {row.triton for row in committed}):
        print(
            f"{args.against.name} has triton {', '.join(sorted(known))}: of {triton.__version__} only limits are checked"
        )
    print("\n".join([*found, f"{len(rows)} compilations, {len(found)} problems (triton {triton.__version__})"]))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
