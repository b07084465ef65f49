"""Structs that compiled calls read: declared in C++ alone, and read from there; and the check of what their pointers point to."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

POINTED = {
    "float": torch.float32, "double": torch.float64, "i64": torch.int64, "int32_t": torch.int32, "int16_t": torch.int16,
    "uint8_t": torch.uint8, "f16": torch.float16, "void": None,
}  # fmt: skip
"""Type of C++ -> type of a tensor; None is any. ``Weights`` and ``Sums`` are the call's own (``Struct.point``)."""
SUMS = {torch.float32: torch.float32, torch.float64: torch.float64, torch.bfloat16: torch.float32}
"""Type of weights and rows -> type of sums."""


def address(x: Tensor | None, dtype: torch.dtype | None, name: str = "tensor", *, strided: bool = False) -> int:
    """Address of a tensor that compiled code reads or writes; 0 of None.

    Args:
        dtype: what the code takes; None is any. strided: the call knows the strides, but for the last, which is 1.

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
        dtype: of numpy; a field that is a struct has fields of its own. points: field -> what it points to, or None.
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
        self, at: np.ndarray, dtype: torch.dtype | None = None, *, strided: bool = False, **tensors: Tensor
    ) -> None:
        """Write the addresses of tensors into the fields of their names; who calls keeps the tensors alive.

        Args:
            dtype: of ``Weights``; that of ``Sums`` follows from it. strided: as of ``address``.

        Raises:
            TypeError: as of ``address``.
        """
        for name, x in tensors.items():
            at[name] = address(x, self._pointed(name, dtype), name, strided=strided)

    def of(self, dtype: torch.dtype | None = None, **values: object) -> np.ndarray:
        """One struct, with a tensor, None or an address for each pointer.

        Raises:
            TypeError: as of ``address``; fields that are missing or unknown.
        """
        if values.keys() != self.points.keys():
            raise TypeError(f"fields that are missing or unknown: {sorted(values.keys() ^ self.points.keys())}")
        found = []
        for name, kind in self.points.items():
            x = values[name]
            known = x is None or kind is None or type(x) is int  # isinstance of a Tensor takes a microsecond
            found.append(x or 0 if known else address(x, self._pointed(name, dtype), name))
        return np.array(tuple(found), self.dtype)

    def _pointed(self, name: str, dtype: torch.dtype | None) -> torch.dtype | None:
        kind = self.points[name]
        return dtype if kind == "Weights" else SUMS[dtype] if kind == "Sums" else POINTED[kind]
