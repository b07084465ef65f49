"""Programs of a decoded token's launches run at once on a card, by the registers of the committed table. The numbers of a card
are NVIDIA's (CUDA C++ Programming Guide, technical specifications)."""

import re
from math import ceil, prod
from unittest import mock

import pytest
import torch
from interpreted import KERNELS, common, random
from scripts_loaded import ROOT, load_script

from locret_kernels.ragged_decode import Spans
from locret_kernels.rows import HeadProduct, RowBuffers

check = load_script("scripts/compile_check.py")
TABLE = check.read(ROOT / "kernels" / "benchmarks" / "compile_table.csv")
MULTIPROCESSORS, REGISTERS = 132, 65536


def recorded(call) -> list[tuple[tuple[int, ...], object]]:
    """Grid and launch of each kernel of a call."""
    made = []

    def record(kernel, grid, *args, **options):
        made.append((grid, check.Launch(kernel, args, options)))

    with mock.patch.object(common, "launch", record):
        call()
    return made


def plain(row) -> str:
    """Options but for the parts that are joined at once, which are more than a recipe has in the table's cases."""
    return re.sub(" JOIN=[0-9]+", "", row.options)


def at_once(launch, D: int) -> list[int]:
    """Programs of a launch that fit a card at once, with each Triton of the table."""
    name, warps = launch.row(90, D), launch.options["num_warps"]
    alike = [
        row for row in TABLE
        if (row.kernel, plain(row), row.arch) == (name.kernel, plain(name), 90) and (row.head_size == D or "PARTS" in row.options)
    ]  # fmt: skip
    assert alike, f"{name} is not in the table"
    return [MULTIPROCESSORS * (REGISTERS // (32 * warps * 8 * ceil(row.registers / 8))) for row in alike]


def x(*size: int) -> torch.Tensor:
    return torch.empty(*size, dtype=torch.bfloat16, device="meta")


@pytest.mark.parametrize("D", common.HEAD_SIZES)
def test_one_wave_of_every_launch(D):
    found = 0
    for case in check.cases("", check.Shape(32, 8, D, 16384, 1024), torch.device("meta")):
        if case.function in ("ragged_decode", "row_products"):
            for grid, launch in recorded(case.runs["triton"]):
                found += 1
                assert prod(grid) <= min(at_once(launch, D)), (case.operation, grid)
    assert found >= 10


@pytest.mark.parametrize("rows", [40, 600])
def test_rows_are_split_by_their_number(rows, monkeypatch):
    """Bit for bit what a launch gives that knows how many rows there are, whatever the capacity: a graph's does not."""
    monkeypatch.setattr(common, "programs", lambda device: 18)
    q, keys, values = random(1, 2, 64), random(900, 64, seed=1), random(900, 64, seed=2)
    lengths = torch.tensor([[rows, 3 * rows // 4]])
    spans = (Spans(torch.tensor([[0, 100]]), lengths, longest) for longest in (rows, 800))
    assert torch.equal(*(KERNELS["ragged_decode"](q, (keys, values), one, 0.2).out_BQD for one in spans))


def test_lengths_of_prompts_compile_nothing_anew():
    """Whole chunks, the rest of a prompt and a token; numbers of the host that vary are no part of a compilation's name."""
    keys = set()
    numbers = x(2 * 192).int(), x(2 * 192).float(), x(0, 2 * 192).float()
    buffers = RowBuffers(x(2 * 192, 64), x(2 * 192, 64), *numbers)
    for length in range(300, 1040, 37):
        for seen in [*range(0, length, 64), length]:
            T = min(64, length - seen) or 1
            new, score = x(2, T, 64), HeadProduct(x(1, T, 16), x(2, 16))
            at = min(seen, 192 - T)
            call = lambda at=at, seen=seen, new=new, score=score: KERNELS["enter_rows"](  # noqa: E731
                buffers, at, new, new, seen, score, apart=192
            )
            ((_, launch),) = recorded(call)
            free = launch.kernel.kwargs["do_not_specialize"]
            numbers = dict(zip(launch.kernel.arg_names, launch.args, strict=False))
            kinds = [(n == 1, n % 16 == 0) for name, n in numbers.items() if isinstance(n, int) and name not in free]
            keys.add((*kinds, *launch.options.items()))
    assert {"at", "seen", "T"} <= set(free) and 1 < len(keys) <= 3
