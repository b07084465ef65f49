"""Origin of a figure: versions and commit; and the peak memory of a process."""

import re
import resource
import subprocess
import sys
from functools import lru_cache
from importlib import import_module
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
"""Folder of the checkout, where there is one."""


def versions(*packages: str) -> dict[str, str]:
    """Version of each package."""
    return {name: import_module(name).__version__ for name in packages}


@lru_cache(maxsize=1)
def commit(root: Path) -> str | None:
    """Commit that is checked out in ``root``, with ``-dirty`` where files differ from it. None where ``root`` is no checkout
    of its own."""
    if not (root / ".git").exists():
        return None
    describe = "describe --always --dirty --exclude=* --abbrev=12"
    return output("git", "--no-optional-locks", "-C", str(root), *describe.split())


def peak_memory(device: torch.device) -> int:
    """Peak allocation of a CUDA device, or the process's peak resident size, in bytes."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if status.exists() and (own := re.search(r"^VmHWM:\s+(\d+) kB$", status.read_text("utf-8"), re.M)):
        return int(own[1]) * 1024  # of a program that a larger one has started, the line below says that one's
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kilobytes if sys.platform == "darwin" else kilobytes * 1024  # macOS counts bytes


def output(*command: str) -> str | None:
    """First thing a command says; None where it fails or says nothing."""
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return said.stdout.strip() or None
