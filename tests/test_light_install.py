"""Inference without the extras: nothing of training, evaluation or the harness has to be installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_tokenizer import TEXT, save_tiny_backbone

ROOT = Path(__file__).resolve().parents[1]
EXTRAS = (
    "lightning",
    "pytorch_lightning",
    "deepspeed",
    "datasets",
    "tensorboard",
    "peft",
    "matplotlib",
    "lm_eval",
    "bitsandbytes",
)
HIDE = f"""
import sys
from importlib.machinery import PathFinder

class Rest(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.split(".")[0] in {EXTRAS!r} else super().find_spec(name, path, target)

sys.meta_path = [Rest if finder is PathFinder else finder for finder in sys.meta_path]
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process in which the extras' modules cannot be found."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "kernels")))}
    return subprocess.run([sys.executable, "-c", HIDE + code], env=env, capture_output=True, text=True)


def test_the_extras_are_hidden():
    assert "ModuleNotFoundError: No module named 'lightning'" in run("import lightning").stderr


def test_an_answer_needs_no_extra(tmp_path):
    backbone = save_tiny_backbone(tmp_path / "backbone")
    (tmp_path / "long.txt").write_text(TEXT * 4)
    words = [
        "--model",
        str(backbone),
        "--policy",
        "snapkv",
        "--budget",
        "48",
        "--max-new-tokens",
        "3",
        str(tmp_path / "long.txt"),
    ]
    done = run(f"from locret_kit.cli.infer import main\nsys.exit(main({words!r}))")
    assert done.returncode == 0 and done.stdout.strip(), done.stderr


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("infer", ["--help"]), ("train", ["--help"]), ("eval", ["--help"]), ("plan", ["--help"]), ("publish", ["--help"]),
        ("read", ["--help"]), ("info", ["--help"]), ("ask", ["--help"]), ("kept", ["--help"]), ("chat", ["--help"]),
        ("plan", ["--model", "phi3-mini", "--gpu-memory", "24GiB"]),
    ],
)  # fmt: skip
def test_help_and_plans_need_no_extra(command, words):
    done = run(f"from locret_kit.cli.{command} import main\nsys.exit(main({words!r}))")
    assert done.returncode == 0 and done.stdout, done.stderr


def test_a_missing_extra_is_one_line_that_says_how_to_install_it(tmp_path):
    backbone = save_tiny_backbone(tmp_path / "backbone")
    words = ["recipe=tiny", f"backbone.model={backbone}", f"out={tmp_path / 'out'}"]
    done = run(f"from locret_kit.cli.train import main\nsys.exit(main({words!r}))")
    assert done.returncode == 1
    assert done.stderr.strip() == "locret-train: No module named 'lightning': pip install 'locret-kit[train]'"


def test_names_and_types_for_users():
    done = run("import locret_kit; print(dir(locret_kit)); print(any(name == 'torch' for name in sys.modules))")
    assert "'BoundedCache'" in done.stdout and done.stdout.rstrip().endswith("False")
    assert (ROOT / "locret_kit" / "py.typed").exists()
