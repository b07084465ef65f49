"""C++ for CPUs, compiled where it first runs: the ``cpu.cpp`` of an operation's folder, with the headers of this
one.

It needs a C++ compiler with OpenMP; ``Unavailable`` reports that there is none. The compiled library is kept on disk,
for this processor and this source.
"""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import logging
import os
import platform
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

# ---- structs that compiled calls read -------------------------------------------------------------------------------

# Declared in C++ alone, and read from there; and the check of what their pointers point to.

POINTED = {
    "float": torch.float32, "double": torch.float64, "i64": torch.int64, "int32_t": torch.int32, "int16_t": torch.int16,
    "uint8_t": torch.uint8, "f16": torch.float16, "void": None,
}  # fmt: skip
"""Type of C++ -> type of a tensor; None is any. ``Weights`` and ``Sums`` are the call's own (``Struct.point``)."""
SUMS = {torch.float32: torch.float32, torch.float64: torch.float64, torch.bfloat16: torch.float32}
"""Type of weights and rows -> type of sums."""


def address(x: Tensor | None, dtype: torch.dtype | None, name: str = "tensor", *, strided: bool = False) -> int:
    """Address of a tensor of any shape, for compiled code to read or write; 0 of None.

    Args:
        dtype: the code's dtype; None takes any. strided: the call knows the strides, but for the last, which is 1.

    Raises:
        TypeError: another type or device, or numbers that do not lie one after another: they would be misread.
    """
    if x is None:
        return 0
    lies = x.is_contiguous() or (strided and x.stride(-1) == 1)
    if not (lies and x.is_cpu and (dtype is None or x.dtype is dtype)):
        wanted = f"{dtype or x.dtype} on cpu, side by side"
        raise TypeError(f"{name} is {x.dtype} on {x.device} with strides {x.stride()}: it must be {wanted}")
    return x.data_ptr()


class Struct:
    """A struct of C++: fields of ``i64``, ``double``, pointers and other structs.

    Attributes:
        dtype: of numpy; a field that is a struct has fields of its own. points: field -> its target's type, or None.
    """

    def __init__(self, source: Path, name: str, **parts: Struct) -> None:
        """Read the struct ``name`` of a file.

        Args:
            parts: structs that are fields, by name.

        Raises:
            ValueError: a declaration of another kind.
        """
        form = {"i64": np.int64, "double": np.float64} | {part: x.dtype for part, x in parts.items()}
        body = re.search(rf"^struct {name} {{(.*?)}};", re.sub("//.*", "", source.read_text("utf-8")), re.S | re.M)
        if body is None:
            raise ValueError(f"{source.name} has no struct {name}")
        fields, self.points = [], dict[str, str | None]()
        for line in filter(None, map(str.strip, body[1].split(";"))):
            kind, names = line.removeprefix("const ").split(maxsplit=1)
            for field in re.split(r",\s*", names):
                pointer, plain = field.startswith("*"), field.removeprefix("*")
                if not plain.isidentifier() or not (pointer or kind in form):
                    raise ValueError(f"{source.name}: struct {name} has {line!r}, which is no field that calls take")
                fields.append((plain, np.int64 if pointer else form[kind]))
                self.points[plain] = kind if pointer else None
        self.dtype = np.dtype(fields)

    def point(
        self, at: np.ndarray, dtype: torch.dtype | None = None, *, strided: bool = False, **values: object
    ) -> None:
        """Write some fields by name: a number or an address as it is, the address of a tensor, 0 for None. Who calls keeps the
        tensors alive.

        Args:
            dtype: of ``Weights``; that of ``Sums`` follows from it. strided: see ``address``.

        Raises:
            TypeError: a tensor that ``address`` refuses.
        """
        for name, x in values.items():
            kind = self.points[name]
            if not (x is None or kind is None or type(x) is int):  # isinstance of a Tensor takes a microsecond
                pointed = dtype if kind == "Weights" else SUMS[dtype] if kind == "Sums" else POINTED[kind]
                x = address(x, pointed, name, strided=strided)
            at[name] = x or 0

    def of(self, dtype: torch.dtype | None = None, *, strided: bool = False, **values: object) -> np.ndarray:
        """One struct, written as by ``point``.

        Raises:
            TypeError: a tensor that ``address`` refuses; fields that are missing or unknown.
        """
        if values.keys() != self.points.keys():
            raise TypeError(f"fields that are missing or unknown: {sorted(values.keys() ^ self.points.keys())}")
        at = np.zeros((), self.dtype)
        self.point(at, dtype, strided=strided, **values)
        return at


# ---- the folder of compiled code ------------------------------------------------------------------------------------

# What is loaded from there runs as this process, so nobody else may be able to put it there.

LOG = logging.getLogger("locret_kernels")
OTHERS = stat.S_IWGRP | stat.S_IWOTH


def preferred() -> Path:
    """``$XDG_CACHE_HOME/locret_kit``, by default in ``~/.cache``; in the temporary folder for users without a home."""
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return Path(base) / "locret_kit" if base else Path.home() / ".cache" / "locret_kit"
    except RuntimeError:  # no home
        return Path(tempfile.gettempdir()) / f"locret_kit-{os.geteuid()}"


@cache
def folder() -> Path:
    """Folder of compiled code: ``preferred``, or, where others could put files there, one of this process alone. A line of
    the log reports that.

    Raises:
        OSError: others could put files there too, or it cannot be made.
    """
    path = preferred().absolute()
    path = path.parent.resolve() / path.name  # whoever owns a link above may turn it elsewhere, later
    try:
        made(path)
        return path
    except OSError as error:
        private = Path(tempfile.mkdtemp(prefix="locret_kit.")).resolve()
        atexit.register(shutil.rmtree, private, ignore_errors=True)
        made(private)
        LOG.warning("compiled code is not kept, and each process compiles anew: %s", error)
        return private


def made(folder: Path) -> None:
    """Make a folder and its missing parents, for this user alone.

    Args:
        folder: an absolute path without links above its last part.

    Raises:
        OSError: it cannot be made, or users besides this one and root can put files there. Then it is a link, belongs to
            another, or others may write there or to a folder above it that is not sticky.
    """
    for path in (*reversed(folder.parents), folder):
        if not os.path.lexists(path):
            path.mkdir(0o700, exist_ok=True)
        found, last = path.lstat(), path == folder
        if not stat.S_ISDIR(found.st_mode):
            raise OSError(f"{path} is no folder, or a link to one")
        if found.st_uid != os.geteuid() and (last or found.st_uid != 0):
            raise OSError(f"{path} belongs to user {found.st_uid}, not to {os.geteuid()}")
        if found.st_mode & OTHERS and (last or not found.st_mode & stat.S_ISVTX):
            raise OSError(f"others may write to {path}: chmod go-w takes that away")


def is_ours(file: Path) -> bool:
    """Whether a file of ``folder`` is a regular file of this user that nobody else may write to."""
    if not os.path.lexists(file):
        return False
    found = file.lstat()
    return stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & OTHERS


# ---- compiling ------------------------------------------------------------------------------------------------------

HEADERS = Path(__file__).parent
TYPES = {torch.float32: 32, torch.float64: 64, torch.bfloat16: 16}
"""Types of weights and rows. Sums are of float32, those of float64 of float64."""
FLAGS = (
    "-std=c++17", "-O3", "-march=native", "-fopenmp", "-fPIC", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math",
)  # fmt: skip
COMPILE_SECONDS = 600
"""Limit of a compilation by the clock: a busy machine takes ten times the processor seconds, and more."""
DTYPES = (torch.float32, torch.bfloat16)
"""Types of rows, activations and hidden states; others are computed by the definitions."""
MAX_CHANNELS = 1024
"""Channels of the largest head."""
CHANNELS = (64, 96, 128, 256)
"""Head sizes with a compiled call of their own; one call for any head size serves the others."""
STATISTICS = {"above": 1, "square": 2, "sum": 4}
"""Bits of the statistics that rows carry."""


Library = ctypes.CDLL
ARGUMENTS = {"*": ctypes.c_void_p, "i64 ": ctypes.c_int64, "int ": ctypes.c_int}
"""Mark of an argument's declaration -> its type; the first one that is there counts."""


class Unavailable(RuntimeError):
    """Error of a source that cannot be compiled or loaded here; says why in one line."""


@cache
def load(source: Path, *options: str) -> Library:
    """A source as a library; the first call on a machine compiles it. Its functions return nothing, and their arguments are read
    from their declarations.

    Args:
        options: of the compiler, besides the usual ones.

    Raises:
        Unavailable: another system, no compiler, or one that fails.
    """
    if sys.platform != "linux":
        raise Unavailable(f"it is built on Linux, not on {sys.platform}")
    name = os.environ.get("CXX", "").strip() or "g++"
    compiler = (name,) if shutil.which(name) else tuple(name.split())  # it may be of several words: ccache g++
    if shutil.which(compiler[0]) is None:
        raise Unavailable(f"no C++ compiler ({name}, or $CXX)")
    texts = [path.read_text("utf-8") for path in (source, *sorted(HEADERS.glob("*.h")))]
    made = hashlib.sha256("\0".join((*texts, *FLAGS, *options, _machine(compiler))).encode())
    try:
        library = folder() / f"{source.parent.name}-{made.hexdigest()[:24]}.so"
        if not is_ours(library):
            announce()
            with _alone(library.parent):
                if not is_ours(library):  # by another process, meanwhile
                    _compile(compiler, source, options, library)
        loaded = ctypes.CDLL(str(library))
    except OSError as error:
        raise Unavailable(str(error)) from error
    for call, given in re.findall(r'^extern "C" void (\w+)\((.*?)\)', texts[0], re.S | re.M):
        function, declared = getattr(loaded, call), given.split(",")
        function.argtypes = [next(form for mark, form in ARGUMENTS.items() if mark in one) for one in declared]
        function.restype = None
    return loaded


@cache
def runs(source: Path, *options: str) -> bool:
    """Whether ``load`` gives a source here. It is asked once, before the first token that needs it; why not is logged."""
    try:
        load(source, *options)
    except Unavailable as error:
        LOG.warning("%s runs by PyTorch's operations alone, which is slower here: %s", source.parent.name, error)
        return False
    return True


def head_options(dtype: torch.dtype, channels: int) -> tuple[str, str]:
    """Compiler options for rows of a dtype and heads of ``channels`` channels."""
    return f"-DTYPE={TYPES[dtype]}", f"-DCHANNELS={channels if channels in CHANNELS else 0}"


@cache
def announce() -> None:
    LOG.warning("compiling C++ for this processor: some seconds, once")


@cache
def _machine(compiler: tuple[str, ...]) -> str:
    """Text that tells compilers and processors apart where compiled code may differ."""
    version = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=False).stdout
    known = Path("/proc/cpuinfo")
    lines = known.read_text("utf-8", errors="replace").splitlines() if known.exists() else []
    own = sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))})
    return "\n".join([version, *(own or [platform.machine()])])


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """A block for one process at a time, where the file system has locks: those that start together compile a source once."""
    import fcntl  # not on Windows

    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_UN)  # a forked process has the handle too
        os.close(handle)


def _compile(compiler: tuple[str, ...], source: Path, options: tuple[str, ...], library: Path) -> None:
    # PyTorch's own OpenMP, so that its threads and these are the same.
    own = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    with tempfile.TemporaryDirectory(dir=library.parent) as work:
        parts = str(Path(work) / "it.o"), str(Path(work) / "it.so")
        _run([*compiler, *FLAGS, *options, f"-I{HEADERS}", "-c", str(source), "-o", parts[0]])
        _run([*compiler, "-shared", parts[0], "-o", parts[1], *([str(own[0])] if own else ["-fopenmp"])])
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
