"""How a command's CPU threads wait, and how many there are."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from locret_kit import processes
from locret_kit.planning import text_budget
from locret_kit.processes import control_groups, cores_allowed

LIBRARY = next((Path(find_spec("torch").origin).parent / "lib").glob("libgomp*.so*"), "libgomp.so.1")
"""OpenMP as PyTorch loads it, without the seconds that the rest of PyTorch takes."""
SHOW = "from locret_kit.cli.command import command\n@command('x')\ndef main():\n    import ctypes\n"
SHOW += f"    ctypes.CDLL('{LIBRARY}')\n    return 0\nmain()"


def shown(**env: str) -> dict[str, str]:
    """The settings that OpenMP's own library says it runs a command with."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    done = subprocess.run(
        [sys.executable, "-c", SHOW], env={**clean, "OMP_DISPLAY_ENV": "true", **env}, capture_output=True, text=True, check=True
    )  # fmt: skip
    return dict(re.findall(r"(OMP_\w+) = '(\w+)'", done.stderr))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the variables of libgomp")
def test_threads_of_a_command_sleep_while_they_wait():
    assert shown()["OMP_WAIT_POLICY"] == "PASSIVE"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the variables of libgomp")
def test_the_user_decides():
    found = shown(OMP_WAIT_POLICY="active", OMP_NUM_THREADS="3")
    assert found["OMP_WAIT_POLICY"] == "ACTIVE" and found["OMP_NUM_THREADS"] == "3"


@pytest.mark.parametrize(
    ("text", "cores"),
    [("200000 100000\n", 2), ("150000 100000", 2), ("5000 100000", 1), ("max 100000", None), ("", None), (None, None)],
)
def test_a_containers_quota(tmp_path, monkeypatch, text, cores):
    monkeypatch.setattr(processes, "GROUPS", tmp_path)
    if text is not None:
        (tmp_path / "cpu.max").write_text(text)
    assert cores_allowed() == cores


@pytest.mark.parametrize(
    ("lines", "groups"),
    [("0::/\n", [""]), ("2:cpu:/x\n0::/job/step\n", ["job/step", "job", ""]), ("0::/../other\n", [""]), (None, [""])],
)
def test_control_groups_are_the_processs_own_and_those_above(tmp_path, monkeypatch, lines, groups):
    monkeypatch.setattr(processes, "GROUPS", tmp_path)
    monkeypatch.setattr(processes, "GROUP", tmp_path / "cgroup")
    if lines is not None:
        (tmp_path / "cgroup").write_text(lines)
    assert control_groups() == [tmp_path / group for group in groups]


def test_the_least_bound_of_a_job_and_of_its_step_counts(tmp_path, monkeypatch):
    """Memory and cores, wherever a scheduler or systemd has put the bound."""
    monkeypatch.setattr(processes, "control_groups", lambda: [tmp_path / "job/step", tmp_path / "job", tmp_path])
    monkeypatch.setattr(text_budget, "control_groups", processes.control_groups)
    (tmp_path / "job/step").mkdir(parents=True)
    for name, text in (
        ("job/step/cpu.max", "max 100000"),
        ("job/cpu.max", "200000 100000"),
        ("cpu.max", "900000 100000"),
    ):
        (tmp_path / name).write_text(text)
    for name, text in (("job/step/memory.max", "max"), ("job/memory.max", "3000"), ("job/memory.current", "1000")):
        (tmp_path / name).write_text(text)
    (tmp_path / "job/memory.stat").write_text("inactive_file 400\n")
    assert cores_allowed() == 2
    assert text_budget.free_memory(torch.device("cpu")) == 3000 - 1000 + 400


@pytest.mark.parametrize(("own", "threads"), [(2, None), (3, None), (8, "3")])
def test_a_quota_counts_beside_the_cores_that_are_the_process_s_own(own, threads, tmp_path, monkeypatch):
    """OpenMP knows those: a quota of more would have more threads than cores."""
    (tmp_path / "cpu.max").write_text("300000 100000")
    monkeypatch.setattr(processes, "GROUPS", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {*range(own)}, raising=False)
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    monkeypatch.delenv("OMP_NUM_THREADS")
    processes.choose_threads()
    assert os.environ.get("OMP_NUM_THREADS") == threads
