"""New tokens become rows in one launch: both forms, interpreted, against rows written one by one."""

import pytest
import torch
from interpreted import BOTH, close, random

from locret_kernels.quantise import row_numbers
from locret_kernels.rows import HeadProduct, RowBuffers

pytestmark = pytest.mark.usefixtures("poisoned")
DTYPE = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def places(form: str, H: int, T: int, room: int) -> tuple[object, object, int, torch.Tensor, torch.Tensor]:
    """``at``, ``seen`` and ``apart`` of a call; then each token's row in each head, and its position."""
    first, seen = room - T - 1, 40
    row_HT = first + torch.arange(T) + room * torch.arange(H)[:, None]
    if form == "host":
        return first, seen, room, row_HT, seen + torch.arange(T)
    if form == "device":
        return torch.tensor([first]), torch.tensor(seen, dtype=torch.int32), room, row_HT, seen + torch.arange(T)
    any_HT = torch.randperm(H * room, generator=torch.Generator().manual_seed(3))[: H * T].view(T, H).T
    return any_HT, 7 * torch.arange(T, dtype=torch.int32) + 1, 0, any_HT, 7 * torch.arange(T) + 1


@BOTH
@DTYPE
@pytest.mark.parametrize(
    ("T", "H", "D", "V", "R", "kinds", "scored", "form"),
    [
        (1, 3, 64, 64, 24, 0, "head", "device"), (1, 2, 96, 96, 0, 2, None, "device"), (5, 2, 128, 64, 200, 1, "head", "each"),
        (3, 1, 64, 64, 0, 0, "given", "each"), (40, 3, 64, 64, 100, 0, "head", "host"), (33, 18, 64, 64, 64, 0, "head", "device"),
        (70, 2, 96, 96, 0, 3, None, "host"), (17, 2, 64, 64, 0, 1, "given", "host"),
    ],
)  # fmt: skip
def test_new_tokens_become_rows(functions, dtype, T, H, D, V, R, kinds, scored, form):
    room = T + 5
    N, line = H * room, random(1, T, 2 * H * D + H * V).to(dtype)  # heads side by side, as a projection gives them
    k, v = line[..., : H * D].view(T, H, D).transpose(0, 1), line[..., -H * V :].view(T, H, V).transpose(0, 1)
    rows = RowBuffers(
        random(N, D, seed=1).to(dtype), random(N, V, seed=2).to(dtype), torch.zeros(N, dtype=torch.int32), random(N, seed=3),
        random(kinds, N, seed=4),
    )  # fmt: skip
    at, seen, apart, row_HT, position_T = places(form, H, T, room)
    hidden, fc2 = random(1, T, max(1, R), seed=5).to(dtype), random(H, max(1, R), seed=6).to(dtype)
    score, exact_HT = None, torch.zeros(H, T)
    if scored == "head":
        score, x = HeadProduct(hidden, fc2), hidden[0].double()
        exact_HT = fc2.double() @ (x * x.sigmoid()).T
    elif scored == "given":
        score = random(H, seed=7)[None, :, None].expand(1, H, T)
        exact_HT = score[0]
    wanted = [x.clone() for x in rows[:5]]
    for h in range(H):
        for t in range(T):
            n = row_HT[h, t]
            wanted[0][n], wanted[1][n], wanted[2][n], wanted[3][n] = k[h, t], v[h, t], position_T[t], exact_HT[h, t]
            wanted[4][:, n] = 0
    functions["enter_rows"](rows, at, k, v, seen, score, apart=apart)
    assert all(torch.equal(a, b) for i, (a, b) in enumerate(zip(rows[:5], wanted, strict=True)) if i != 3)
    if scored == "head" and dtype == torch.bfloat16:  # activations are rounded, and their sums
        torch.testing.assert_close(rows.scores_N, wanted[3], rtol=1e-2, atol=4e-2)
    else:
        close(rows.scores_N, wanted[3])


@BOTH
@DTYPE
@pytest.mark.parametrize("T", [1, 40])
def test_new_rows_in_eight_bits(functions, dtype, T):
    """Within half a step that is no wider than the range asks: numbers of all sizes, constant ones, and one above float16's."""
    H, D, V, generator = 3, 64, 96, torch.Generator().manual_seed(T)
    x = torch.randn(H, T, D + V, generator=generator) * 2.0 ** torch.randint(-20, 12, (H, T, 1), generator=generator)
    x[0, 0, :32], x[1, 0, :32], x[2, 0, 5] = 0.0, -3.3, 1e5
    k, v = x.to(dtype).split([D, V], -1)
    buffers = [torch.full((H * T, size), 7, dtype=torch.uint8) for size in (D, V)]
    levels = [torch.full((H * T, size // 32), 7.0).half() for size in (D, D, V, V)]
    rows = RowBuffers(*buffers, torch.zeros(H * T, dtype=torch.int32), random(H * T), random(0, H * T), levels)
    functions["enter_rows"](rows, 0, k, v, 0, None, apart=T)
    for x, codes, step, zero in ((k, buffers[0], *levels[:2]), (v, buffers[1], *levels[2:])):
        y = x.double().reshape(H * T, -1, 32)
        error = (row_numbers(codes, step, zero).double().view(y.shape) - y).abs()
        low, reach = y.amin(-1), y.amax(-1) - y.amin(-1)
        assert (step.double() <= 1.002 * (reach + low.abs() / 500) / 255 + 2.0**-22).all()
        assert (error <= 0.502 * step.double()[..., None] + y.abs() * 2.0**-22).all()


@BOTH
def test_no_tokens(functions):
    rows = RowBuffers(*(torch.zeros(4, 64) for _ in range(2)), *torch.zeros(2, 4), torch.zeros(0, 4))
    with pytest.raises(ValueError, match="k: 0 tokens must be at least 1"):
        functions["enter_rows"](rows, 0, torch.zeros(1, 0, 64), torch.zeros(1, 0, 64), 0, None)
