"""Attention of new tokens over rows, in each of the forms that a device takes."""

from __future__ import annotations

import pytest
import torch
from attention_oracle import attention, newest
from torch.nn import functional as F
from torch.nn.attention.bias import CausalBias, CausalVariant

from locret_kit.cache import attend
from locret_kit.cache.attend import attend_rows, attend_rows_lse, lower_right, lower_right_mask, operator

CPU, CUDA, META = torch.device("cpu"), torch.device("cuda"), torch.device("meta")


@pytest.mark.parametrize("window", [None, 1, 4, 100])
@pytest.mark.parametrize(("T", "S"), [(1, 1), (1, 9), (5, 5), (5, 12)])
@pytest.mark.parametrize("group", [1, 3])
def test_attention_over_rows_is_the_definition(T, S, group, window):
    torch.manual_seed(T * S)
    q, k, v = torch.randn(2, 2 * group, T, 8), torch.randn(2, 2, S, 8), torch.randn(2, 2, S, 8)
    torch.testing.assert_close(
        attend_rows(q, k, v, 0.3, window).double(), attention(q, k, v, 0.3, newest(T, S, window)), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize(("T", "S"), [(5, 5), (5, 12)])
def test_on_cuda_no_mask_is_built_and_the_result_is_the_same(T, S, group):
    bias = lower_right(T, S, None, torch.float32, CUDA)
    assert isinstance(bias, CausalBias) and bias.variant == CausalVariant.LOWER_RIGHT
    assert (bias.seq_len_q, bias.seq_len_kv) == (T, S)
    q, k, v = torch.randn(1, 2 * group, T, 8), torch.randn(1, 2, S, 8), torch.randn(1, 2, S, 8)
    fused = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=0.3, enable_gqa=group > 1)
    torch.testing.assert_close(fused.double(), attention(q, k, v, 0.3), rtol=1e-5, atol=1e-6)


def test_elsewhere_and_with_a_window_a_mask_says_what_is_seen():
    hidden = torch.tensor([[True, False, False, True], [True, True, False, False]])
    mask = lower_right(2, 4, 2, torch.float32, CPU)
    assert torch.equal(mask == -torch.inf, hidden) and torch.equal(mask[~hidden], torch.zeros(4))
    assert lower_right(2, 4, None, torch.float32, CPU) is lower_right_mask(2, 4, None, torch.float32, CPU)


def test_a_mask_made_in_inference_mode_serves_training():
    """Masks are held from call to call; a prefill's must not break the backward pass that comes after it."""
    lower_right_mask.cache_clear()
    q, k, v = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8)
    with torch.inference_mode():
        attend_rows(q, k, v, 0.3)
    v.requires_grad_()
    attend_rows(q, k, v, 0.3).sum().backward()
    assert v.grad is not None and v.grad.isfinite().all()


@pytest.fixture
def probed():
    """What runs on a device is found out anew."""
    attend.has_flash.cache_clear()
    yield
    attend.has_flash.cache_clear()


def meta(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, dtype=torch.bfloat16, device=META)


def test_a_chunk_over_rows_goes_to_flash_attention_with_its_log_sum_exp(probed, monkeypatch):
    """Lower right, grouped queries as they are, no mask; whole texts and full precision stay PyTorch's to choose."""
    q, k, asked = meta(1, 6, 5, 96), meta(1, 2, 12, 96), []
    real = attend._flash
    monkeypatch.setattr(attend, "_flash", lambda *given: asked.append(given) or real(*given))
    monkeypatch.setattr(attend, "lower_right", lambda *given: pytest.fail("a mask was made"))
    assert operator(META, torch.bfloat16, 96, "triton") == "flash (FA2)"
    asked.clear()
    out, lse = attend_rows_lse(q, k, k, 0.3, "triton")
    assert out.shape == q.shape and lse.shape == (1, 6, 5) and lse.dtype == torch.float32
    assert attend_rows(q, k, k, 0.3, None, "triton").shape == q.shape
    assert len(asked) == 2 and asked[0][:2] == (q, k) and asked[0][3] == 0.3
    assert operator(CPU, torch.bfloat16, 96, "triton") == operator(META, torch.float32, 96, "triton") == "sdpa"
    assert operator(META, torch.bfloat16, 96, "reference") == "sdpa"


@pytest.mark.parametrize(
    "error", [NotImplementedError("no kernel"), AttributeError("no operator"), RuntimeError("sm_75")]
)
def test_without_it_the_kits_own_kernel_runs_and_that_is_said_once(probed, monkeypatch, caplog, error):
    def missing(*given):
        raise error

    monkeypatch.setattr(attend, "_flash", missing)
    monkeypatch.setattr(attend, "function", lambda name, backend: lambda *given: (name, backend))
    for _ in range(3):
        assert attend_rows_lse(meta(1, 6, 5, 96), meta(1, 2, 12, 96), meta(1, 2, 12, 96), 0.3, "triton") == (
            "attend",
            "triton",
        )
        assert operator(META, torch.bfloat16, 96, "triton") == "sdpa"
    (record,) = caplog.records
    assert str(error) in record.message and "heads of 96 in torch.bfloat16 on meta" in record.message
