"""``scripts/gpu.py`` runs to its end on a CPU, says what it did not measure, and counts work as the issue's figures do."""

import csv
from pathlib import Path
from unittest import mock

import pytest
import torch
from forked import start, status_of
from interpreted import common
from scripts_loaded import load_script

gpu = load_script("scripts/gpu.py")
e2e = gpu.e2e
CPU = torch.device("cpu")


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_it_runs_to_its_end_on_a_cpu(tmp_path):
    """A process of its own, in which nothing interprets the kernels, as other tests do; fewer tokens and passes."""
    out = tmp_path / "rows.csv"

    def run() -> int:
        common.INTERPRETED = False
        e2e.WARM, e2e.TIMED, e2e.PASSES = 2, 6, 1
        return gpu.main(["--device", "cpu", "--model", "tiny", "--tokens", "1100", "--out", str(out)])

    status = status_of(start(run, tmp_path / "log"))
    assert status == 0, (tmp_path / "log").read_text()[-4000:]
    rows = rows_of(out)
    assert {row["device"] for row in rows} == {"cpu"} and {row["cap"] for row in rows} == {"none"}
    assert all(row["commit"] and row["torch"] and row["date"] for row in rows)
    assert [row["part"] for row in rows[:3]] == ["ceiling", "ceiling", "gate"]
    assert {row["part"] for row in rows[3:-2]} == {"prefill", "decode", "peers", "full"}
    assert [row["measurement"] for row in rows[-2:]] == ["bfloat16 matmul, at last", "copy, at last"]
    absent = {row["measurement"]: row["note"] for row in rows if not row["value"]}
    assert set(absent) == {"peak memory, allocated", "decode after 1100 tokens, graph"}
    assert "CUDA graphs need a CUDA device, not cpu" in absent["decode after 1100 tokens, graph"]
    operations = rows_of(tmp_path / "rows-operations.csv")
    assert {"matmul", "attend_and_count", "compact_rows"} <= {row["operation"] for row in operations}
    assert "triton" not in {row["backend"] for row in operations}


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


@pytest.mark.parametrize(("name", "gflop", "gib"), [("phi3-mini", 10.8, 9.13), ("llama3.1-8b", 24, 15.98)])
def test_work_of_the_real_models(name, gflop, gib):
    """Floating-point operations a token as issue 4 gives them; bytes a decoded token reads, by hand."""
    config, setting = gpu.subject(name, 131072, "bfloat16")
    assert e2e.operations(config, setting) / 131072 == pytest.approx(1e9 * gflop, rel=0.06)
    layers, heads, size = config.num_hidden_layers, config.num_key_value_heads, config.hidden_size
    q, mlp, D = size * size, 3 * size * config.intermediate_size, size // config.num_attention_heads
    weights = layers * (2 * q + 2 * size * heads * D + mlp + 2 * size) + config.vocab_size * size + size
    rows = 2 * layers * heads * D * setting.budget
    assert e2e.bytes_read(config, "bfloat16", setting.budget) == 2 * (weights + rows)
    assert 2 * (weights + rows) / 2**30 == pytest.approx(gib, rel=1e-3)
