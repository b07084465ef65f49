"""One decoded token of each of several texts in one call, on a CPU: ``step.cpp``, compiled where it first runs. Beside it a
chunk of a prompt (``prefill.cpp``, see ``prefill``) and rows in few bits (``quantise.cpp``).

A decoded token reads every weight once and computes little, so its time is that of memory, unless hundreds of small
operations come between. Here a few threads stay in one function from the words to the logits, and read weights once for all
texts. It needs a C++ compiler that knows OpenMP; ``load`` says where there is none. What is compiled is kept on disk, for this
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
from functools import cache
from pathlib import Path

import numpy as np
import torch

from .place import folder, is_ours

__all__: list[str] = []  # no operation of other backends

SOURCE = Path(__file__).with_name("step.cpp")
"""Beside the headers that it includes."""
QUANTISER = SOURCE.with_name("quantise.cpp")
PREFILL = SOURCE.with_name("prefill.cpp")
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
CHANNELS = (64, 96, 128, 256)
"""Of a head, for which the step is compiled by itself; one for any number serves the others."""
MOST_CHANNELS = 1024

_I = np.int64  # numbers and addresses


def _linear(name: str) -> list[tuple[str, type]]:
    return [(name, _I), (f"{name}_bias", _I), (f"{name}_rows", _I), (f"{name}_halved", _I)]


LAYER = np.dtype(
    [(name, _I) for name in ("norm", "query_norm", "key_norm", "mlp_norm")]
    + [field for name in ("query", "key", "value", "out", "gate", "up", "down", "fc1", "fc2") for field in _linear(name)]
    + [(name, np.float64) for name in ("norm_eps", "head_eps", "mlp_eps", "scaling")]
)  # fmt: skip
DECODER = np.dtype(
    [(name, _I) for name in ("layers", "width", "query_heads", "heads", "channels", "vocabulary", "words", "norm")]
    + [("eps", np.float64), *_linear("head"), ("layer", _I)]
)
PACKED = np.dtype(
    [(name, _I) for name in (
        "key_codes", "value_codes", "group", "key_step", "key_zero", "value_step", "value_zero", "tail_keys", "tail_values",
        "bits", "group_bytes", "groups", "sharing", "value_groups", "tail_room", "tail",
    )]
)  # fmt: skip
ROWS = np.dtype(
    [(name, _I) for name in (
        "keys", "values", "positions", "scores", "stats", "starts", "lengths", "cos", "sin", "own_cos", "own_sin",
        "position", "rotated", "before", "window", "stats_stride", "statistics", "by_head", "packed",
    )]
)  # fmt: skip
GROUP = np.dtype(
    [(name, _I) for name in (
        "key_codes", "value_codes", "group", "key_step", "key_zero", "value_step", "value_zero", "tail_keys", "tail_values",
        "hadamard", "heads", "rows", "capacity", "channels", "bits", "groups", "value_group", "tail", "ready", "full", "pairs",
        "type", "keys", "values", "tail_room", "room",
    )]
)  # fmt: skip
ATTENTION = np.dtype(
    [(name, _I) for name in (
        "q", "k", "v", "out", "q_text", "q_head", "q_row", "k_text", "k_head", "k_row", "v_text", "v_head", "v_row", "texts",
        "queries", "heads", "tokens", "rows", "channels", "type", "cos", "sin", "q_cos", "q_sin", "rotated", "stats",
        "statistics", "by_head",
    )]
    + [("scaling", np.float64), ("margin", np.float64)]
)  # fmt: skip
STATISTICS = {"above": 1, "square": 2, "sum": 4}
"""Bits of the statistics that rows carry."""


class Unavailable(RuntimeError):
    """The step cannot be compiled or loaded here; says why in one line."""


@cache
def load(dtype: torch.dtype, channels: int) -> ctypes.CDLL:
    """The compiled step for weights of a type and heads of so many channels; the first call on a machine compiles it.

    Raises:
        Unavailable: another type or system, no compiler, or one that fails.
    """
    if channels > MOST_CHANNELS:
        raise Unavailable(f"heads of {channels} channels, more than {MOST_CHANNELS}")
    if dtype not in TYPES:
        raise Unavailable(f"weights of {str(dtype).removeprefix('torch.')}")
    loaded = _built(SOURCE, f"-DTYPE={TYPES[dtype]}", f"-DCHANNELS={channels if channels in CHANNELS else 0}")
    loaded.locret_step.argtypes = [
        ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int,
    ]  # fmt: skip
    loaded.locret_step.restype = None
    return loaded


@cache
def load_quantiser() -> ctypes.CDLL:
    """The compiled reading and quantising of rows in few bits. Raises Unavailable as ``load``."""
    loaded = _built(QUANTISER, "-ffp-contract=off")  # it rounds as tensors do
    loaded.locret_quantise.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int]
    loaded.locret_open.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_int]
    loaded.locret_quantise.restype = loaded.locret_open.restype = None
    return loaded


@cache
def load_prefill() -> ctypes.CDLL:
    """The compiled work on a chunk of a prompt. Raises Unavailable as ``load``."""
    loaded = _built(PREFILL)
    p, n, i = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    loaded.locret_attend.argtypes = [p, i]
    loaded.locret_rms_norm.argtypes = [p, p, p, ctypes.c_double, n, n, p, p, i, i]
    loaded.locret_swiglu.argtypes = [p, p, n, n, n, n, p, i, i]
    for call in (loaded.locret_attend, loaded.locret_rms_norm, loaded.locret_swiglu):
        call.restype = None
    return loaded


def _built(source: Path, *options: str) -> ctypes.CDLL:
    """A source, compiled unless it was."""
    if sys.platform != "linux":
        raise Unavailable(f"it is built on Linux, not on {sys.platform}")
    name = os.environ.get("CXX", "g++")
    compiler = shutil.which(name)
    if compiler is None:
        raise Unavailable(f"no C++ compiler ({name}, or $CXX)")
    texts = (path.read_text("utf-8") for path in (source, *sorted(source.parent.glob("*.h"))))
    made = hashlib.sha256("\0".join((*texts, *FLAGS, *options, _machine(), _version(compiler))).encode())
    try:
        library = folder() / f"{source.stem}-{made.hexdigest()[:24]}.so"
        if not is_ours(library):
            _compile(compiler, source, options, library)
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise Unavailable(str(error)) from error


def _machine() -> str:
    """What tells processors apart for which code may differ."""
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
        parts = str(Path(work) / "step.o"), str(Path(work) / "step.so")
        _run([compiler, *FLAGS, *options, "-c", str(source), "-o", parts[0]])
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
