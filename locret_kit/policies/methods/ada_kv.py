"""Ada-KV, arXiv 2407.11550: SnapKV's score; heads share a layer's slots by need."""

from ..registry import Adaptive, PyramidAdaptive, register
from .snapkv import NAMES, SNAPKV

register(
    "ada-snapkv",
    "Ada-KV, arXiv 2407.11550",
    {**SNAPKV, "allocation": Adaptive()},
    names=NAMES,
    keeps="as snapkv; heads share a layer's slots by need",
)
register(
    "ada-pyramid",
    "Ada-KV, arXiv 2407.11550",
    {**SNAPKV, "allocation": PyramidAdaptive()},
    names=NAMES,
    keeps="as pyramidkv; heads share a layer's slots by need",
)
