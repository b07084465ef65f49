"""Attention over sequences of different lengths in one launch: heads of a ragged layer and windows, through an operator that is
written here from PyTorch's documentation of ``varlen_attn``, against a call per head and against masks."""

import logging

import pytest
import torch
from interpreted import common  # noqa: F401  (before anything else imports the kernels)
from kernel_runs import model, run  # noqa: F401  (a fixture)
from tiny_decoders.needed import Sizes
from tiny_decoders.rows import rows
from tiny_decoders.shrink import tiny_decoder

from locret_kit import BoundedCache, attach
from locret_kit.backbones.handlers import Softmax
from locret_kit.cache import attend, backend
from locret_kit.cache.attend import attend_heads, attend_rows, varlen_operator
from locret_kit.cache.backend import BACKENDS
from locret_kit.runtime.session import prefill

CUDA, META = torch.device("cuda"), torch.device("meta")


def by_hand(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size, enable_gqa, seqused_k=None):
    """Query ``i`` of ``n`` over ``s`` keys stands at ``i + s - n``, and sees ``left`` keys before its own and ``right`` after."""
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32 and enable_gqa == (query.shape[1] != key.shape[1])
    out = torch.full_like(query, float("nan"))
    for i in range(len(cu_seq_q) - 1):
        start, used = int(cu_seq_k[i]), int(cu_seq_k[i + 1] - cu_seq_k[i]) if seqused_k is None else int(seqused_k[i])
        assert used <= max_k and start + used <= len(key) and int(cu_seq_q[i + 1] - cu_seq_q[i]) <= max_q
        q = query[cu_seq_q[i] : cu_seq_q[i + 1]].double().transpose(0, 1)  # [Q, n, D]
        k, v = (x[start : start + used].double().transpose(0, 1) for x in (key, value))
        k, v = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, v))
        at = torch.arange(q.shape[1])[:, None] + used - q.shape[1]
        left, right = (10**9 if n < 0 else n for n in window_size)
        there = torch.arange(used)
        seen = (there >= at - left) & (there <= at + right)
        weights = (q @ k.transpose(1, 2) * scale).masked_fill(~seen, float("-inf")).softmax(-1)
        out[cu_seq_q[i] : cu_seq_q[i + 1]] = (weights @ v).transpose(0, 1).to(out.dtype)
    return out


@pytest.fixture
def operator(monkeypatch):
    """The operator, found on any device; and how often it was called."""
    calls: list[int] = []

    def counted(*given, **named):
        calls.append(len(given[0]))
        return by_hand(*given, **named)

    for module in (attend, backend):
        monkeypatch.setattr(module, "varlen_operator", lambda *given: counted)
    return calls


@pytest.mark.parametrize("positions", ["compact", "clipped(20)", "original"])
def test_heads_of_different_lengths(model, operator, positions, monkeypatch):
    """The same slots stay and the same logits come as with a call for each head."""
    policy = "score=keydiff allocation=adaptive"
    mine, kept = run(model, policy, None, "triton", positions)
    assert len(operator) >= 2 * 3, "a launch for each layer and chunk"
    monkeypatch.undo()
    theirs, expected = run(model, policy, None, "reference", positions)
    torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3)
    assert all(torch.equal(a, b) for a, b in zip(kept, expected, strict=True))


def test_values_of_another_size_are_a_call_for_each_head(operator, monkeypatch):
    """Those of latent attention, which the operator does not take."""
    latent = tiny_decoder(*rows(Sizes())["deepseek_v3"])
    monkeypatch.setattr(backend.Backend, "attends_ragged", lambda *given: True)
    cache = BoundedCache(
        12, "ada-snapkv(6,3)", chunk=8, stabilizers=0, prompt_length=30, local_len=3, backend="reference"
    )
    with attach(latent):
        prefill(latent, list(range(2, 32)), cache)
    assert not operator and cache.counters.evictions


@pytest.mark.parametrize(("Q", "T", "lengths"), [(8, 3, (3, 9, 5, 4)), (3, 1, (7,)), (2, 4, (4, 6))])
def test_heads_end_to_end(operator, Q, T, lengths):
    """With free rows between them that hold NaN."""
    generator, room = torch.Generator().manual_seed(0), 2
    q = torch.randn(1, Q, T, 16, generator=generator)
    heads = [torch.randn(2, 1, 1, n, 16, generator=generator) for n in lengths]
    free = torch.full((2, room, 16), float("nan"))
    keys, values = torch.cat([x for head in heads for x in (head[:, 0, 0], free)], dim=1)
    lengths_H = torch.tensor(lengths)
    starts_H = lengths_H.cumsum(0) - lengths_H + room * torch.arange(len(lengths))
    out, G = attend_heads(q, keys, values, starts_H, lengths_H, max(lengths), 0.3), Q // len(lengths)
    for h, (k, v) in enumerate(heads):
        group = slice(h * G, (h + 1) * G)
        torch.testing.assert_close(out[:, group], attend_rows(q[:, group], k, v, 0.3), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [1, 4, 30])
def test_windows_need_no_mask(operator, monkeypatch, window):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, 5, 16, generator=generator)
    k, v = torch.randn(2, 2, 2, 11, 16, generator=generator)
    expected = attend_rows(q, k, v, 0.3, window)
    monkeypatch.setattr(attend, "lower_right", lambda *given: pytest.fail("a mask was made"))
    torch.testing.assert_close(
        BACKENDS["triton"].attend(q, k, v, Softmax(0.3), window=window)[0], expected, rtol=1e-5, atol=1e-5
    )
    assert operator == [10]


def test_where_it_does_not_run(caplog, monkeypatch):
    """A CPU and full precision never ask; elsewhere an operator that is missing, or of another form, is said once."""
    assert varlen_operator(torch.device("cpu"), torch.bfloat16, 64) is varlen_operator(META, torch.float32, 64) is None
    assert not caplog.records
    for error in (ImportError("no module"), TypeError("unexpected keyword"), RuntimeError("no kernel image")):

        def missing(name, error=error):
            raise error

        varlen_operator.cache_clear()
        caplog.clear()
        monkeypatch.setattr(attend, "import_module", missing)
        with caplog.at_level(logging.WARNING):
            assert [varlen_operator(META, torch.bfloat16, 96) for _ in range(3)] == [None] * 3
        (record,) = caplog.records
        assert str(error) in record.message and "heads of 96 in torch.bfloat16 on meta" in record.message
    varlen_operator.cache_clear()


def test_pytorchs_operator_takes_what_it_is_given():
    """Its own checks of arguments and shapes, on meta tensors."""
    # PyTorch 2.11's takes other arguments: then each head is a call.
    if varlen_operator(META, torch.bfloat16, 64) is None:
        assert torch.__version__ < "2.13"
        return
    q, rows = (torch.empty(*n, dtype=torch.bfloat16, device=META) for n in ((1, 4, 3, 64), (20, 64)))
    numbers = torch.empty(2, dtype=torch.int64, device=META)
    assert attend_heads(q, rows, rows, numbers, numbers, 9, 0.3).shape == q.shape
    k = torch.empty(1, 2, 9, 64, dtype=torch.bfloat16, device=META)
    assert BACKENDS["triton"].attend(q, k, k, Softmax(0.3), window=4)[0].shape == q.shape
