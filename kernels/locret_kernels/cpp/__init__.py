"""C++ for CPUs, compiled where it first runs: the ``cpu.cpp`` of an operation's folder, with the headers of this one.

It needs a C++ compiler that knows OpenMP; ``Unavailable`` says where there is none. What is compiled is kept on disk, for this
processor and this source.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch

from .place import LOG, folder, is_ours
from .structs import POINTED as POINTED
from .structs import SUMS as SUMS
from .structs import Struct as Struct
from .structs import address as address

__all__: list[str] = []  # no operation

HEADERS = Path(__file__).parent
TYPES = {torch.float32: 32, torch.float64: 64, torch.bfloat16: 16}
"""Types of weights and rows. Sums are of float32, those of float64 of float64."""
FLAGS = (
    "-std=c++17",
    "-O3",
    "-march=native",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fopenmp",
    "-fPIC",
)
COMPILE_SECONDS = 120
DTYPES = (torch.float32, torch.bfloat16)
"""Types of rows, activations and hidden states; others are computed by the definitions."""
MAX_CHANNELS = 1024
"""Channels of the largest head."""
CHANNELS = (64, 96, 128, 256)
"""Channels of a head for which a call is compiled by itself; one for any number serves the others."""
STATISTICS = {"above": 1, "square": 2, "sum": 4}
"""Bits of the statistics that rows carry."""


Library = ctypes.CDLL
ADDRESS, NUMBER, INT, REAL = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_double
"""Types of arguments."""


class Unavailable(RuntimeError):
    """Error of a source that cannot be compiled or loaded here; says why in one line."""


def load(source: Path, *options: str, **calls: Sequence[type]) -> Library:
    """A source as a library; the first call on a machine compiles it.

    Args:
        options: of the compiler, beside the usual ones. calls: types of the arguments of its functions, which return nothing.

    Raises:
        Unavailable: another system, no compiler, or one that fails.
    """
    if sys.platform != "linux":
        raise Unavailable(f"it is built on Linux, not on {sys.platform}")
    name = os.environ.get("CXX", "g++")
    compiler = shutil.which(name)
    if compiler is None:
        raise Unavailable(f"no C++ compiler ({name}, or $CXX)")
    texts = (path.read_text("utf-8") for path in (source, *sorted(HEADERS.glob("*.h"))))
    made = hashlib.sha256("\0".join((*texts, *FLAGS, *options, _machine(), _version(compiler))).encode())
    try:
        library = folder() / f"{source.parent.name}-{made.hexdigest()[:24]}.so"
        if not is_ours(library):
            announce()
            _compile(compiler, source, options, library)
        loaded = ctypes.CDLL(str(library))
    except OSError as error:
        raise Unavailable(str(error)) from error
    for call, arguments in calls.items():
        function = getattr(loaded, call)
        function.argtypes, function.restype = arguments, None
    return loaded


def head_options(dtype: torch.dtype, channels: int) -> tuple[str, str]:
    """Options for rows of a type and heads of so many channels."""
    return f"-DTYPE={TYPES[dtype]}", f"-DCHANNELS={channels if channels in CHANNELS else 0}"


@cache
def announce() -> None:
    LOG.warning("compiling C++ for this processor: some seconds, once")


def _machine() -> str:
    """Text that tells processors apart for which code may differ."""
    known = Path("/proc/cpuinfo")
    lines = known.read_text("utf-8", errors="replace").splitlines() if known.exists() else []
    return "\n".join(
        sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))}) or [platform.machine()]
    )


def _version(compiler: str) -> str:
    return subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout


def _compile(compiler: str, source: Path, options: tuple[str, ...], library: Path) -> None:
    # PyTorch's own OpenMP, so that its threads and these are the same.
    own = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    with tempfile.TemporaryDirectory(dir=library.parent) as work:
        parts = str(Path(work) / "it.o"), str(Path(work) / "it.so")
        _run([compiler, *FLAGS, *options, f"-I{HEADERS}", "-c", str(source), "-o", parts[0]])
        _run([compiler, "-shared", parts[0], "-o", parts[1], *([str(own[0])] if own else ["-fopenmp"])])
        os.chmod(parts[1], 0o700)  # whatever the umask
        os.replace(parts[1], library)  # complete or not at all, whoever else compiles it now


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise Unavailable(f"{command[0]} took more than {COMPILE_SECONDS} s") from error
    if done.returncode:
        said = next((line for line in done.stderr.splitlines() if "error" in line), f"status {done.returncode}")
        raise Unavailable(f"{Path(command[0]).name} failed: {said}")
