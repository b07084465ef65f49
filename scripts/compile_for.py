"""Compile the kernels of a model for a card that is not here, into Triton's cache, which then travels to it.

    TRITON_CACHE_DIR=.triton python scripts/compile_for.py [--arch 90] [--model phi3-mini llama3.1-8b]

Launches are those of a chunk and a decoded token of the model, and of ``kernel_cases.py`` at its heads, on the meta device. A
launch on the card finds its kernel where Triton has the same release, and its arguments have the same types and divisors.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget

from locret_kernels import common

sys.path.append(str(Path(__file__).parent))
import bench
import launches
from kernel_cases import cases

Launch = tuple[triton.runtime.JITFunction[object], tuple[object, ...], dict[str, object]]
"""Kernel, arguments and constants."""


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Launches within the block."""
    made: list[Launch] = []
    counted = launches.Recorder.launch

    def record(kernel: triton.runtime.JITFunction[object], grid: object, *args: object, **constants: object) -> None:
        made.append((kernel, args, constants))

    def both(recorder: launches.Recorder, kernel: object, grid: object, *args: object, **constants: object) -> None:
        record(kernel, grid, *args, **constants)
        counted(recorder, kernel, grid, *args, **constants)

    with mock.patch.object(common, "launch", record), mock.patch.object(launches.Recorder, "launch", both):
        yield made


def launches_of(model: str) -> list[Launch]:
    """Every launch of a recipe's chunk over a full cache and of a token, and of every operation at its heads."""
    with recorded() as made:
        launches.record(*launches.setting_of(model))
        for case in cases(model, bench.SHAPES[model], torch.device("meta")):
            if "triton" in case.runs:
                case.runs["triton"]()
    return made


def compile_for(arch: int, made: Sequence[Launch]) -> int:
    """Compile launches as a call on a card of compute capability ``arch`` (90 is 9.0) would; the number of different kernels."""
    card = mock.Mock()
    card.get_current_device.return_value = arch
    card.get_current_target.return_value = GPUTarget("cuda", arch, 32)
    triton.runtime.driver.set_active(card)
    hashes = set()
    for kernel, args, constants in made:
        pdl = {"PDL": arch >= 90} if "PDL" in constants else {}
        options = {**constants, **pdl, **common.OPTIONS, **({"launch_pdl": True} if pdl.get("PDL") else {})}
        hashes.add(kernel.warmup(*args, grid=(), **options).hash)
    return len(hashes)


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--arch", type=int, default=90, help="compute capability, 90 for 9.0 (default: an H100's or H200's)")
    p.add_argument("--model", nargs="+", default=list(bench.SHAPES), choices=list(bench.SHAPES))
    args = p.parse_args(argv)
    if common.INTERPRETED or "TRITON_CACHE_DIR" not in os.environ:
        print("compile_for: set TRITON_CACHE_DIR to the folder that travels, and not TRITON_INTERPRET", file=sys.stderr)
        return 1
    for name in args.model:
        print(
            f"{name}: {compile_for(args.arch, launches_of(name))} kernels for sm_{args.arch}, triton {triton.__version__}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
