"""Tests of the compiled calls with AVX-512 and its VNNI, on a processor without them.

    python scripts/research/emulate.py 64 vnni tests/kernels/test_products.py -k native

``64`` or ``32`` bytes a vector, with ``vnni`` or ``plain``, then what pytest takes. The lines for that processor are compiled for
this one. Each intrinsic is the function of SIMDe (Debian: ``libsimde-dev``; https://github.com/simd-everywhere/simde) that
computes the same, lane by lane. Those that SIMDe 0.7 lacks are in ``avx512.h``. That shows results, but neither speed nor
compiled intrinsics. 32 bytes with VNNI are the lines for AVX-VNNI, too. This machine needs AVX2.
Used on 2026-11-27 (``docs/limits.md``).
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import pytest

from locret_kernels import cpp


def main() -> int:
    width, products, *tests = sys.argv[1:]
    chosen = f"-DWIDE_VECTORS={int(width == '64')}", f"-DVNNI={int(products == 'vnni')}"
    cpp.FLAGS = (*cpp.FLAGS, "-O1", "-Wno-psabi", "-include", str(Path(__file__).with_name("avx512.h")), *chosen)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        return int(pytest.main([*tests, "-n", "0", "-p", "no:cacheprovider"]))


if __name__ == "__main__":
    sys.exit(main())
