"""Block-sparse attention: Triton (interpreted) and the reference against dense attention in float64 under the same mask."""

import pytest
import torch
from attention_oracle import attention
from interpreted import BOTH, KERNELS, REFERENCES, close, poisoned

from locret_kernels.sparse_attend import Blocks

pytestmark = pytest.mark.usefixtures("poisoned")


def drawn(B, Q, H, T, S, D, queries, unit, share, seed=0, dtype=torch.float32):
    """q, k, v and random blocks."""
    make = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(B, n, rows, D, generator=make).to(dtype) for n, rows in ((Q, T), (H, S), (H, S)))
    seen = torch.rand(B, Q, -(-T // queries), -(-S // unit), generator=make) < share
    return q, k, v, Blocks(seen, queries, unit)


def masked(q, k, v, scaling, blocks: Blocks):
    """Dense attention in float64 of what the blocks and causality leave; 0 where that is nothing."""
    (B, Q, T, _), S = q.shape, k.shape[2]
    mask = torch.zeros(B, Q, T, S, dtype=torch.bool)
    for t in range(T):
        for s in range(S - T + t + 1):
            mask[:, :, t, s] = blocks.seen_BQNU[:, :, t // blocks.queries, s // blocks.unit]
    return attention(q, k, v, scaling, mask)


@pytest.mark.parametrize(
    ("Q", "H", "T", "S", "D", "queries", "unit"),
    [
        (4, 2, 1, 1, 64, 64, 1), (2, 2, 70, 70, 64, 64, 1), (2, 1, 67, 200, 96, 64, 128), (2, 1, 40, 129, 128, 128, 128),
        (2, 2, 20, 33, 256, 7, 5),
    ],
)  # fmt: skip
def test_it_is_masked_attention(Q, H, T, S, D, queries, unit):
    inputs = drawn(2 if T == 70 else 1, Q, H, T, S, D, queries, unit, 0.4)
    with poisoned():
        mine, theirs = (f["sparse_attend"](*inputs[:3], 0.2, inputs[3]) for f in (KERNELS, REFERENCES))
    oracle = masked(*inputs[:3], 0.2, inputs[3]).float()
    close(theirs, oracle)
    close(mine, oracle)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@BOTH
def test_half_precision(functions, dtype):
    q, k, v, blocks = drawn(1, 4, 2, 9, 200, 64, 64, 16, 0.5, dtype=dtype)
    made = functions["sparse_attend"](q, k, v, 0.1, blocks)
    assert made.dtype == dtype
    close(made.float(), masked(q, k, v, 0.1, blocks).float(), dtype)


@BOTH
def test_what_is_not_chosen_is_never_read(functions):
    """NaN in a unit that no block sees, and after a buffer's rows, changes nothing."""
    q, k, v, blocks = drawn(1, 2, 1, 40, 100, 64, 16, 10, 0.5)
    blocks.seen_BQNU[..., 3] = False
    wanted = functions["sparse_attend"](q, k, v, 0.1, blocks)
    buffers = [torch.full((1, 1, 130, 64), float("nan")) for _ in range(2)]
    for buffer, x in zip(buffers, (k, v), strict=True):
        buffer[:, :, :100] = x
        buffer[:, :, 30:40] = float("nan")
    assert torch.equal(functions["sparse_attend"](q, *(x[:, :, :100] for x in buffers), 0.1, blocks), wanted)


@BOTH
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: b._replace(seen_BQNU=b.seen_BQNU[..., 1:]), r"seen \[1, 2, 3, 9\] must be \[1, 2, 3, 10\]"),
        (lambda b: b._replace(unit=0), "unit=0 must be at least 1"),
    ],
)
def test_what_it_refuses(functions, change, message):
    q, k, v, blocks = drawn(1, 2, 1, 40, 100, 64, 16, 10, 0.5)
    with pytest.raises(ValueError, match=message):
        functions["sparse_attend"](q, k, v, 0.1, change(blocks))
