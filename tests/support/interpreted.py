"""The Triton kernels as Triton's interpreter runs them, on CPU tensors, and the tolerances that every kernel test uses.

``TRITON_INTERPRET`` must be set while the kernels are decorated, that is at their first import; so tests import them here.
Uninitialised outputs are filled with NaN, so that what a kernel does not write shows.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

with mock.patch.dict(os.environ, TRITON_INTERPRET="1"):
    import triton.experimental.gluon  # noqa: F401  (imported at the first launch otherwise, and asks again)
    import triton.language as tl
    from triton.runtime import interpreter

    from locret_kernels import backend, common

    names = [name for name in backend.functions() if backend.form_of(name, "triton")]
    KERNELS = {name: backend.function(name, "triton") for name in names}
assert common.INTERPRETED, "a test imported the Triton kernels before tests/support/interpreted.py did"

# The interpreter looks through all of Triton's language to replace it at every call of a function, also of one like `tl.sum`,
# which takes longer than the call itself. It leaves most of it replaced: here all, once.
_scope = interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
interpreter._patch_lang = lambda fn: type(_scope)()

REFERENCES = {name: backend.function(name, "reference") for name in backend.functions()}
BOTH = pytest.mark.parametrize("functions", [KERNELS, REFERENCES], ids=["triton", "reference"])
TOLERANCE = {
    torch.float32: dict(rtol=1e-5, atol=2e-5),
    torch.float16: dict(rtol=2e-3, atol=2e-3),
    torch.bfloat16: dict(rtol=1e-2, atol=1e-2),
}
"""Of a kernel against its reference on the same inputs; both compute in float32."""


@contextmanager
def poisoned() -> Iterator[None]:
    """Memory that nobody has written yet is NaN inside the block (integers: the largest), so that reading it shows."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.utils.deterministic.fill_uninitialized_memory and torch.empty(3).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def close(mine: torch.Tensor, theirs: torch.Tensor, dtype: torch.dtype = torch.float32) -> None:
    """Equal within the tolerance of the inputs' type, infinities included."""
    torch.testing.assert_close(mine, theirs, **TOLERANCE[dtype])


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The same numbers for a seed and a shape."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
