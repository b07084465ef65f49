"""The host's memory for what was evicted: in which form rows are stored, how many bytes they may take, and whether a file's."""

from __future__ import annotations

import mmap
import os
import shutil
from dataclasses import dataclass
from math import prod
from pathlib import Path
from threading import Lock

import torch
from torch import Tensor

from locret_kernels.hadamard import hadamard

from ...sizes import show
from .packing import decode, encode, levels, pack, unpack, value_group

ALIGNMENT = 64
"""Bytes: where a buffer within a mapped file begins."""
_NAMING = Lock()
"""Held while a file has its name: caches of one process take the same one."""


@dataclass(frozen=True)
class RowForm:
    """How keys, or values, of ``size`` channels are stored: as they are, or in ``bits`` bits.

    Rows in few bits are rotated by a Hadamard matrix first, and have a step and a zero point for every ``value_group`` channels,
    as quantised values have (see ``quantised``): slots of a block come one by one, so a row is quantised by itself.
    """

    size: int
    dtype: torch.dtype
    bits: int | None = None

    @property
    def stored(self) -> torch.dtype:
        """Of the stored numbers."""
        return self.dtype if self.bits is None else torch.uint8

    @property
    def width(self) -> int:
        """Stored numbers of a row."""
        if self.bits is None:
            return self.size
        # Codes, then a float16 step and zero point of 2 bytes each for every group of channels.
        return self.size * self.bits // 8 + 2 * 2 * (self.size // value_group(self.size))

    @property
    def nbytes(self) -> int:
        """Bytes of a row."""
        return self.width * self.stored.itemsize

    def encode(self, x_MD: Tensor) -> Tensor:
        """Stored rows ``[M, width]``."""
        if self.bits is None:
            return x_MD
        x_MND = (x_MD.float() @ hadamard(self.size, x_MD.device)).unflatten(-1, (-1, value_group(self.size)))
        step, zero = levels(x_MND.amin(-1, keepdim=True), x_MND.amax(-1, keepdim=True), self.bits)
        # One stretch of bytes for a row, which `decode` cuts again: codes, steps, zero points.
        codes = encode(x_MND, step, zero, self.bits).flatten(1)
        limits = [limit.flatten(1).contiguous().view(torch.uint8) for limit in (step, zero)]
        return torch.cat((pack(codes, self.bits), *limits), -1)

    def decode(self, stored: Tensor) -> Tensor:
        """Rows ``[..., size]`` of stored ones ``[..., width]``."""
        if self.bits is None:
            return stored
        codes = self.size * self.bits // 8
        # clone: a pair of bytes is read as a float16 only where a float16 may begin.
        step, zero = (part.clone().view(torch.float16) for part in stored[..., codes:].chunk(2, -1))
        x = unpack(stored[..., :codes], self.bits).unflatten(-1, (-1, value_group(self.size)))
        rotated = decode(x, step[..., None], zero[..., None]).flatten(-2)
        return (rotated @ hadamard(self.size, stored.device)).to(self.dtype)


def check_new(path: str | Path) -> None:
    """Raise OSError where no new file of that name can be made: there is one, or no such folder."""
    _mapped(path, mmap.PAGESIZE).close()


def _mapped(path: str | Path, nbytes: int) -> mmap.mmap:
    """A new file in memory; only its owner may read it. It loses its name at once, so nothing is left whatever ends the process.

    Raises:
        FileExistsError: there is one of that name, which is left as it is. OSError: it cannot be made, or the disk is full.
    """
    try:
        with _NAMING:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            os.unlink(path)
    except FileExistsError:
        raise FileExistsError(f"store_file={path} is there already: name a new file, or remove that one") from None
    except OSError as error:
        raise OSError(f"store_file={path} cannot be made: {error.strerror}") from error
    try:
        os.posix_fallocate(file, 0, nbytes)  # now: a page that cannot be written later would end the process
        return mmap.mmap(file, nbytes)
    except OSError as error:
        free = shutil.disk_usage(Path(path).absolute().parent).free
        raise OSError(
            f"store_file={path}: {show(nbytes)} do not fit, {show(free)} are free ({error.strerror})"
        ) from error
    finally:
        os.close(file)


class HostMemory:
    """Memory of the stores of one cache.

    Args:
        limit: bytes, at most; None without a bound. path: a file for them; None is memory. layers: number of stores.
    """

    def __init__(self, limit: int | None = None, path: str | Path | None = None, layers: int = 1) -> None:
        self.limit, self.path, self.layers = limit, path, layers
        self._free: tuple[mmap.mmap, int] | None = None
        """The file that was mapped last, and where its room begins that is not given away."""

    def most(self, block_bytes: int) -> int | None:
        """Blocks of one store, of so many bytes, at most.

        Raises:
            ValueError: not one.
        """
        if self.limit is None:
            return None
        if self.limit < block_bytes * self.layers:
            least = f"{block_bytes * self.layers}, a block of each of {self.layers} layers"
            raise ValueError(f"store_memory={self.limit} bytes must be at least {least}")
        # Even shares: which layer will store most is not known before the text is read.
        return self.limit // self.layers // block_bytes

    def buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor whose numbers are anything.

        Raises:
            OSError: it does not fit on the disk, or there is a file of that name.
        """
        with torch.inference_mode(False):  # so that a prefill in inference mode may be gone on with outside of it
            if self.path is None:
                return torch.empty(shape, dtype=dtype, device="cpu")
            count = prod(shape)
            step = -(-count * dtype.itemsize // ALIGNMENT) * ALIGNMENT
            file, start = self._free or (None, 0)
            if file is None or start + step > len(
                file
            ):  # the layers' buffers are as large: one file for keys and values of all
                file, start = _mapped(self.path, 2 * self.layers * step), 0
            self._free = file, start + step
            return torch.frombuffer(file, dtype=dtype, count=count, offset=start).view(shape)

    def __deepcopy__(self, memo: object) -> HostMemory:
        return HostMemory(self.limit, self.path, self.layers)
