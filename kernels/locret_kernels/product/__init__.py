"""Products with matrices of few bits, which stay as they lie in a GGUF file."""

from .reference import FORMATS, Format, product

__all__ = ["FORMATS", "Format", "product"]
