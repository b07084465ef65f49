"""Attention of one new token over heads that hold different numbers of rows, in full or in few bits."""

from .reference import Decoded, PackedRows, packed_decode, ragged_decode

__all__ = ["Decoded", "PackedRows", "packed_decode", "ragged_decode"]
