"""One contract for every backend: what each of them computes, against float64 written out. A new backend joins by its name in
``BACKENDS``."""

import interpreted  # noqa: F401  (Triton's kernels run interpreted)
import pytest
import torch
from attention_oracle import attention, logits, newest
from torch.nn import functional as F

from locret_kernels.attend import Blocks, ChunkRotation
from locret_kit.backbones.handlers import Softmax
from locret_kit.backbones.rope import Rope
from locret_kit.cache import backend as backends
from locret_kit.cache.backend import BACKENDS, backend_for

SCALING = 0.2
SHAPES = [(4, 2, 5, 23, 64), (2, 2, 1, 17, 64), (3, 1, 33, 70, 64)]
"""Query heads, key/value heads, new tokens, rows, channels."""


@pytest.fixture(params=list(BACKENDS))
def backend(request):
    return BACKENDS[request.param]


def drawn(Q: int, H: int, T: int, S: int, D: int) -> tuple[torch.Tensor, ...]:
    """Queries, keys and values of a layer's newest ``T`` of ``S`` rows."""
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(1, *size, D, generator=generator) for size in ((Q, T), (H, S), (H, S)))


def close(mine: torch.Tensor, exact: torch.Tensor) -> None:
    torch.testing.assert_close(mine.double(), exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("window", [None, 7])
def test_attention(backend, shape, window):
    q, k, v = drawn(*shape)
    out, statistics = backend.attend(q, k, v, Softmax(SCALING), window=window)
    close(out, attention(q, k, v, SCALING, newest(*shape[2:4], window)))
    assert statistics == []


@pytest.mark.parametrize("want", [frozenset(), frozenset({"sum"})])
def test_values_of_another_size(backend, want, monkeypatch):
    """Those of latent attention, which FlashAttention does not take."""
    flash = lambda *given: pytest.fail("FlashAttention")  # noqa: E731
    monkeypatch.setattr(backends, "chunk_attention", lambda *sizes: ("flash", flash))
    q, k, v = drawn(4, 4, 5, 23, 64)
    out, _ = backend.attend(q, k, v[..., :32], Softmax(SCALING), want=want)
    close(out, attention(q, k, v[..., :32], SCALING))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("by_head", [False, True])
def test_statistics(backend, shape, by_head, monkeypatch):
    """On a card an operator of PyTorch gives the log-sum-exp; where there is none, statistics are the definition's."""
    q, k, v = drawn(*shape)
    if backend.name == "triton" and shape != SHAPES[0]:
        exact = attention(q, k, v, SCALING).float(), logits(q, k, SCALING).logsumexp(-1).float()
        monkeypatch.setattr(backends, "chunk_attention", lambda *sizes: ("exact", lambda *given: exact))
    want = frozenset({"sum", "square", "above"})
    out, counted = backend.attend(q, k, v, Softmax(SCALING), want=want, by_head=by_head)
    Q, H, T, S, _ = shape
    close(out, attention(q, k, v, SCALING))
    groups = logits(q, k, SCALING).softmax(-1)[0].unflatten(0, (H, Q // H))
    sets = [groups.mean(1), *(groups.unbind(1) if by_head else ())]
    assert len(counted) == len(sets)
    visible_T1 = torch.arange(S - T + 1, S + 1)[:, None]
    for made, a_HTS in zip(counted, sets, strict=True):
        close(made.sum[0], a_HTS.sum(1))
        close(made.square[0], a_HTS.square().sum(1))
        close(made.above[0], (a_HTS > 1 / visible_T1).double().sum(1))


@pytest.mark.parametrize("shape", SHAPES)
def test_rotation_on_the_way(backend, shape):
    """Queries and keys that come before RoPE: as those that were rotated before, in float64."""
    (q, k, v), (T, S, D) = drawn(*shape), shape[2:]
    cos, sin = Rope(0.1 ** torch.arange(D // 2)).tables(torch.arange(S), torch.float32)
    turned = [x.double() * c + torch.cat((-x.double()[..., D // 2 :], x.double()[..., : D // 2]), -1) * s
              for x, c, s in ((q, cos[-T:], sin[-T:]), (k, cos, sin))]  # fmt: skip
    out, _ = backend.attend(q, k, v, Softmax(SCALING), rotation=ChunkRotation(cos, sin, cos[-T:], sin[-T:]))
    close(out, attention(*turned, v, SCALING))


def test_chosen_blocks(backend):
    Q, H, T, S, D = 4, 2, 33, 70, 64
    q, k, v = drawn(Q, H, T, S, D)
    chosen = torch.rand(1, Q, 3, 5, generator=torch.Generator().manual_seed(1)) < 0.5
    chosen[..., 0] = True
    chosen[..., 2:] = True  # a block's own rows are always among them
    seen = chosen[0].repeat_interleave(16, 1)[:, :T].repeat_interleave(16, 2)[..., :S]
    out = backend.attend_blocks(q, k, v, SCALING, Blocks(chosen, 16, 16))
    close(out, attention(q, k, v, SCALING, newest(T, S) & seen))


def test_operations_beside_attention(backend):
    """They are those of a layer, or the backend leaves them to the backbone."""
    x, gate, up, weight = torch.randn(4, 1, 3, 64, generator=torch.Generator().manual_seed(0)).unbind(0)
    operations = backend.operations(x)
    if operations is None:
        assert backend.name != "cpu"
        return
    scale, exact = weight[0, 0], x.double()
    normed, total = operations.rms_norm(x, scale, 1e-6)
    close(normed, exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + 1e-6) * scale.double())
    assert torch.equal(total, x)
    close(operations.swiglu(gate, up), up.double() * F.silu(gate.double()))
    matrix = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))
    close(operations.linear(x, matrix), F.linear(x.double(), matrix.double()))


def test_a_name_and_the_rule():
    cpu, kind = torch.device("cpu"), torch.float32
    assert backend_for("reference", cpu, 64, kind).name == "reference"
    assert backend_for(None, cpu, 64, kind).name in ("cpu", "reference")
    assert backend_for(None, torch.device("meta"), 64, kind).name == "reference"
    with pytest.raises(ValueError, match="backend='tpu' must be one of: reference, triton, cpu"):
        backend_for("tpu", cpu, 64, kind)
    with pytest.raises(ValueError, match="backend='cpu' takes CPUs, not meta"):
        backend_for("cpu", torch.device("meta"), 64, kind)
