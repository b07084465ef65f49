"""The README's commands, pasted into a shell in a clean copy of the project: the first answer, and one about a file of it."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BACKBONE = "checkpoints/SmolLM2-135M-Instruct"
BLOCKS = re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.S)
LINES = [re.sub(r"( +#.*)?$", "", line) for block in BLOCKS for line in block.splitlines()]
RUNS = {
    "bash scripts/demo.sh": (" 1536", ""),
    'locret-infer SECURITY.md --question "How do I report a vulnerability?"': ("", "privately"),
}
"""Commands that answer, each with arguments that make it shorter, and a word of a right answer where it says none itself. Others
install, or run this test."""

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
def test_every_command_answers_right(copy, env):
    """As it stands, but for comments and the length of the demo's text."""
    assert RUNS.keys() < set(LINES)
    for line, (shorter, word) in RUNS.items():
        command = ["bash", "-euo", "pipefail", "-c", line + shorter]
        done = subprocess.run(command, cwd=copy, env=env, capture_output=True, text=True)
        assert done.returncode == 0, f"{line}\n{done.stdout[-1000:]}\n{done.stderr[-2000:]}"
        expected = re.search(r"expected answer: (\d+)", done.stderr)
        assert (expected[1] if expected else word) in done.stdout, f"{line}\n{done.stdout}"
