"""``scripts/on_card.sh``: what it would run, in which order, what it refuses, and what its import check names."""

import os
import subprocess
import sys
from pathlib import Path

from forked import start, status_of
from scripts_loaded import ROOT, load_script


def planned(*args: str, **given: str) -> subprocess.CompletedProcess[str]:
    """A dry run."""
    clean = {name: value for name, value in os.environ.items() if name not in ("PLAYED", "TRIAL", "OUT")}
    command = ["bash", str(ROOT / "scripts" / "on_card.sh"), *args]
    env = {**clean, "DRY": "1", "LOCRET_COMMIT": "abc", **given}
    return subprocess.run(command, capture_output=True, text=True, env=env)


def test_exact_gates_come_first_and_then_races_and_rows(tmp_path):
    (tmp_path / "compute-sanitizer").touch(mode=0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    done = planned("llama3.1-8b", "--part", "prefill", PATH=path, OUT=str(tmp_path), TRIAL="mine.py")
    steps = [line.split(" ", 1)[1] for line in done.stdout.splitlines()]
    assert done.returncode == 0 and len(steps) == 6 and all(line.startswith("== ") for line in done.stdout.splitlines())
    programs = ["check_imports.py", "rows_on_cuda.py", "graphs_on_cuda.py", "rows_on_cuda.py", "gpu.py", "mine.py"]
    assert all(program in step for program, step in zip(programs, steps, strict=True))
    assert "--tool racecheck" in steps[3]
    assert "--model llama3.1-8b --minutes 8.4 " in steps[4] and steps[4].endswith(f"--out {tmp_path} --part prefill")


def test_where_races_cannot_be_looked_for_it_fails():
    done = planned(PATH=f"{Path(sys.executable).parent}:/usr/bin:/bin")
    if "racecheck" not in done.stdout:
        assert done.returncode == 1 and "races were not looked for" in done.stderr
    assert "--model phi3-mini " in done.stdout


def test_a_played_run_goes_through_every_program():
    done = planned("tiny", PLAYED="1")
    assert done.returncode == 0 and done.stdout.count("tests/support/played_card.py") == 3


def test_short_parts_of_the_played_run(tmp_path):
    """Kernels interpreted and graphs as tapes, in a process of their own; the script itself runs all of them, in minutes."""

    def run() -> int:
        card = load_script("tests/support/played_card.py")
        card.play()
        return card.graphs(["answers", "attention"])

    status = status_of(start(run, tmp_path / "log"))
    said = (tmp_path / "log").read_text()
    assert status == 0, said
    assert "graph" in said.splitlines() and "attention by played, heads of 128" in said
    assert said.endswith("all are right\n")


def test_an_argument_in_the_place_of_the_model():
    done = planned("--part", "prefill")
    assert done.returncode == 2 and "MODEL=--part must be one of: phi3-mini, llama3.1-8b" in done.stderr


def test_a_missing_package_is_named_in_one_line(monkeypatch, capsys):
    """As on a machine with transformers and without pydantic."""
    script = load_script("scripts/check_imports.py")
    real = script.find_spec
    lacking = ("pydantic", "annotated_types")
    monkeypatch.setattr(script, "find_spec", lambda module: None if module in lacking else real(module))
    assert script.main() == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("on_card: missing: pydantic annotated-types (")
