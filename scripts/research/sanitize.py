"""Tests of the compiled calls under AddressSanitizer and UndefinedBehaviorSanitizer (g++ 12 or newer, with both).

    python scripts/research/sanitize.py tests/kernels/test_products.py -k 'not other_processors'

It takes what pytest takes; ``tests/kernels/test_cpu_backend.py`` and ``tests/runtime/test_cpu_decoder.py`` with
``-k 'not compiler'``. The first finding ends it, with its line of C++. Used on 2026-11-27.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

import pytest

from locret_kernels import cpp

CHECKS = "undefined,float-cast-overflow"
FLAGS = ("-O1", "-g", f"-fsanitize=address,{CHECKS}", f"-fno-sanitize-recover={CHECKS}", "-D_GLIBCXX_ASSERTIONS")
LIBRARIES = ("libasan.so", "libubsan.so", "libstdc++.so.6")  # the last for their interception of exceptions


def path_of(library: str) -> str:
    """Path of one of the compiler's libraries."""
    command = ["g++", f"-print-file-name={library}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def main() -> int:
    if "LD_PRELOAD" not in os.environ:  # they come before all else that a process loads
        paths = " ".join(path_of(name) for name in LIBRARIES)
        options = {"ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"}
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | options | {"LD_PRELOAD": paths})
    cpp.FLAGS = (*cpp.FLAGS, *FLAGS)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        # What is found is said to the process's own stderr.
        return int(pytest.main([*sys.argv[1:], "-s", "-n", "0", "-p", "no:cacheprovider"]))


if __name__ == "__main__":
    sys.exit(main())
