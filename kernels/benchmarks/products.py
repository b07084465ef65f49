"""Time packed products on a CPU against the memory's bandwidth and the processor's integer products, all measured in one run.

    python kernels/benchmarks/products.py --out FILE.csv [--rounds 5]

One token is timed over more copies of a matrix than a cache holds, as a decoder reads its layers one after another; a chunk of
512 over one matrix. Everything is timed by turns, and the best of all rounds counts: other work only makes it slower.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from bench import append
from torch import Tensor

from locret_kernels import cpp
from locret_kernels.cases import packed_matrix
from locret_kernels.product import cpu
from locret_kernels.provenance import origin

FORMS = ("Q4_0", "Q8_0", "Q4_K", "Q6_K")
SHAPES = ((4096, 4096), (576, 1536))
"""Rows and columns; the second is of SmolLM2-135M."""
CHUNK = 512
BUFFER = 256 << 20
"""Bytes that no cache holds."""
PEAK_ROUNDS = 400_000


class Key(NamedTuple):
    """A measurement; a ceiling has a name and threads alone."""

    form: str
    rows: int = 0
    columns: int = 0
    tokens: int = 0
    threads: int = 1


@dataclass(frozen=True)
class Row:
    """One product and its share of the ceiling that bounds it."""

    form: str
    rows: int
    columns: int
    tokens: int
    threads: int
    microseconds: float
    gb_s: float
    """Bytes of the matrix, in 10^9 a second."""
    gop_s: float
    """Products and sums."""
    ceiling: str
    """``memory``: reading a large buffer; ``integers``: products of bytes in registers. By as many threads."""
    ceiling_value: float
    share: float
    device: str
    driver: str
    torch: str
    triton: str
    commit: str
    date: str


def ceilings() -> ctypes.CDLL:
    """The compiled ceilings.

    Raises:
        cpp.Unavailable: no compiler, or one that fails.
    """
    loaded = cpp.load(Path(__file__).with_name("ceilings.cpp"))
    loaded.locret_integer_peak.argtypes = [ctypes.c_int64, ctypes.c_int]
    loaded.locret_read_rate.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int]
    loaded.locret_integer_peak.restype = loaded.locret_read_rate.restype = ctypes.c_double
    return loaded


def per_second(x: Tensor, matrices: list[Tensor], form: str) -> float:
    """Products per second of activations with one matrix after another."""
    began = time.perf_counter()
    for matrix in matrices:
        cpu.product(x, matrix, form)
    return len(matrices) / (time.perf_counter() - began)


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--out", type=Path, required=True, help="CSV file; rows are appended")
    p.add_argument("--rounds", type=int, default=5)
    args = p.parse_args()
    torch.manual_seed(0)
    limits, buffer = ceilings(), torch.ones(BUFFER, dtype=torch.uint8)
    threads = sorted({1, torch.get_num_threads()})
    runs: dict[Key, Callable[[], float]] = {}
    nbytes: dict[Key, int] = {}
    for count in threads:
        runs[Key("integers", threads=count)] = partial(limits.locret_integer_peak, PEAK_ROUNDS, count)
        runs[Key("memory", threads=count)] = partial(limits.locret_read_rate, buffer.data_ptr(), BUFFER, count)
    for form in FORMS:
        for N, K in SHAPES:
            one = packed_matrix(N, K, form)
            many = one.repeat(max(1, BUFFER // 4 // one.nbytes), 1).split(N)
            for tokens, matrices in ((1, list(many)), (CHUNK, [one])):
                for count in threads:
                    key = Key(form, N, K, tokens, count)
                    nbytes[key] = one.nbytes
                    runs[key] = partial(per_second, torch.randn(tokens, K), matrices, form)
    best = dict.fromkeys(runs, 0.0)
    for _ in range(args.rounds):
        for key, run in runs.items():
            torch.set_num_threads(key.threads)
            best[key] = max(best[key], run())
    for key, size in nbytes.items():
        bandwidth, work = best[key] * size, best[key] * 2 * key.tokens * key.rows * key.columns
        name, value = ("memory", bandwidth) if key.tokens == 1 else ("integers", work)
        ceiling = best[Key(name, threads=key.threads)]
        row = Row(
            *key, 1e6 / best[key], bandwidth / 1e9, work / 1e9, name, ceiling / 1e9, value / ceiling,
            **origin(torch.device("cpu")),
        )  # fmt: skip
        append(args.out, row)
        print(
            f"{key.form} {key.rows}x{key.columns} tokens={key.tokens:<4} threads={key.threads} {row.gb_s:6.1f} GB/s "
            f"{row.gop_s:6.0f} Gop/s {row.share:.2f} of {name}",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
