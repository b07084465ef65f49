"""The real Hub client in a process of its own, since it reads its address once, when it is imported."""

import json
import os
import subprocess
import sys
from pathlib import Path

from import_graph import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
PRELUDE = (
    f"COMMANDS = {COMMANDS!r}"
    + """
import io, json, os, sys
from contextlib import redirect_stderr, redirect_stdout
def cli(name, *argv, stdin=""):
    from importlib import import_module
    out, err = io.StringIO(), io.StringIO()
    sys.stdin = io.TextIOWrapper(io.BytesIO(stdin.encode()))
    with redirect_stdout(out), redirect_stderr(err):
        module, main = COMMANDS[name]
        status = getattr(import_module(module), main)(list(argv))
    return status, out.getvalue(), err.getvalue()
def report(**values):
    print("REPORT", json.dumps(values))
def load(name, **more):
    from locret_kit import RetainingHeads
    try:
        return RetainingHeads.from_pretrained(name, **more).config.backbone
    except (OSError, ValueError) as error:
        return str(error)
"""
)


def client(hub_url: str, cache: Path, code: str, *argv: str, **env: str) -> dict:
    """Run ``code`` in a fresh process whose Hub is ``hub_url``; what it reports."""
    keep = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
    settings = {
        "HF_ENDPOINT": hub_url, "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(cache), "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}",
    }  # fmt: skip
    run = subprocess.run(
        [sys.executable, "-c", PRELUDE + code, *argv], env={**keep, **settings, **env}, capture_output=True, text=True,
        timeout=900,
    )  # fmt: skip
    lines = [line for line in run.stdout.splitlines() if line.startswith("REPORT ")]
    assert run.returncode == 0 and lines, run.stdout[-2000:] + run.stderr[-3000:]
    return {k: v for line in lines for k, v in json.loads(line[7:]).items()}
