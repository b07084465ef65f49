"""Formats of matrices in few bits: ggml's quantised blocks, as a GGUF file holds them.

A row of numbers is a row of blocks. A block holds an integer code of each of its numbers, and steps and lowest numbers of groups
of them. Source: ``ggml-common.h`` and ``ggml-quants.c`` of ggml.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Format:
    """Sizes of a format.

    Attributes:
        block: numbers of a block. nbytes: bytes of a block. group: numbers that share a step. halves: bytes of a block at which
            a float16 number begins.
    """

    block: int
    nbytes: int
    group: int
    halves: tuple[int, ...]

    def columns(self, row_bytes: int) -> int:
        """Numbers of a row of so many bytes."""
        return row_bytes // self.nbytes * self.block

    def row_bytes(self, columns: int) -> int:
        """Bytes of a row of so many numbers.

        Raises:
            ValueError: they do not fill whole blocks.
        """
        if columns % self.block:
            raise ValueError(f"columns={columns} must be a multiple of {self.block}, a block")
        return columns // self.block * self.nbytes


FORMATS = {
    "Q4_0": Format(32, 18, 32, (0,)),
    "Q4_1": Format(32, 20, 32, (0, 2)),
    "Q5_0": Format(32, 22, 32, (0,)),
    "Q5_1": Format(32, 24, 32, (0, 2)),
    "Q8_0": Format(32, 34, 32, (0,)),
    "Q4_K": Format(256, 144, 32, (0, 2)),
    "Q5_K": Format(256, 176, 32, (0, 2)),
    "Q6_K": Format(256, 210, 16, (208,)),
}
"""Name, as ``GGMLQuantizationType`` has it -> sizes."""


def format_of(name: str) -> Format:
    """The format of a name.

    Raises:
        ValueError: an unknown one.
    """
    if name not in FORMATS:
        raise ValueError(f"form={name!r} must be one of: {', '.join(FORMATS)}")
    return FORMATS[name]
