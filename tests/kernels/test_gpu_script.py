"""``scripts/gpu.py`` runs to its end on a CPU, says what it did not measure, and counts work as the issue's figures do."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from itertools import islice
from pathlib import Path
from unittest import mock

import pytest
import torch
from planned import setting_of
from scripts_loaded import load_script

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "gpu.py"


gpu = load_script("scripts/gpu.py")
e2e = gpu.e2e
CPU = torch.device("cpu")


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_it_runs_to_its_end_on_a_cpu(tmp_path):
    """A process of its own, since other tests interpret the kernels."""
    out = tmp_path / "rows.csv"
    clean = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    clean["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--model", "tiny", "--tokens", "2048", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, env=clean)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    rows = rows_of(out)
    assert {row["device"] for row in rows} == {"cpu"} and {row["cap"] for row in rows} == {"none"}
    assert all(row["commit"] and row["torch"] and row["date"] for row in rows)
    assert [row["part"] for row in rows[:3]] == ["ceiling", "ceiling", "gate"]
    assert {row["part"] for row in rows[3:]} == {"prefill", "decode", "peers", "full"}
    absent = {row["measurement"]: row["note"] for row in rows if not row["value"]}
    assert set(absent) == {"peak memory, allocated", "decode after 2048 tokens, graph"}
    assert "CUDA graphs need a CUDA device, not cpu" in absent["decode after 2048 tokens, graph"]
    values = {row["measurement"]: float(row["value"]) for row in rows if row["value"]}
    may_be_0 = {"logits with nothing evicted, error", "share of prefill in all three beyond the heads' products"}
    assert all(value > 0 for name, value in values.items() if name not in may_be_0)
    assert {row["attention"] for row in rows[:2]} == {""} and {row["attention"] for row in rows[2:]} == {
        "sdpa; one token: sdpa"
    }
    three = [values[f"share of prefill in {name}"] for name in ("scoring", "selecting", "compacting")]
    assert sum(three) == pytest.approx(values["share of prefill in all three"], rel=1e-2) and sum(three) < 100
    bytes_full = 2 * 2048 * 64 * 4 * 2  # keys and values, head size 64, float32, two layers of one head
    assert values["full attention, cache"] * 2**30 == pytest.approx(bytes_full, rel=1e-3)
    operations = rows_of(tmp_path / "rows-operations.csv")
    assert {"matmul", "attend", "compact_rows"} <= {row["operation"] for row in operations}
    assert "triton" not in {row["backend"] for row in operations}


def brief(monkeypatch, operations: int | None = None) -> None:
    """The run that warms an operation up is enough here, or only of the first few operations."""
    every = gpu.bench.every
    monkeypatch.setattr(gpu.bench, "clocked", lambda run, milliseconds: (1.0, 1.0, 1.0))
    monkeypatch.setattr(gpu.bench, "every", lambda *where: islice(every(*where), operations))


def small_run(tokens: int = 1280) -> e2e.Run:
    run = e2e.Run("tiny", *gpu.subject("tiny", tokens, "float32"), CPU, 1e10, 1e10)
    run.build()
    return run


def test_nothing_is_timed_behind_a_gate_that_was_not_passed(tmp_path, capsys):
    out = tmp_path / "rows.csv"
    argv = ["--device", "cpu", "--model", "tiny", "--tokens", "2048", "--out", str(out), "--part", "prefill", "peers"]
    assert gpu.main([*argv, "--minutes", "0"]) == 0
    rows = rows_of(out)[2:]
    assert len(rows) == 1 + 2 + 3 and not any(row["value"] for row in rows)
    assert rows[0]["note"].startswith("not measured: out of time: it may take 40 s of the 0 s left")
    assert {row["note"] for row in rows[1:]} == {"not measured: the gate was not passed"}
    assert "not measured" in capsys.readouterr().out


def test_the_gate_finds_rows_that_are_missing(monkeypatch):
    """A cache that evicts where it must not is another model. Operations' own gate is in test_kernels_bench.py."""
    run = small_run()
    monkeypatch.setattr(e2e, "cases", lambda *where: ())
    assert next(iter(e2e.check(run))).value < 1e-3
    real = run.cache
    with mock.patch.object(run, "cache", lambda **given: real("streaming", **{**given, "budget": 128})):
        figures = e2e.check(run)
        assert next(figures).value > 0.1
        with pytest.raises(RuntimeError, match="logits with nothing evicted are off by"):
            next(figures)
    assert run.wrong == {"logits"}


def test_an_operation_that_is_wrong_stops_what_uses_it_alone(tmp_path, monkeypatch):
    """The first run on a card must not end at the first kernel that fails there: each gets its row, and so does the rest."""

    def wrong(case):
        if case.function in ("attend", "packed_decode"):
            raise gpu.bench.Disagreement(f"{case.operation} disagrees\nmore")

    monkeypatch.setattr(gpu.bench, "gate", wrong)
    brief(monkeypatch)
    out = tmp_path / "rows.csv"
    argv = [
        "--device",
        "cpu",
        "--model",
        "tiny",
        "--tokens",
        "1280",
        "--out",
        str(out),
        "--part",
        "prefill",
        "peers",
        "ops",
    ]
    assert gpu.main(argv) == 1
    rows = {row["measurement"]: row for row in rows_of(out)}
    assert rows["attend against its reference"]["note"] == "wrong: attend disagrees"
    assert {name for name in rows if name.startswith("packed_decode") and name.endswith("against its reference")} == {
        f"packed_decode {bits} bits{turned} against its reference"
        for bits in (4, 2)
        for turned in ("", ", keys rotated", ", keys placed, received")
    }
    assert rows["prefill"]["value"] and rows["prefill of tova against locret"]["value"]
    for name in ("h2o", "roco"):
        assert rows[f"prefill of {name} against locret"]["note"] == "not measured: not as its reference is: attend"
    timed = {row["operation"].split()[0].rstrip(",") for row in rows_of(tmp_path / "rows-operations.csv")}
    assert timed >= {"matmul", "column_stats", "ragged_decode"} and not timed & {"attend", "packed_decode"}
    assert any(name.startswith("attend at tiny") and "Disagreement" in row["note"] for name, row in rows.items())


def test_a_model_that_cannot_be_built_gets_a_row(tmp_path, monkeypatch):
    def fails(run):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")

    monkeypatch.setattr(e2e.Run, "build", fails)
    brief(monkeypatch, operations=6)
    out = tmp_path / "rows.csv"
    argv = ["--device", "cpu", "--model", "tiny", "--tokens", "1280", "--out", str(out), "--part", "ops"]
    assert gpu.main(argv) == 1
    (row,) = [row for row in rows_of(out) if row["part"] == "gate"]
    assert row["note"] == "not measured: OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    assert rows_of(tmp_path / "rows-operations.csv"), "the others go on"


def test_what_does_not_fit_gets_a_row(tmp_path):
    table, run = gpu.Table(tmp_path / "rows.csv", CPU, "none", 60.0), small_run()

    def too_much(run):
        yield e2e.Figure("first", 1.0, "s")
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")

    gpu_row = gpu.Step("full", "something large", lambda run: 1.0, too_much)
    assert "OutOfMemoryError" in table.make(gpu_row, run)
    slow = gpu.Step("full", "something slow", lambda run: 61.0, too_much)
    assert "61 s of the" in table.make(slow, run)
    assert [(row["measurement"], row["value"]) for row in rows_of(tmp_path / "rows.csv")] == [
        ("first", "1"), ("something large", ""), ("something slow", ""),
    ]  # fmt: skip


def test_decoding_behind_two_contexts(monkeypatch):
    monkeypatch.setattr(e2e, "BEHIND", 1024)
    run = small_run()
    figures = {figure.name: figure for figure in e2e.decoding(run)}
    ratio = figures["decode after the whole prompt against a short one, dynamic"].value
    long, brief = (figures[f"decode after {n} tokens, dynamic"] for n in (1280, 1024))
    assert ratio == pytest.approx(long.value / brief.value)
    assert long.note == brief.note == "256 rows per head"
    assert run.after is None


def test_estimates_follow_what_was_measured():
    run = small_run()
    guess = run.expected()
    assert run.expected("h2o") > guess > 0
    run.seconds = {"locret": 4.0}
    assert run.expected() == 0 and run.expected("h2o") == e2e.COMPILING + 6.0
    run.seconds["h2o"] = 9.0
    assert run.expected("h2o") == 0 and run.expected("roco") == e2e.COMPILING + 9.0


@pytest.mark.parametrize(("name", "gflop", "gib"), [("phi3-mini", 10.8, 9.13), ("llama3.1-8b", 24, 15.98)])
def test_work_of_the_real_models(name, gflop, gib):
    """Floating-point operations a token as issue 4 gives them; bytes a decoded token reads, by hand."""
    config, setting = gpu.subject(name, 131072, "bfloat16")
    assert e2e.operations(config, setting) / 131072 == pytest.approx(1e9 * gflop, rel=0.06)
    layers, heads, size = config.num_hidden_layers, config.num_key_value_heads, config.hidden_size
    q, mlp = (
        size * config.num_attention_heads * (D := size // config.num_attention_heads),
        3 * size * config.intermediate_size,
    )
    weights = layers * (2 * q + 2 * size * heads * D + mlp + 2 * size) + config.vocab_size * size + size
    rows = 2 * layers * heads * D * setting.budget
    assert e2e.bytes_read(config, "bfloat16", setting.budget) == 2 * (weights + rows)
    assert 2 * (weights + rows) / 2**30 == pytest.approx(gib, rel=1e-3)


def test_work_of_attention():
    """Pairs of a query and a row it sees, one by one, in a model whose budget holds everything and in one that evicts."""
    config = gpu.AutoConfig.for_model("llama", **gpu.TINY)
    for budget, chunk in ((300, 64), (100, 64)):
        setting = setting_of(300, budget, chunk, "float32", d_hidden=32)
        none = setting_of(300, budget, chunk, "float32", d_hidden=0)
        pairs = sum(min(t // chunk * chunk, budget) + t % chunk + 1 for t in range(300))
        heads = 2 * 32 * ((2 + 2) * 64 + 1)
        dense = 2 * (2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 192 + 2 * 128) + 128
        assert e2e.operations(config, none) == 4 * 2 * 2 * 64 * pairs + 2 * 300 * dense
        assert e2e.operations(config, setting) - e2e.operations(config, none) == 2 * 300 * heads


def test_what_is_reached_of_the_targets(tmp_path, monkeypatch):
    """Every target is a figure that a run makes, and the table shows the last row of each, of this length and cap alone."""
    monkeypatch.setattr(e2e, "BEHIND", 1024)
    run = small_run()
    decoded = [figure.name for figure in e2e.decoding(run)]
    made = {name.replace("dynamic", form) for form in ("dynamic", "graph") for name in decoded}
    made |= {figure.name for step in gpu.steps(["prefill", "peers", "full"])[1:] for figure in step.figures(run)}
    assert set(gpu.targets.TARGETS) - made == {"peak memory, allocated against planned"}  # of a CUDA device's allocator
    assert gpu.targets.to_markdown([], {}).count("| not measured yet | not measured yet |") == len(gpu.targets.TARGETS)
    where = {**gpu.origin(CPU), "device": "Some card", "transformers": "1"}
    for value, context, cap in (
        (3.0, 131072, "24GiB"),
        (2.25, 131072, "24GiB"),
        (9.0, 2048, "24GiB"),
        (8.0, 131072, "80GiB"),
    ):
        row = gpu.Row(
            "phi3-mini", "full", "prefill against full attention", value, "", "", "", context, "", cap, **where
        )
        gpu.bench.append(tmp_path / "rows.csv", row)
    shown = gpu.targets.to_markdown(rows_of(tmp_path / "rows.csv"), {})
    assert (
        "| prefill against full attention (times faster) | at least 2.5 and at least 1.8 | 2.25 | not measured yet |"
        in shown
    )
    assert shown.count("Some card") == 1


def test_the_share_of_prefill_is_measured_without_draining_the_device(monkeypatch):
    """A device that is waited for at every clock reading runs another prefill than the one that is reported on."""
    run, waited = small_run(2048), []
    monkeypatch.setattr(e2e, "wait", waited.append)
    figures = list(e2e.shares(run))
    assert len(waited) == 2 * (1 + e2e.PASSES), (
        "before a prefill and after it: one that compiles, and those that are timed"
    )
    assert [figure.unit for figure in figures] == ["%"] * 5 and all(figure.value > 0 for figure in figures[:4])
    everything, beyond = (figure.value for figure in figures[3:])
    assert 0 <= beyond < everything


def test_the_clock_of_a_stream(monkeypatch):
    """Marks are events; the time between them is asked for at the end alone."""
    asked = []

    class Event:
        count = 0

        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            Event.count += 1
            self.at = Event.count

        def elapsed_time(self, end):
            asked.append(end)
            return 1000.0 * (end.at - self.at)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    timed = [m for name, m in sys.modules.items() if name.startswith("locret_kit.cache.") and "time" in vars(m)]
    taken = 0.0
    with e2e.stream_clock(torch.device("cuda")):
        for module in timed:
            began = module.time.perf_counter()
            taken += module.time.perf_counter() - began
    assert timed and not asked and taken.seconds() == len(timed) == len(asked)


def test_the_list(capsys):
    assert gpu.main(["--list", "--part", "decode", "ops"]) == 0
    said = capsys.readouterr().out
    assert "phi3-mini    decode" in said and "llama3.1-8b  ops" in said and "peers" not in said


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--tokens", "1000"], "tokens=1000 must be at least 1024 for tiny"),
        (["--out", "{tmp}/card.csv"], "holds rows of Some card, not of cpu"),
    ],
)
def test_what_is_refused(argv, message, tmp_path, capsys):
    where = {**gpu.origin(CPU), "device": "Some card", "transformers": "1"}
    gpu.bench.append(tmp_path / "card.csv", gpu.Row("-", "-", "-", 1.0, "", "", "", 0, "", "", **where))
    argv = [word.format(tmp=tmp_path) for word in argv]
    assert gpu.main(["--device", "cpu", "--model", "tiny", *argv]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("wrong", [None, "graphs_on_cuda.py", "racecheck", "gpu.py"])
def test_a_card_is_checked_before_it_is_measured(tmp_path, wrong):
    """Graphs, races, figures, in this order, each within its time; figures are taken all the same, and the status tells."""
    log = tmp_path / "log"
    for name in ("python", "compute-sanitizer"):
        tool = tmp_path / name
        tool.write_text(f'#!/bin/sh\necho "{name} $@" >> {log}\ncase "{name} $@" in *{wrong}*) exit 1;; esac\n')
        tool.chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    command = ["bash", str(ROOT / "scripts" / "on_card.sh"), "--model", "phi3-mini"]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == (wrong is not None), done.stderr
    *checks, figures = log.read_text().splitlines()
    assert checks == [
        "python tests/support/graphs_on_cuda.py",
        "python tests/support/rows_on_cuda.py",
        "compute-sanitizer --tool racecheck --error-exitcode 3 python tests/support/rows_on_cuda.py",
    ]
    assert figures.startswith("python scripts/gpu.py --minutes 8.") and figures.endswith(" --model phi3-mini")
    assert ("on_card: exit status 1" in done.stderr) == (wrong is not None)
