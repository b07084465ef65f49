"""Graphs on a CUDA device, where there is one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_graphs_equal_eager_and_dynamic_decoding():
    clean = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    clean["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    command = [sys.executable, str(ROOT / "tests" / "support" / "graphs_on_cuda.py")]
    done = subprocess.run(command, capture_output=True, text=True, env=clean)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
