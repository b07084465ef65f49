"""A token's products with what stands around them: kernel and definition against float64, and what they refuse."""

from unittest import mock

import pytest
import torch
from interpreted import BOTH, KERNELS, REFERENCES, TOLERANCE, common, random
from torch.nn import functional as F

from locret_kernels.decoder_step import RowProducts
from locret_kernels.decoder_step import triton as module

pytestmark = pytest.mark.usefixtures("poisoned")
BOUNDS = TOLERANCE | {torch.bfloat16: dict(rtol=1e-2, atol=3e-2), torch.float16: dict(rtol=2e-3, atol=6e-3)}
"""The definition rounds products before they are gated or added, the interpreter truncates bfloat16."""
SHAPES = [(96, (50,)), (200, (33, 7, 7, 5)), (128, (64, 16, 16)), (2100, (9,)), (4200, (3, 2)), (64, (1, 1))]
"""Columns, and rows of each matrix: neither need be a multiple of a block."""


def exact(x: torch.Tensor, stage: RowProducts, residual: torch.Tensor | None) -> list[torch.Tensor]:
    """Products in float64, by sums written out."""
    x = x.double()
    if stage.norm is not None:
        x = x / (x.pow(2).sum(-1, keepdim=True) / x.shape[1] + stage.eps).sqrt() * stage.norm.double()
    made = [(x[:, None] * weight.double()).sum(-1) for weight in stage.weights]
    made = [y if b is None else y + b.double() for y, b in zip(made, stage.biases, strict=True)]
    if stage.gated:
        made = [made[0] / (1 + (-made[0]).exp()) * made[1]]
    return made if residual is None else [made[0] + residual.double()]


@BOTH
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("K", "rows"), SHAPES)
def test_against_float64(functions, dtype, K, rows, monkeypatch):
    """With and without norm, biases and residual; few programs walk over all rows, or more than there are rows."""
    x, norm = random(1, K, dtype=dtype), random(K, seed=1, dtype=dtype).abs()
    weights = [(random(n, K, seed=2 + n) / K**0.5).to(dtype) for n in rows]
    biases = [random(n, seed=9 + n, dtype=dtype) for n in rows]
    twice = (*weights[:1], weights[0].flip(0)), (*biases[:1], biases[0].flip(0))
    alone, none = random(1, rows[0], seed=3, dtype=dtype), (None,) * len(rows)
    for programs in (3, 512) if functions is KERNELS else (3,):
        monkeypatch.setattr(common, "programs", lambda device, most=programs: most)
        for stage, residual in (
            (RowProducts((*weights,), none, norm, 1e-5), None), (RowProducts((*weights,), (*biases,)), None),
            (RowProducts((weights[0],), none[:1]), alone), (RowProducts((weights[0],), (biases[0],), norm, 1e-5), alone),
            (RowProducts(twice[0], (None, None), norm, 1e-5, gated=True), None),
            (RowProducts(*twice, norm, 1e-5, gated=True), alone),
        ):  # fmt: skip
            made, wanted = functions["row_products"](x, stage, residual), exact(x, stage, residual)
            assert len(made) == len(wanted)
            for mine, theirs in zip(made, wanted, strict=True):
                assert mine.dtype == dtype
                torch.testing.assert_close(mine.double(), theirs, **BOUNDS[dtype])


def test_pieces_of_one_matrix_are_one_product():
    """Pieces of a fused projection, with a folded head after or before them. Gaps, another order and biases keep them apart."""
    x, both, apart = random(1, 8), random(10, 8), random(3, 8, seed=1)
    first, second, third = both.split([4, 4, 2])
    for weights, biases, count in (
        ((first, second, third, apart), (None,) * 4, 2), ((second, first), (None,) * 2, 2), ((first, third), (None,) * 2, 2),
        ((apart, first, second), (None,) * 3, 2), ((first, second), (torch.ones(4), torch.zeros(4)), 2),
    ):  # fmt: skip
        stage = RowProducts(weights, biases)
        with mock.patch.object(F, "linear", wraps=F.linear) as linear:
            made = REFERENCES["row_products"](x, stage)
        assert linear.call_count == count
        for mine, theirs in zip(made, exact(x, stage, None), strict=True):
            torch.testing.assert_close(mine.double(), theirs, **TOLERANCE[torch.float32])


@BOTH
@pytest.mark.parametrize(
    "change",
    [
        dict(weights=(torch.ones(4, 9),)), dict(weights=(torch.ones(4, 8),) * 5, biases=(None,) * 5), dict(gated=True),
        dict(biases=(torch.ones(3),)), dict(norm=torch.ones(9)), dict(weights=(torch.ones(5, 8),)),
        dict(weights=(torch.ones(4, 8),) * 2, biases=(None,) * 2),
    ],
)  # fmt: skip
def test_what_does_not_belong_together(functions, change):
    stage = RowProducts((torch.ones(4, 8),), (None,))._replace(**change)
    with pytest.raises(ValueError, match=r"x \(1, 8\) and weights, biases, norm, residual .* do not belong together"):
        functions["row_products"](torch.ones(1, 8), stage, torch.ones(1, 4))


def test_a_launch_may_begin_early_where_the_card_has_it(monkeypatch):
    """Hopper and what came after; the launch then says so to the driver, and to the kernel, which waits."""
    launched = []
    kernel = type("Kernel", (), {"__getitem__": lambda self, grid: lambda *args, **rest: launched.append(rest)})()
    x, stage = torch.ones(1, 8), RowProducts((torch.ones(4, 8),), (None,))
    monkeypatch.setattr(module, "_row_products", kernel)
    for capability, early in (((8, 0), False), ((9, 0), True), ((12, 0), True)):
        monkeypatch.setattr(module, "has_pdl", lambda device, c=capability: c >= (9, 0))
        KERNELS["row_products"](x, stage)
        assert launched[-1]["PDL"] == early and launched[-1].get("launch_pdl", False) == early


def test_a_weight_that_would_be_copied_is_refused():
    """A launch reads its first tile before the launches before it have ended, a copy among them."""
    x, weight = random(1, 8), random(4, 16)[:, :8]
    for weights, gated in (((weight,), False), ((weight.contiguous(), weight), True)):
        stage = RowProducts(weights, (None,) * len(weights), torch.ones(8), gated=gated)
        with pytest.raises(ValueError, match="weights of strides .* must be contiguous"):
            KERNELS["row_products"](x, stage)
