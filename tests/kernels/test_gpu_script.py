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
    argv = ["--device", "cpu", "--model", "tiny", "--tokens", "1280", "--part", "prefill", "peers", "ops", "--out"]
    assert gpu.main([*argv, str(out)]) == 1
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
