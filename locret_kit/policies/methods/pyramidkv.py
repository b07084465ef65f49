"""PyramidKV, arXiv 2406.02069: SnapKV's score; lower layers get more slots."""

from ..registry import Pyramid, register
from .snapkv import NAMES, SNAPKV

register(
    "pyramidkv",
    "PyramidKV, arXiv 2406.02069",
    {**SNAPKV, "allocation": Pyramid()},
    names=NAMES,
    keeps="as snapkv; lower layers get more slots",
)
