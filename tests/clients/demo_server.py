"""``locret-serve`` over the demo backbone, as a program, for the clients of these tests."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BACKBONE, HEADS = ROOT / "checkpoints" / "SmolLM2-135M-Instruct", ROOT / "checkpoints" / "smollm2-135m-locret"
WORDS = [
    "--ckpt", str(HEADS), "--model", str(BACKBONE), "--budget", "1024", "--sessions", "2", "--dtype", "float32",
    "--temperature", "0", "--model-name", "demo",
]  # fmt: skip


@contextmanager
def served(*words: str) -> Iterator[str]:
    """The address of a server that is ready."""
    command = [sys.executable, "-m", "locret_kit.cli.serve", *WORDS, "--port", "0", *words]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    try:
        lines = []
        for line in server.stderr:
            lines.append(line)
            if line.startswith("ready: "):
                break
        else:
            pytest.fail("".join(lines))
        threading.Thread(target=server.stderr.read, daemon=True).start()
        yield next(line.strip() for line in lines if line.startswith("http://"))
    finally:
        server.terminate()
        server.wait(60)
