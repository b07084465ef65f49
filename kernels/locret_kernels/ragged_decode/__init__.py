"""Attention of one new token over heads that hold different numbers of rows, in full or in few bits."""

from .reference import Decoded, Float8Rows, PackedRows, Rotation, Spans, packed_decode, ragged_decode

__all__ = ["Decoded", "Float8Rows", "PackedRows", "Rotation", "Spans", "packed_decode", "ragged_decode"]
