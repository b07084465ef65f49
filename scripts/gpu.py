"""Cost of 128K tokens on the device at hand, in under nine minutes: one table, and CSV rows with their provenance.

    python scripts/gpu.py                                           # everything, under a cap of 24 GiB
    python scripts/gpu.py --model phi3-mini --part prefill decode
    python scripts/gpu.py --list                                    # what would be measured
    python scripts/gpu.py --device cpu --model tiny --tokens 2048   # does it run to its end

The card's own ceilings (a bfloat16 matmul, a copy) come first, and once more at the end. After the first comes a gate on
correctness, then the timings: see `end_to_end.py` for whole models, `bench.py` for operations alone,
whose rows have a file of their own. Every row is written at once. A measurement that does not fit into
``--minutes`` or into memory, or uses an operation that is wrong, gets a row that says so, and the others go on. The exit status
is 1 where something was wrong.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import transformers
from transformers import AutoConfig, PretrainedConfig

from locret_kit.backbones.load import pick_device
from locret_kit.naming import first_line, parse_bytes
from locret_kit.planning.inference_plan import Setting
from locret_kit.settings import RunSettings

RESULTS = Path(__file__).resolve().parents[1] / "kernels" / "benchmarks" / "results"
sys.path.append(str(Path(__file__).parent))
import bench  # noqa: E402
import end_to_end as e2e  # noqa: E402
import launches  # noqa: E402
import targets  # noqa: E402
from kernel_cases import Shape  # noqa: E402
from targets import CAP, TOKENS  # noqa: E402

PARTS = ("prefill", "decode", "peers", "full", "ops")
MINUTES = 9.0
PREFILL = frozenset({"select_index", "select_rows", "compact_rows", "rotate_rows"})
STATISTICS = PREFILL | {"column_stats"}
TINY = dict(
    vocab_size=199, hidden_size=128, intermediate_size=192, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, initializer_range=0.2, max_position_embeddings=TOKENS, bos_token_id=1,
    eos_token_id=None, pad_token_id=0,
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """A figure and its provenance."""

    model: str
    part: str
    measurement: str
    value: float | None
    unit: str
    target: str
    note: str
    context: int
    setting: str
    cap: str
    device: str
    driver: str
    torch: str
    triton: str
    transformers: str
    commit: str
    date: str
    attention: str = ""
    """Operators of attention."""


class Step(NamedTuple):
    """Measurements that are made together."""

    part: str
    says: str
    expected: Callable[[e2e.Run], float]
    """Seconds, from the figures so far."""
    figures: Callable[[e2e.Run], Iterator[e2e.Figure]]
    uses: frozenset[str] = PREFILL
    """Operations that must be right."""


def steps(parts: Sequence[str]) -> list[Step]:
    """Steps in their order; the gate is always among them."""
    compiling, tokens = e2e.COMPILING, 4 * (e2e.WARM + e2e.TIMED)

    def short(run: e2e.Run) -> float:
        return compiling + e2e.PASSES * run.floor(e2e.short(run.setting)) / run.share

    def decoding(run: e2e.Run) -> float:
        return compiling + 0.1 * tokens + run.floor(e2e.short(run.setting)) / run.share + run.expected()

    def full(run: e2e.Run) -> float:
        return run.expected() + run.floor(run.setting.context, run.setting.context) / max(run.share, e2e.SHARE)

    every = [
        Step("gate", "operations and logits against references", lambda run: 2 * compiling, e2e.check, frozenset()),
        Step("prefill", "share of prefill in scoring, selecting and compacting", short, e2e.shares),
        Step("prefill", "prefill, and its peak memory against the plan", e2e.Run.expected, e2e.prefilling),
        Step(
            "decode",
            "decode at a full cache, dynamic and as a graph",
            decoding,
            e2e.decoding,
            PREFILL | {"ragged_decode", "row_products"},
        ),
        Step("decode", "matrix products of a token, fused or not", lambda run: compiling, e2e.products, frozenset()),
    ]
    for name, uses in (("h2o", STATISTICS), ("roco", STATISTICS), ("tova", PREFILL | {"window_attention"})):
        expected, figures = partial(e2e.Run.expected, policy=name), partial(e2e.peer, name)
        every.append(Step("peers", f"prefill of {name} against locret", expected, figures, uses))
    every.append(Step("full", "prefill and cache against full attention", full, e2e.full_attention))
    return [step for step in every if step.part in ("gate", *parts)]


def subject(name: str, tokens: int, dtype: str) -> tuple[PretrainedConfig, Setting]:
    """Configuration and setting of a model, by its recipe. Raises ValueError for a prompt that does not fill the cache."""
    if name == "tiny":
        run = RunSettings(budget=256, chunk=128)
        config, setting = AutoConfig.for_model("llama", **TINY), Setting(tokens, run, dtype, d_hidden=32)
    else:
        config, setting = launches.setting_of(name, tokens, dtype)
    if tokens < (least := e2e.short(setting) // setting.chunk * setting.chunk):
        raise ValueError(f"tokens={tokens} must be at least {least} for {name}: {setting}")
    return config, setting


class Table:
    """Rows as they come: on disk, and printed."""

    def __init__(self, out: Path | None, device: torch.device, cap: str, seconds: float) -> None:
        self.origin = bench.origin(device)
        slug = re.sub(r"[^a-z0-9]+", "-", self.origin["device"].lower())
        folder = RESULTS if out is None else out
        self.out = folder if folder.suffix == ".csv" else folder / f"{slug}.csv"
        self.cap, self.began, self.seconds = cap, time.monotonic(), seconds
        self.attention = ""
        """Kind of attention of the model that is measured now."""

    def left(self) -> float:
        """Seconds."""
        return self.seconds - (time.monotonic() - self.began)

    def add(self, model: str, part: str, figure: e2e.Figure, setting: Setting | None = None) -> None:
        (name, value, unit, note), goal = figure, targets.target(figure.name, model)
        context, said = (0, "") if setting is None else (setting.context, str(setting))
        where = {**self.origin, "transformers": transformers.__version__}
        bench.append(
            self.out,
            Row(model, part, name, value, unit, goal, note, context, said, self.cap, **where, attention=self.attention),
        )
        number = "-" if value is None else f"{value:.4g}"
        aim = f" (target: {goal})" if goal else ""
        print(f"{model:<12} {part:<8} {name:<58} {number:>10} {unit}{aim}{'; ' if note else ''}{note}", flush=True)

    def make(self, step: Step, run: e2e.Run, reason: str = "") -> str:
        """The step's rows, or one that says why there are none; returns that reason."""
        expected, left = step.expected(run), max(0.0, self.left())
        if not reason and (wrong := step.uses & run.wrong):
            reason = f"not as its reference is: {', '.join(sorted(wrong))}"
        if not reason and expected > left:
            reason = f"out of time: it may take {expected:.0f} s of the {left:.0f} s left"
        if not reason:
            try:
                for figure in step.figures(run):
                    self.add(run.name, step.part, figure, run.setting)
            except e2e.FAILURES as error:
                reason = failure(error)
        if reason:
            self.lack(run.name, step.part, step.says, reason, run.setting)
        return reason

    def lack(self, model: str, part: str, says: str, reason: str, setting: Setting | None = None) -> None:
        """A row that says why there is no figure."""
        self.add(model, part, e2e.Figure(says, None, "", f"not measured: {reason}"), setting)


def failure(error: BaseException) -> str:
    """The error that ended a measurement, in one line."""
    return f"{type(error).__name__}: {first_line(error)}"


def measure(args: argparse.Namespace, device: torch.device) -> tuple[Path, bool]:
    """Everything that was asked for; the file of the rows, and whether all was right that was compared with a reference."""
    on_gpu = device.type == "cuda"
    subjects = {name: subject(name, args.tokens, "bfloat16" if on_gpu else "float32") for name in args.model}
    table = Table(args.out, device, args.gpu_memory if on_gpu else "none", 60 * args.minutes)
    torch.manual_seed(0)
    rates = ceilings(table, device)
    right = True
    for name, (config, setting) in subjects.items():
        run = e2e.Run(name, config, setting, device, *rates)
        try:
            e2e.free(device)
            if on_gpu:
                total = torch.cuda.get_device_properties(device).total_memory
                cap = min(1.0, parse_bytes(args.gpu_memory, "gpu_memory") / total)
                torch.cuda.set_per_process_memory_fraction(cap, device)
            run.build()
            table.attention = e2e.attention(run)
            gate, *rest = steps(args.part)
            reason = table.make(gate, run)
            right &= not run.wrong
            for step in rest:
                table.make(step, run, reason and "the gate was not passed")
        except RuntimeError as error:  # no room for the weights, or the device is lost
            right = False
            table.lack(name, "gate", "everything after this row", failure(error), setting)
        del run
        table.attention = ""
    if "ops" in args.part:
        right &= operations(table, {name: bench.SHAPES.get(name, bench.TINY) for name in args.model}, device)
    ceilings(table, device, ", at last")  # whether the card slowed down meanwhile
    return table.out, right


def ceilings(table: Table, device: torch.device, when: str = "") -> tuple[float, float]:
    """Operations and bytes per second of the card, each of 0.3 seconds; also as rows."""
    matmul, copy = (bench.measure(case, "torch", 300, table.origin, device) for case in bench.ceilings(device))
    assert matmul.tflops is not None and copy.gb_s is not None
    table.add("-", "ceiling", e2e.Figure(f"bfloat16 matmul{when}", matmul.tflops, "TFLOP/s", matmul.shape))
    table.add("-", "ceiling", e2e.Figure(f"copy{when}", copy.gb_s, "GB/s", copy.shape))
    return 1e12 * matmul.tflops, 1e9 * copy.gb_s


def operations(table: Table, shapes: dict[str, Shape], device: torch.device) -> bool:
    """Each operation alone, into a file next to the table's, as long as there is time; whether all were right."""
    out, right = table.out.with_name(f"{table.out.stem}-operations.csv"), True
    milliseconds = 100 if device.type == "cuda" else 1  # on a CPU it shows that they run
    try:
        e2e.free(device)
        if device.type == "cuda":
            torch.cuda.set_per_process_memory_fraction(1.0, device.index)
        for case in bench.every(shapes, device):
            if table.left() < e2e.COMPILING:
                table.lack("-", "ops", f"operations from {case.operation} on", "out of time")
                break
            try:
                for row in bench.timed(case, milliseconds, table.origin, device):
                    bench.append(out, row)
                    print(bench.line(row), flush=True)
            except e2e.FAILURES as error:
                right = False
                table.lack("-", "ops", f"{case.operation} at {case.shape}", failure(error))
    except RuntimeError as error:  # no room for the inputs, or the device is lost
        right = False
        table.lack("-", "ops", "everything after this row", failure(error))
    return right


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", nargs="+", default=list(bench.SHAPES), choices=(*bench.SHAPES, "tiny"))
    p.add_argument("--part", nargs="+", default=list(PARTS), choices=PARTS)
    p.add_argument("--tokens", type=int, default=TOKENS, help=f"of the prompt (default {TOKENS})")
    p.add_argument(
        "--minutes", type=float, default=MINUTES, help=f"start nothing that would end later (default {MINUTES})"
    )
    p.add_argument("--gpu-memory", default=CAP, metavar="SIZE", help=f"cap on the bounded runs (default {CAP})")
    p.add_argument("--device", default="cuda")
    p.add_argument(
        "--out", type=Path, help="CSV file, or folder of DEVICE.csv; rows are appended (default: the committed ones)"
    )
    p.add_argument("--list", action="store_true", help="print what would be measured and leave")
    args = p.parse_args(argv)
    if args.list:
        print("-            ceiling  bfloat16 matmul, copy: first and last")
        for name in args.model:
            print("\n".join(f"{name:<12} {step.part:<8} {step.says}" for step in steps(args.part)))
        print(
            "\n".join(f"{name:<12} ops      every operation of bench.py" for name in args.model if "ops" in args.part)
        )
        return 0
    try:
        out, right = measure(args, pick_device(args.device))
    except ValueError as error:
        print(f"gpu: {error}", file=sys.stderr)
        return 1
    print(f"rows: {out}" + ("" if right else "; some of what they name was wrong or could not run"))
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
