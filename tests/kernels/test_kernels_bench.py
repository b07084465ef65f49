"""The gate before timings: every operation passes it, and no result passes that is zeroed, shifted or of another kind."""

from __future__ import annotations

import pytest
import torch
from interpreted import common
from scripts_loaded import load_script

bench = load_script("kernels/benchmarks/bench.py")
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def cases():
    """Every operation at sizes for the interpreter, with what its kernel and its reference return."""
    assert common.INTERPRETED
    torch.manual_seed(0)
    found = []
    for case in bench.cases("tiny", bench.TINY, CPU):
        for kernel in bench.OWN & case.runs.keys():
            found.append((case, bench.outputs(case, kernel), bench.outputs(case, "reference")))
    return found


def test_every_operation_passes(cases):
    from locret_kernels import backend

    for case, mine, theirs in cases:
        bench.agree(mine, theirs, case.operation, exact=bool(case.state))
    timed = {case.function for case, *_ in cases}
    assert timed == {name for name in backend.functions() if len(backend.runnable(name, CPU)) > 1}


@pytest.mark.parametrize(
    "spoil",
    [
        torch.zeros_like,
        lambda x: x.roll(1, -1),
        lambda x: x + x if x.is_floating_point() else x + 1,
        lambda x: x.flatten().index_fill(0, torch.tensor([x.numel() // 2]), 0 if x.flatten()[x.numel() // 2] else 1).view_as(x),
    ],
    ids=["zeroed", "shifted", "doubled", "one element zeroed"],
)  # fmt: skip
def test_no_spoilt_result_passes(cases, spoil, request):
    """One element that is wrong shows wherever it is large beside the bound; the smallest may be lost in the noise."""
    one = "one element" in request.node.name
    for case, mine, theirs in cases:
        for i, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            if a is None:
                continue
            spoilt = spoil(a)
            if one and b.is_floating_point() and not case.state:
                size = b.double()[b.isfinite()].square().mean().sqrt()
                if (spoilt.double() - b).abs().nan_to_num().max() < 0.2 * size:
                    continue
            outputs = [*mine[:i], spoilt, *mine[i + 1 :]]
            with pytest.raises(bench.Disagreement, match="disagrees with its reference"):
                bench.agree(outputs, theirs, case.operation, exact=bool(case.state))


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


def test_one_wrong_block_of_many_rows():
    """A block whose share of the sum of squares is below the bound of the mean: the largest error shows it."""
    large = torch.randn(300_000, generator=torch.Generator().manual_seed(0))
    spoilt = large.clone()
    spoilt[1000:1016] = 0
    with pytest.raises(bench.Disagreement, match="largest error is"):
        bench.agree([spoilt], [large], "x")


def test_what_rounding_may_do():
    bench.agree([SMALL.bfloat16(), None], [SMALL, None], "x")
    infinite = torch.tensor([float("-inf"), 1.0, 2.0])
    bench.agree([infinite], [infinite.clone()], "x")


def test_a_tree_without_git_can_say_its_commit(monkeypatch):
    monkeypatch.setenv("LOCRET_COMMIT", "abc1234")
    assert bench.origin(CPU)["commit"] == "abc1234"


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
