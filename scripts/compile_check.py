"""Compile every kernel for cards that are not here, and print what each takes.

    python scripts/compile_check.py [--arch 80 89 90 120] [--head-size 64 96 128 256] [--every N FIRST]
                                               [--kernel NAME ...] [--csv FILE] [--against FILE]

The cases of ``kernel_cases.py`` run on meta tensors. Where a kernel would be launched, Triton compiles it for the same
arguments. A kernel above its card's shared memory fails, and so does one that spills. ``--against`` also fails where a row takes
more shared memory, spills more or takes over 10% more registers than the table's row of the same Triton. A kernel or a Triton
that the table lacks is checked against the card's limits alone; a line reports such a Triton. ``--csv`` replaces the rows of
this Triton in the table, or those of ``--kernel``.
"""

from __future__ import annotations

import argparse
import csv
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import mangle_type

from locret_kernels import common

sys.path.append(str(Path(__file__).parent))
from kernel_cases import Shape, cases

LIMIT_KIB = {80: 163, 86: 99, 89: 99, 90: 227, 120: 99}
"""Shared memory that one program may take, by compute capability (CUDA C++ Programming Guide, table of capabilities)."""
REGISTERS = 1.1
"""Bound on a kernel's registers, as a multiple of the table's: a compiler's choice varies, a rewrite's cost shows."""


class Row(NamedTuple):
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
    def key(self) -> tuple[str, str, int, int, str]:
        """Name of the launch on a card."""
        return self[:5]


class Launch(NamedTuple):
    """A kernel and the arguments of a launch."""

    kernel: triton.runtime.JITFunction[object]
    args: tuple[torch.Tensor, ...]
    """The first one is a tensor, others may be numbers."""
    options: dict[str, int]
    """Constants, warps and stages."""

    def on(self, arch: int) -> dict[str, int]:
        """Options on a card, which has programmatic dependent launches or not."""
        return {name: arch >= 90 if name == "PDL" else value for name, value in self.options.items()}

    def row(self, arch: int, D: int) -> Row:
        """Name of the launch; nothing is compiled yet."""
        shown = {name: value for name, value in self.on(arch).items() if name not in ("D0", "D1", "G")}
        options = " ".join(f"{name.removeprefix('num_')}={int(value)}" for name, value in shown.items())
        if not self.args[0].is_floating_point():
            options += f" {mangle_type(self.args[0])[1:]}"  # bits are copied as integers of several sizes
        return Row(self.kernel.__name__.strip("_"), options, arch, D, "bf16", 0, 0, 0)

    def compiled(self, arch: int) -> tuple[int, int, int]:
        """Shared memory, registers and stack (bytes), compiled by Triton as a call on that card would be."""
        card = mock.Mock()  # Triton keeps compiled kernels by device
        card.get_current_device.return_value = arch
        card.get_current_target.return_value = GPUTarget("cuda", arch, 32)
        triton.runtime.driver.set_active(card)
        made = self.kernel.warmup(*self.args, grid=(), **self.on(arch), **common.OPTIONS)
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(made.asm["cubin"])
            file.flush()
            command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
            said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        registers, stack = (int(re.findall(rf"{word}:(\d+)", said)[0]) for word in ("REG", "STACK"))
        return made.metadata.shared, registers, stack


def launches(D: int) -> list[Launch]:
    """Every launch of every case, as in a prefill of 8 of 32 heads (chunk 1024 over 17,408 slots)."""
    made: list[Launch] = []

    def record(kernel: triton.runtime.JITFunction[object], grid: object, *args: torch.Tensor, **options: int) -> None:
        made.append(Launch(kernel, args, options))

    with mock.patch.object(common, "launch", record):
        for case in cases("", Shape(32, 8, D, 16384, 1024), torch.device("meta")):
            if "triton" in case.runs:
                case.runs["triton"]()
    return made


def table(
    archs: list[int], head_sizes: list[int], every: int = 1, start: int = 0, kernels: Sequence[str] = ()
) -> list[Row]:
    """Every launch, compiled, or those of some ``kernels``; or each ``every``-th one from ``start`` on."""
    first, rows = dict[Row, Launch](), []
    for D in head_sizes:
        for launch in launches(D):
            for row in (launch.row(arch, D) for arch in archs):
                if not kernels or row.kernel in kernels:
                    first.setdefault(row, launch)
    for row, launch in [*first.items()][start::every]:
        rows.append(Row(*row.key, *launch.compiled(row.arch)))
        print(*rows[-1], sep="\t", flush=True)
    return rows


def problems(rows: list[Row], committed: list[Row]) -> list[str]:
    """One line per row above its card's limit, with spills, or worse than the committed one of the same Triton."""
    found = []
    before = {row.key: row for row in committed if row.triton == triton.__version__}
    for row in rows:
        old, limit = before.get(row.key, row._replace(stack_bytes=0)), LIMIT_KIB[row.arch]
        known = row.key in before or row.kernel not in {key[0] for key in before}
        larger, more = row.shared_bytes > old.shared_bytes, row.registers > REGISTERS * old.registers
        wrong = {
            f"{row.shared_bytes} bytes of shared memory, above {limit} KiB": row.shared_bytes > limit * 1024,
            f"{row.stack_bytes} bytes of stack a thread: registers spill": row.stack_bytes > old.stack_bytes,
            f"shared memory grew from {old.shared_bytes} to {row.shared_bytes} bytes": larger,
            f"registers grew from {old.registers} to {row.registers}, by over 10%": more,
            "not in the committed table": not known,
        }
        name = f"{row.kernel} ({row.options}) sm_{row.arch} head size {row.head_size} {row.dtype}"
        found += [f"{name}: {said}" for said, is_so in wrong.items() if is_so]
    return found


def read(path: Path) -> list[Row]:
    """Rows of a table on disk."""
    with path.open(newline="") as file:
        return [Row(*(int(x) if x.isdecimal() else x for x in line)) for line in [*csv.reader(file)][1:]]


def write(path: Path, rows: list[Row]) -> None:
    """Write the table, sorted, so that a change is a small difference. Rows of other Tritons and kernels stay."""
    anew = {(row.kernel, row.triton) for row in rows}
    there = [row for row in read(path) if (row.kernel, row.triton) not in anew] if path.exists() else []
    with path.open("w", newline="") as file:
        every = sorted([*there, *rows], key=lambda row: (row.triton, row.key))
        csv.writer(file, lineterminator="\n").writerows([Row._fields, *every])


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--arch", type=int, nargs="+", default=[80, 89, 90, 120], choices=sorted(LIMIT_KIB))
    p.add_argument("--head-size", type=int, nargs="+", default=list(common.HEAD_SIZES), choices=list(common.HEAD_SIZES))
    p.add_argument(
        "--every",
        type=int,
        nargs=2,
        default=(1, 0),
        metavar=("N", "FIRST"),
        help="compile each N-th launch only, from one on",
    )
    p.add_argument("--kernel", nargs="+", default=[], metavar="NAME", help="these kernels only")
    p.add_argument("--csv", type=Path, help="write the table")
    p.add_argument("--against", type=Path, help="a committed table that no row may be worse than")
    args = p.parse_args(argv)
    if common.INTERPRETED:
        raise SystemExit("compile_check: TRITON_INTERPRET is set, so nothing would be compiled")
    rows = table(args.arch, args.head_size, *args.every, args.kernel)
    if args.csv:
        write(args.csv, rows)
    committed = read(args.against) if args.against else []
    found = problems(rows, committed)
    if args.against and triton.__version__ not in {row.triton for row in committed}:
        known = ", ".join(sorted({row.triton for row in committed}))
        print(f"{args.against.name} has triton {known}: of {triton.__version__} only limits are checked")
    print("\n".join([*found, f"{len(rows)} compilations, {len(found)} problems (triton {triton.__version__})"]))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
