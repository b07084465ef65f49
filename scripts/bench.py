"""Time every operation: correctness first, then rows with their provenance. ``scripts/gpu.py --part ops`` does it on a GPU.

The card's own ceilings, a bfloat16 matmul and a copy, come first. An operation is timed only after its kernel agrees with its
reference on random inputs of the same shape (`gate`). Times are the device's (CUDA events around a call, or around a graph of it
of Triton's), with the L2 cache flushed between repetitions; rows have p20, p50 and p80. On a CPU the
references alone are timed, by the clock.
"""

from __future__ import annotations

import csv
import os
import sys
import timeit
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import triton
from torch.utils._pytree import tree_leaves

from locret_kernels import provenance

sys.path.append(str(Path(__file__).parent))
from kernel_cases import Case, Shape, cases

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

ERROR, LARGEST = 1e-2, 0.1
"""Bounds on bfloat16 kernels against float32 references: the root mean square of the errors, and the largest error. Both are
shares of the reference's root mean square, where 8 bits of mantissa make 0.2% to 0.3%."""
SHAPES = {"phi3-mini": Shape(32, 32, 96, 6000, 3072), "llama3.1-8b": Shape(32, 8, 128, 16384, 1024)}
"""Recipe -> its sizes (Locret, table 6)."""
OWN = {"triton", "cpu"}
"""Backends that are compared with the reference."""
TINY = Shape(4, 2, 64, 96, 48, prompt=150, answer=20)
"""Sizes for a CPU."""


class Disagreement(RuntimeError):
    """Error of a kernel that does not equal its reference."""


def origin(device: torch.device) -> dict[str, str]:
    """Device, driver, versions, commit and date (UTC) of a measurement. ``LOCRET_COMMIT`` names the commit of a tree without
    git's folder."""
    name, driver = "cpu", "-"
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        said = provenance.output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") or "unknown"
        driver = said.splitlines()[0]  # one line per card
    here = os.environ.get("LOCRET_COMMIT") or provenance.commit(provenance.ROOT) or "unknown"
    date = datetime.now(UTC).strftime("%Y-%m-%d")
    return {"device": name, "driver": driver, **provenance.versions("torch", "triton"), "commit": here, "date": date}


@dataclass(frozen=True)
class Row:
    """One timing and its provenance."""

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


def ceilings(device: torch.device) -> Iterator[Case]:
    """The card's limits: a large bfloat16 matmul, and a copy of 2 GiB. On a CPU small ones, so that rows exist."""
    n, elements = (8192, 2**30) if device.type == "cuda" else (256, 2**20)
    a, b = (torch.randn(n, n, dtype=torch.bfloat16, device=device) for _ in range(2))
    yield Case("matmul", f"{n}x{n}x{n}", {"torch": lambda: a @ b}, flops=2 * n**3)
    x = torch.empty(elements, dtype=torch.bfloat16, device=device)
    y = torch.empty_like(x)
    yield Case("copy", f"{x.nbytes / 2**30:.3g} GiB", {"torch": lambda: y.copy_(x)}, nbytes=2 * x.nbytes)


def outputs(case: Case, key: str) -> list[object]:
    """Results of one call: what it returns, or leaves in ``case.state``, which is put back as it was."""
    before = [x.clone() for x in case.state]
    made = case.runs[key]()
    if not case.state:
        return tree_leaves(made, is_leaf=lambda x: x is None)  # what was not wanted is None in both
    after: list[object] = [x.clone() for x in case.state]
    for x, old in zip(case.state, before, strict=True):
        x.copy_(old)
    return after


def agree(mine: list[object], theirs: list[object], what: str, *, exact: bool = False) -> None:
    """Compare a kernel's outputs with its reference's.

    Integers, booleans and infinities must be equal; floats within ``ERROR`` and, but for two last bits of a bfloat16, ``LARGEST``
    of the reference's root mean square, or with ``exact`` equal too.

    Raises:
        Disagreement: an output that differs; names it.
    """
    for i, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        if reason := difference(a, b, exact=exact):
            raise Disagreement(f"{what} disagrees with its reference in output {i}: {reason}")


def difference(mine: object, theirs: object, *, exact: bool = False) -> str | None:
    """How a result differs from its reference; None where it does not."""
    if not isinstance(mine, torch.Tensor) or not isinstance(theirs, torch.Tensor):
        return None if mine is theirs else f"it is {'there' if theirs is None else 'missing'}"
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
    # Large numbers may differ by two last bits of the inputs' type: Triton's interpreter cuts them instead of rounding, and of an
    # attention weight, though in float32, the logit is made of rounded keys. The largest is 50 to 300 times the root mean square.
    beyond = errors.abs() - 2 * torch.finfo(torch.bfloat16).eps * b[finite].abs()
    for name, error, bound in (
        ("root mean square", errors.square().mean().sqrt(), ERROR), ("largest", beyond.amax(), LARGEST),
    ):  # fmt: skip
        if not error <= bound * size:  # written so that NaN fails
            return f"its {name} error is {float(error / size):.2g} of the reference's root mean square, above {bound}"
    return None


def gate(case: Case) -> None:
    """Raise Disagreement unless the case's kernels, where they run, equal its reference."""
    for key in OWN & case.runs.keys():
        mine, theirs = (outputs(case, each) for each in (key, "reference"))
        agree(mine, theirs, f"{case.operation} ({key}) at {case.shape}", exact=case.exact)


def measure(case: Case, key: str, milliseconds: int, where: Mapping[str, str], device: torch.device) -> Row:
    """Warm up, then p20, p50, p80 over ``milliseconds`` of repetitions, on a CPU over four."""
    run, peak = case.runs[key], 0
    run()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        run()
        peak = torch.cuda.max_memory_allocated() - held
        # References make the host wait, and a graph's copy is slower than PyTorch's own.
        call = replay(run) if key == "triton" else run
        low, middle, high = triton.testing.do_bench(call, warmup=25, rep=milliseconds, quantiles=[0.2, 0.5, 0.8])
    else:
        took = torch.tensor(timeit.repeat(run, number=1, repeat=4), dtype=torch.float64)
        low, middle, high = (1e3 * float(took.quantile(share)) for share in (0.2, 0.5, 0.8))
    return Row(
        case.operation, key, case.shape, "bfloat16", low, middle, high,
        case.flops / middle / 1e9 if case.flops else None, case.nbytes / middle / 1e6 if case.nbytes else None,
        peak / 2**20, **where,
    )  # fmt: skip


def replay(run: Callable[[], object]) -> Callable[[], None]:
    """The call as a CUDA graph: of small operations the host's launches take longer than the device."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def every(shapes: Mapping[str, Shape], device: torch.device) -> Iterator[Case]:
    """The card's ceilings, then every operation of every shape."""
    return chain(ceilings(device), *(cases(name, at, device) for name, at in shapes.items()))


def timed(case: Case, milliseconds: int, where: Mapping[str, str], device: torch.device) -> Iterator[Row]:
    """A row per backend, after the gate."""
    gate(case)
    for key in case.runs:
        yield measure(case, key, milliseconds, where, device)


def append(path: Path, row: DataclassInstance) -> None:
    """Add a row to a CSV file, which is on disk when this returns. Rows of different devices never share a file.

    Raises:
        ValueError: the file holds other columns, or rows of another device.
    """
    names, values = [f.name for f in fields(row)], asdict(row)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+", newline="") as file:
        file.seek(0)
        first = next(reader := csv.DictReader(file), None)
        if reader.fieldnames is not None and list(reader.fieldnames) != names:
            raise ValueError(f"{path} has other columns: {', '.join(reader.fieldnames)}")
        if first is not None and first["device"] != values["device"]:
            raise ValueError(f"{path} holds rows of {first['device']}, not of {values['device']}: name another file")
        writer = csv.DictWriter(file, names, lineterminator="\n")
        if reader.fieldnames is None:
            writer.writeheader()
        writer.writerow({k: f"{v:.4g}" if isinstance(v, float) else v for k, v in values.items()})
        file.flush()
        os.fsync(file.fileno())


def line(row: Row) -> str:
    """A row for people."""
    return f"{row.operation:<40} {row.backend:<10} {row.shape:<48} {row.p50_ms:9.3f} ms"
