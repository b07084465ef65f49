"""Products with matrices of few bits, which stay as they lie in a GGUF file."""

from .formats import FORMATS, Format
from .reference import product

__all__ = ["FORMATS", "Format", "product"]
