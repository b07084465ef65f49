"""The README's commands that answer: the first one pasted into a shell in a clean copy of the project."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from locret_kit.cli.infer import main

ROOT = Path(__file__).resolve().parents[2]
BACKBONE = "checkpoints/SmolLM2-135M-Instruct"
BLOCKS = re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.S)
LINES = [re.sub(r"( +#.*)?$", "", line) for block in BLOCKS for line in block.splitlines()]
DEMO, ASKED = "bash scripts/demo.sh", 'locret-infer SECURITY.md --question "How do I report a vulnerability?"'
"""Commands that answer. Others install, or run this test."""

pytestmark = pytest.mark.backbone


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    """The files that git has, the backbone, and nothing else."""
    folder = tmp_path_factory.mktemp("clone")
    names = subprocess.check_output(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, text=True).splitlines()
    for name in names:
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    (folder / BACKBONE).symlink_to(ROOT / BACKBONE)
    return folder


@pytest.fixture
def env(copy, tmp_path) -> dict[str, str]:
    """An environment in which setup.sh finds everything done: this one's programs, and the mark that it leaves."""
    programs = tmp_path / "venv" / "bin"
    programs.mkdir(parents=True)
    (programs / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (programs / "locret-infer").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m locret_kit.cli.infer "$@"\n')
    for program in programs.iterdir():
        program.chmod(0o755)
    files = b"".join((copy / name).read_bytes() for name in ("pyproject.toml", "constraints.txt"))
    (tmp_path / "venv" / ".locret-setup").write_text(f"{hashlib.sha256(files).hexdigest()} {copy} dev\n")
    return {
        **os.environ, "VIRTUAL_ENV": str(tmp_path / "venv"), "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join([str(copy), str(copy / "kernels")]),
    }  # fmt: skip


@pytest.mark.timeout(1200)
def test_the_demo_answers_right(copy, env):
    """As it stands, but for the comment and the length of its text."""
    assert DEMO in LINES
    done = subprocess.run(["bash", *f"{DEMO} 768".split()[1:]], cwd=copy, env=env, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout[-1000:]}\n{done.stderr[-2000:]}"
    assert re.search(r"expected answer: (\d+)", done.stderr)[1] in done.stdout


def test_a_file_of_the_project_is_answered_right(command, monkeypatch):
    """In this process, which has imported what the command imports."""
    assert ASKED in LINES
    monkeypatch.chdir(ROOT)
    status, said, error = command(main, *shlex.split(ASKED)[1:])
    assert status == 0 and "privately" in said, f"{said}\n{error}"
