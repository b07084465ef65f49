"""Inference without the extras: nothing of training, evaluation or the harness has to be installed."""

import json
import os
import subprocess
import sys
from pathlib import Path

from import_graph import COMMANDS
from tiny_tokenizer import TEXT, save_tiny_backbone

ROOT = Path(__file__).resolve().parents[2]
EXTRAS = (
    "lightning", "pytorch_lightning", "deepspeed", "datasets", "tensorboard", "peft", "matplotlib", "lm_eval", "bitsandbytes",
    "bm25s",
)  # fmt: skip
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


def test_an_answer_and_a_plan_need_no_extra_and_a_training_names_its_own(tmp_path):
    backbone = save_tiny_backbone(tmp_path / "backbone")
    (tmp_path / "long.txt").write_text(TEXT * 4)
    ask = [str(tmp_path / "long.txt"), "--model", str(backbone), "--policy=snapkv", "--budget=48", "--max-new-tokens=3"]
    plan = ["--model", "phi3-mini", "--gpu-memory", "24GiB"]
    train = ["recipe=tiny", f"backbone.model={backbone}", f"out={tmp_path / 'out'}"]
    lacking = [*train, "data.sources=[none.jsonl]"]  # which is said before any extra is loaded
    done = run(
        "from locret_kit.cli import infer, plan, train\n"
        f"assert not infer.main({ask!r}); print('====')\nassert not plan.main({plan!r})\nassert train.main({lacking!r}) == 1\n"
        f"sys.exit(train.main({train!r}))"
    )
    answer, planned = done.stdout.split("====\n")
    assert done.returncode == 1 and answer.strip() and planned, done.stderr
    missing = "locret-train: No module named 'lightning': in the clone, pip install -e '.[train]'"
    assert done.stderr.splitlines()[-1] == missing
    assert "locret-train: data.sources: source=none.jsonl does not exist" in done.stderr


HEAVY = {"torch", "transformers", "pydantic", "yaml", "triton"}
HELP = {
    "ask": ["--question-file"], "chat": ["--history-file"], "eval": ["--policies", "lm_eval"], "infer": ["--budget"],
    "info": [], "kept": [], "plan": ["--gpu-memory"], "publish": [], "read": [], "serve": ["--sessions"], "train": ["recipe="],
    "vllm": ["--sessions"],
}  # fmt: skip
"""Every command, and what its help names."""
EACH_HELP = f"""
import io, json, locret_kit
from contextlib import redirect_stdout
from importlib import import_module

for name, (module, main) in {COMMANDS!r}.items():
    with redirect_stdout(io.StringIO()) as said:
        status = getattr(import_module(module), main)(["--help"])
    print(json.dumps([name, status, said.getvalue(), sorted({HEAVY!r} & set(sys.modules))]))
assert "BoundedCache" in dir(locret_kit)
"""


def test_help_needs_no_extra_and_loads_nothing_heavy():
    done = run(EACH_HELP)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert {name for name, *_ in lines} == HELP.keys(), done.stderr
    assert done.returncode == 0 and (ROOT / "locret_kit" / "py.typed").exists(), done.stderr
    for name, status, said, heavy in lines:
        assert (status, heavy) == (0, []) and said.startswith(f"usage: locret-{name}"), name
        assert all(words in said for words in HELP[name]), name
