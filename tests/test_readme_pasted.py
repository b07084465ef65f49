"""The README's blocks, pasted into a shell in a clean copy of the project, in their order."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import warm

ROOT = Path(__file__).resolve().parents[1]
BACKBONE = "checkpoints/SmolLM2-135M-Instruct"
BLOCKS = re.findall(r"```(bash|python)\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.S)
SETUP = "LOCRET_EXTRAS=documents,gguf,serve bash scripts/setup.sh && source .venv/bin/activate"
"""Left out: `scripts/test.sh`, which runs this test, has just done it."""
SHORTER = {
    "locret-train": " optim.steps=2 optim.warmup_steps=1 data.max_tokens=256 data.val_samples=1",
    "locret-ask": " --max-new-tokens 12",
}
"""Settings added to commands that take longer than a test may."""
QUESTION = "What is the pass key?"

pytestmark = pytest.mark.backbone


def pasted(kind: str, block: str) -> str:
    """A block as a shell reads it."""
    if kind == "python":
        return f"python - <<'PASTED'\n{block}PASTED\n"
    lines = [line for line in block.splitlines() if not line.startswith(SETUP)]
    return "\n".join(re.sub(r"( +#.*)?$", "", line) + SHORTER.get(line.split(" ")[0], "") for line in lines)


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


@pytest.mark.timeout(2400)
def test_every_block_runs(copy, tmp_path):
    """The first block as a shell starts it; from then on the kit's commands share their imports."""
    assert SETUP in BLOCKS[0][1]
    bin_folder = Path(sys.executable).parent
    env = {
        **os.environ, "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}", "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join([str(copy), str(copy / "kernels")]),
    }  # fmt: skip
    with warm.commands(tmp_path, env) as programs:
        for kind, block in BLOCKS:
            done = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", pasted(kind, block)],
                cwd=copy,
                env=env,
                capture_output=True,
                text=True,
            )
            assert done.returncode == 0, f"{block}\n{done.stdout[-1000:]}\n{done.stderr[-2000:]}"
            if QUESTION in block:  # a clean copy and the README alone lead to the right answer
                key = env.get("KEY") or re.search(r"expected answer: (\d+)", done.stderr)[1]
                env |= {"KEY": key, "PATH": f"{programs}{os.pathsep}{env['PATH']}"}
                assert key in done.stdout, block


def test_what_is_added_is_the_only_difference():
    """The blocks are run as they stand but for comments, the set-up line and settings at a command's end."""
    for kind, block in BLOCKS:
        if kind == "bash":
            text = pasted(kind, block)
            for more in SHORTER.values():
                text = text.replace(more, "")
            assert (
                re.sub(r"( +#.*)?$", "", block.replace(SETUP, ""), flags=re.M).split() == text.split() or SETUP in block
            )
