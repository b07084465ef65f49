"""A backbone's elementwise work in fewer launches: the kernels against float64, and models with and without them."""

import sys
from inspect import unwrap
from unittest import mock

import pytest
import torch
from interpreted import BOTH, KERNELS, TOLERANCE, common, random
from tiny_models import tiny_model
from torch.nn import functional as F

from locret_kit import BoundedCache, attach
from locret_kit.backbones import skipped_rotations
from locret_kit.backbones.fused_layers import fuse_layers
from locret_kit.backbones.handlers import LayerOperations
from locret_kit.backbones.intercept import operations
from locret_kit.backbones.libraries import CACHE
from locret_kit.backbones.skipped_rotations import ROTATION
from locret_kit.backbones.undo import Undo
from locret_kit.heads import _side_by_side

pytestmark = pytest.mark.usefixtures("poisoned")
BOUNDS = TOLERANCE | {torch.bfloat16: dict(rtol=2e-2, atol=2e-2)}
"""The interpreter cuts bfloat16 off where a card rounds, and a row is rounded twice."""
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


# ---- kernels -----------------------------------------------------------------------------------------------------------


@BOTH
@DTYPES
@pytest.mark.parametrize(("T", "C"), [(1, 64), (5, 96), (3, 1000)])
@pytest.mark.parametrize("adds", [False, True])
def test_rms_norm(functions, dtype, T, C, adds):
    x, weight = random(2, T, 2 * C, dtype=dtype)[..., :C], random(C, dtype=dtype, seed=1)  # rows of a wider matrix
    residual = random(2, T, C, dtype=dtype, seed=2) if adds else None
    out, total = functions["rms_norm"](x, weight, 1e-5, residual)
    wanted = total.double()  # as it is stored
    exact = torch.zeros_like(wanted)
    for b in range(2):
        for t in range(T):
            size = (sum(v * v for v in wanted[b, t].tolist()) / C + 1e-5) ** 0.5
            exact[b, t] = wanted[b, t] / size * weight.double()
    sums = x.double() + residual.double() if adds else x.double()
    torch.testing.assert_close(wanted, sums, **BOUNDS[dtype])
    assert out.dtype == total.dtype == dtype
    torch.testing.assert_close(out.double(), exact, **BOUNDS[dtype])


@BOTH
@DTYPES
@pytest.mark.parametrize(("T", "C"), [(1, 64), (5, 1100)])
def test_swiglu(functions, dtype, T, C):
    gate, up = (3 * random(2, T, 2 * C, dtype=dtype)).chunk(2, -1)
    wanted = up.double() * gate.double() / (1 + (-gate.double()).exp())
    torch.testing.assert_close(functions["swiglu"](gate, up).double(), wanted, **BOUNDS[dtype])


@BOTH
def test_shapes_that_do_not_fit(functions):
    with pytest.raises(ValueError, match="do not belong together"):
        functions["rms_norm"](random(2, 8), random(4), 1e-5)
    with pytest.raises(ValueError, match="must be of one shape"):
        functions["swiglu"](random(2, 8), random(2, 4))


# ---- models ------------------------------------------------------------------------------------------------------------


def state(model: torch.nn.Module) -> list[dict[str, object]]:
    return [{name: value for name, value in vars(part).items() if callable(value)} for part in model.modules()]


@pytest.mark.parametrize("family", ["llama", "phi3", "qwen3", "mistral", "gemma3"])
def test_a_fused_model_is_the_model(family, monkeypatch):
    """The same logits but for rounding, and bit for bit the model that it was once this is undone."""
    model, ids = tiny_model(family), torch.arange(40)[None] % 90
    module = sys.modules[type(model.model.layers[0].self_attn).__module__]
    # Other tests' models may be attached still: what counts is this module's own rotation.
    monkeypatch.setattr(module, ROTATION, unwrap(getattr(module, ROTATION)))
    monkeypatch.setattr(skipped_rotations, "_WRAPPED", {})
    before, rotate, names = model(ids).logits, getattr(module, ROTATION), state(model)
    launched = []
    real = common.launch

    def launch(kernel, *args, **rest):
        launched.append(kernel.__name__)
        real(kernel, *args, **rest)

    undo, other = Undo(), Undo()
    kernels = LayerOperations(KERNELS["rms_norm"], KERNELS["swiglu"], F.linear)
    for mine, one in ((undo, model), (other, tiny_model(family))):
        skipped_rotations._skip_identity(mine, module)
        fuse_layers(mine, one.model, lambda *xs: kernels)
    with torch.inference_mode(), mock.patch.object(common, "launch", launch):
        fused = model(ids).logits
    undo.run()
    assert getattr(module, ROTATION) is not rotate, "another model uses it"
    other.run()
    torch.testing.assert_close(fused, before, rtol=1e-4, atol=1e-5)
    layers, fuses = model.config.num_hidden_layers, family != "gemma3"
    norms = (4 if family == "qwen3" else 2) * layers + 1
    assert launched.count("_rms_norm") == norms * fuses and launched.count("_swiglu") == layers * fuses
    assert getattr(module, ROTATION) is rotate and state(model) == names and torch.equal(model(ids).logits, before)


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_a_cpu_knows_nothing_of_it(family):
    model, ids = tiny_model(family), torch.arange(40)[None] % 90
    module = sys.modules[type(model.model.layers[0].self_attn).__module__]
    names, rotate = state(model), getattr(module, ROTATION)
    launch = mock.patch.object(common, "launch", lambda *call, **rest: pytest.fail("a kernel was launched"))
    with torch.inference_mode(), launch:
        with attach(model) as attachment:
            first = model(input_ids=ids, **{CACHE: BoundedCache(64, "streaming", backend="reference")}).logits
            attachment.detach()
        assert state(model) == names and getattr(module, ROTATION) is rotate
    torch.testing.assert_close(first, model(ids).logits, rtol=1e-4, atol=1e-4)
    assert operations(torch.zeros(1, device="meta")) is None, "no forward runs"


# ---- heads that read a fused projection ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("B", "T", "Q", "H"), [(1, 5, 6, 2), (2, 1, 6, 2), (1, 1, 1, 1), (2, 4, 3, 1)])
def test_heads_read_a_fused_projection_in_place(B, T, Q, H):
    """The matrix itself where q, k and v are its columns; a copy of the same numbers where they are not."""
    D, sizes = 8, [Q, H, H]
    matrix = random(B, T, (Q + 2 * H) * D)
    parts = [x.view(B, T, -1, D).transpose(1, 2) for x in matrix.split([n * D for n in sizes], -1)]
    found = _side_by_side(*parts)
    assert torch.equal(found, matrix) and found.data_ptr() == matrix.data_ptr()
    for others in ([x.clone() for x in parts], [parts[0], parts[1], parts[2].clone()]):
        copied = _side_by_side(*others)
        assert torch.equal(copied, matrix) and copied.data_ptr() != matrix.data_ptr()
    swapped = _side_by_side(parts[0], parts[2], parts[1])  # the same size, another order
    assert torch.equal(swapped, torch.cat([x.transpose(1, 2).flatten(2) for x in (parts[0], parts[2], parts[1])], -1))
