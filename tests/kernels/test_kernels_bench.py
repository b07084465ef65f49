"""The gate before timings: every operation passes it, and no result passes that is zeroed, shifted or of another kind."""

from __future__ import annotations

import sys

import pytest
import torch
from interpreted import common
from scripts_loaded import load_script

bench = load_script("scripts/bench.py")
runnable, Shape = (getattr(sys.modules["kernel_cases"], name) for name in ("runnable", "Shape"))
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def cases():
    """Every operation at sizes for the interpreter, with what its kernel and its reference return."""
    assert common.INTERPRETED
    torch.manual_seed(0)
    found = []
    for case in bench.cases("tiny", Shape(4, 2, 64, 56, 16, prompt=80, answer=8), CPU):
        for kernel in bench.OWN & case.runs.keys():
            found.append((case, bench.outputs(case, kernel), bench.outputs(case, "reference")))
    return found


def test_every_operation_passes(cases):
    from locret_kernels import backend

    for case, mine, theirs in cases:
        bench.agree(mine, theirs, case.operation, exact=case.exact)
    timed = {case.function for case, *_ in cases}
    assert timed == {name for name in backend.functions() if len(runnable(name, CPU)) > 1}


SMALL = 1e-4 * torch.randn(4, 500, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("mine", "theirs", "exact", "message"),
    [
        (torch.zeros(4, 500), SMALL, False, "root mean square error is 1 of"),
        (SMALL.index_fill(0, torch.tensor([1]), float("nan")), SMALL, False, "infinities or NaN elsewhere"),
        (SMALL.index_fill(0, torch.tensor([1]), float("inf")), -SMALL / 0, False, "infinities or NaN elsewhere"),
        (SMALL[:, :-1], SMALL, False, r"shape \(4, 499\), not \(4, 500\)"),
        (SMALL.bfloat16().float(), SMALL, True, "elements differ"),
        (torch.arange(9000) + (torch.arange(9000) == 8999), torch.arange(9000), False, "1 of 9000 elements differ"),
        (torch.arange(3) > 1, torch.arange(3) > 0, False, "1 of 3 elements differ"),
        (torch.arange(3.0), torch.arange(3), False, "torch.float32, not torch.int64"),
        (None, SMALL, False, "it is missing"),
    ],
    ids=str,
)  # fmt: skip
def test_differences(mine, theirs, exact, message):
    with pytest.raises(bench.Disagreement, match=message):
        bench.agree([mine], [theirs], "x", exact=exact)


def test_rows_are_of_one_device(tmp_path):
    where = bench.origin(CPU)
    case = next(bench.ceilings(CPU))
    row = bench.measure(case, "torch", 1, where, CPU)
    assert row.device == "cpu" and row.p20_ms <= row.p50_ms <= row.p80_ms and row.tflops > 0
    path = tmp_path / "new" / "rows.csv"
    bench.append(path, row)
    bench.append(path, row)
    assert len(path.read_text().splitlines()) == 3
    with pytest.raises(ValueError, match="holds rows of cpu, not of Some card"):
        bench.append(path, bench.Row(**{**bench.asdict(row), "device": "Some card"}))
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="has other columns: a, b"):
        bench.append(tmp_path / "other.csv", row)
