"""Compiled work on a chunk of a prompt, against float64 written out and against the operations of tensors. Compiles for seconds,
once a machine."""

import pytest
import torch
from attention_oracle import attention, logits
from interpreted import random
from policy_runs import held
from tiny_models import tiny_model

from locret_kernels import cpp
from locret_kernels.attend import MARGIN, ChunkRotation
from locret_kernels.attend import cpu as attend_cpu
from locret_kernels.fused import rotate_rows
from locret_kernels.ragged_decode import Rotation, Spans, ragged_decode
from locret_kernels.ragged_decode.cpu import ragged_decode as on_cpu
from locret_kit import BoundedCache, attach
from locret_kit.backbones import bfloat16
from locret_kit.backbones.libraries import CACHE
from locret_kit.backbones.rope import Rope
from locret_kit.backbones.undo import Undo
from locret_kit.cache.backend import CpuBackend
from locret_kit.cache.storage.codec import Scratch
from locret_kit.cache.storage.layouts import Layout
from locret_kit.cache.storage.quantised import CompiledBits, GroupedBits
from locret_kit.cache.storage.rows import BoundedLayer
from locret_kit.runtime import session

WANT = frozenset({"sum", "square", "above"})
SHAPES = [(1, 9, 3, 70, 150, 64), (2, 4, 4, 49, 49, 16), (1, 5, 1, 2, 200, 96), (1, 6, 2, 130, 131, 32)]


def drawn(B: int, Q: int, H: int, T: int, S: int, D: int) -> tuple[torch.Tensor, ...]:
    """Queries as a projection lays them out, and rows of a larger buffer that was never written beyond them."""
    keys, values = (torch.full((B, H, S + 5, D), float("nan")) for _ in range(2))
    keys[:, :, :S], values[:, :, :S] = random(B, H, S, D, seed=2), random(B, H, S, D, seed=3)
    return 3 * random(B, T, Q, D, seed=1).transpose(1, 2), keys[:, :, :S], values[:, :, :S]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("turned", [False, True])
def test_attention_and_its_statistics(shape, turned):
    (q, k, v), (T, S, D) = drawn(*shape), shape[3:]
    turn, q_turned, k_turned = None, q.double(), k.double()
    if turned:
        tables = Rope(0.1 ** torch.arange(D // 4)).tables(torch.arange(S), torch.float32)  # a half is rotated
        turn = ChunkRotation(*tables, *(x[-T:] for x in tables))
        cos, sin = (x.double() for x in tables)
        q_turned, k_turned = rotate_rows(q_turned, cos[-T:], sin[-T:]), rotate_rows(k_turned, cos, sin)
    p = logits(q_turned, k_turned, 0.2).softmax(-1).unflatten(1, (k.shape[1], -1))
    assert attend_cpu.takes(q, k, v)
    out, counted = attend_cpu.attend_and_count(q, k, v, 0.2, want=WANT, by_head=True, rotation=turn)
    torch.testing.assert_close(out.double(), attention(q_turned, k_turned, v, 0.2), rtol=1e-5, atol=1e-5)
    seen = torch.arange(S - T + 1, S + 1)[:, None]
    for a, mine in zip([p.mean(2), *p.unbind(2)], counted, strict=True):
        torch.testing.assert_close(mine.sum.double(), a.sum(2), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(mine.square.double(), a.square().sum(2), rtol=1e-5, atol=1e-6)
        bound = (1 + MARGIN) / seen
        near = ((a - bound).abs() < 1e-5 * bound).sum(2)
        assert ((mine.above - (a > bound).sum(2)).abs() <= near).all()
    alone, (sums,) = attend_cpu.attend_and_count(q, k, v, 0.2, want=frozenset({"sum"}), rotation=turn)
    assert torch.equal(alone, out) and torch.equal(sums.sum, counted[0].sum) and sums.square is None


def test_equal_weights_are_not_above_average():
    q, k, v = torch.zeros(1, 2, 40, 16), torch.zeros(1, 1, 90, 16), torch.ones(1, 1, 90, 16)
    out, (stats,) = attend_cpu.attend_and_count(q, k, v, 1.0, want=WANT)
    torch.testing.assert_close(out, torch.ones_like(out))
    assert not stats.above.any()


def test_bfloat16_is_read_as_it_is():
    q, k, v = (x.bfloat16() for x in drawn(*SHAPES[0]))
    out, _ = attend_cpu.attend_and_count(q, k, v, 0.2)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), attention(q, k, v, 0.2), rtol=2**-8, atol=2**-9)


def test_a_query_is_the_same_in_any_piece_and_by_any_threads(monkeypatch):
    q, k, v = drawn(*SHAPES[0])
    out, (stats,) = attend_cpu.attend_and_count(q, k, v, 0.2, want=WANT)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    other, (same,) = attend_cpu.attend_and_count(q, k, v, 0.2, want=WANT)
    assert torch.equal(other, out) and all(torch.equal(getattr(same, name), getattr(stats, name)) for name in WANT)
    assert torch.equal(attend_cpu.attend_and_count(q[:, :, -7:], k, v, 0.2)[0], out[:, :, -7:])


def test_what_it_does_not_take():
    q, k, v = drawn(*SHAPES[0])
    for change in (torch.Tensor.double, torch.Tensor.half, lambda x: x[..., :24]):
        assert not attend_cpu.takes(*map(change, (q, k, v)))
    assert not attend_cpu.takes(q, k, v[..., :32]) and not attend_cpu.takes(q.clone().requires_grad_(), k, v)
    rows = random(1, 1, 1, 16).expand(1, 1, attend_cpu.MAX_ROWS + 1, 16)
    assert not attend_cpu.takes(rows[:, :, :2], rows, rows)


def test_numbers_of_another_type_are_read_as_what_they_are_and_tables_reach_every_row():
    q, rows, spans = random(1, 2, 32).double(), random(2, 5, 32), Spans(torch.tensor([[0]]), torch.tensor([[5]]), 5)
    forms = on_cpu, ragged_decode
    assert torch.equal(*(form(q, tuple(rows), spans, 0.2).out_BQD for form in forms))
    tables = Rope(torch.ones(16)).tables(torch.arange(4), torch.float32)
    with pytest.raises(ValueError, match=r"cos \(4, 32\) must be \[at least 5, even and at most 32\]"):
        on_cpu(q.float(), tuple(rows), spans, 0.2, Rotation(*tables))


# ---- rows in few bits -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [4, 2])
@pytest.mark.parametrize(("dtype", "D"), [(torch.float32, 64), (torch.bfloat16, 16), (torch.float32, 24)])
def test_rows_are_those_that_tensors_hold(dtype, D, bits):
    """Chunks and evictions: the same groups and codes, and rows read back alike."""
    codecs = (kind(bits, Scratch(), group=8, residual=8) for kind in (CompiledBits, GroupedBits))
    mine, theirs = made = [BoundedLayer(Layout(200), codec) for codec in codecs]
    draw = torch.Generator().manual_seed(bits)
    for turn in range(6):
        drawn_ = (torch.randn(1, 3, 70, D, generator=draw) for _ in "kv")
        k, v = (x * torch.linspace(1, 4, D) + torch.linspace(-9, 9, D) for x in drawn_)
        order = torch.rand(1, 3, mine.rows + 70, generator=draw).argsort(-1)
        for layer in made:
            layer.update(k.to(dtype), v.to(dtype))
            layer.append(k.to(dtype), v.to(dtype), torch.zeros(()).expand(k.shape[:3]))
            if turn:
                layer.keep(order < 120, 120)
            layer.codec.finish_block()
        held = mine.layout.every()
        assert mine.codec.tail == theirs.codec.tail and torch.equal(mine.codec.group[held], theirs.codec.group[held])
        grouped = mine.codec.group[held] >= 0
        assert torch.equal(*(layer.codec.key_codes[held][grouped] for layer in made))
        for name in ("keys", "values"):
            rtol = 1e-2 if dtype == torch.bfloat16 else 1e-5
            torch.testing.assert_close(mine.slots(name), theirs.slots(name), rtol=rtol, atol=1e-4)
        assert torch.equal(mine.slots("keys"), theirs.slots("keys"))
        for layer in made:
            layer.codec.finish_block()
    assert (mine.codec.group[mine.layout.every()] >= 0).any()


# ---- a model ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize(
    ("policy", "dtype"),
    [(policy, torch.float32) for policy in ("streaming", "h2o", "roco", "snapkv(6,3)", "full")]
    + [("streaming", torch.bfloat16), ("full", torch.bfloat16)],  # of others the rounding decides which slots stay
)
def test_a_prompt_read_so(policy, bits, dtype):
    """The slots and nearly the logits of the plain forward."""
    model = tiny_model("llama", head_dim=16).to(dtype)
    ids = (2 + torch.randperm(95, generator=torch.Generator().manual_seed(0))[:90]).tolist()
    rest = dict(prompt_length=len(ids), chunk=20, stabilizers=4, local_len=5, kv_bits=bits)
    caches = [BoundedCache(64, policy, positions=positions, **rest, **plain)
              for positions in ("compact", "original") for plain in ({}, {"backend": "reference"})]  # fmt: skip
    with attach(model), torch.inference_mode():
        logits = [session.prefill(model, ids, cache) for cache in caches]
    assert [cache.settings.backend for cache in caches] == ["cpu", "reference"] * 2
    for n in (0, 2):
        assert held(caches[n]) == held(caches[n + 1])
        far = float((logits[n] - logits[n + 1]).norm() / logits[n + 1].norm())
        assert far < (1e-4 if dtype == torch.float32 and bits is None else 0.05)


@pytest.mark.parametrize("trained", ["mlp.gate_proj", "mlp.down_proj", "post_attention_layernorm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_are_trained_through_a_cache_get_their_gradients(trained, dtype):
    """Whatever is trained alone in the last layer, as a LoRA of its modules would be, beside the plain forward in float64. What
    lies below another layer's attention is refused (``test_attach``)."""
    ids, grads = torch.arange(2, 32)[None], []
    for kind, plain in ((dtype, {}), (torch.float64, {"backend": "reference"})):
        model = tiny_model("llama", head_dim=16).to(dtype).to(kind).requires_grad_(False)
        last = model.model.layers[-1].named_parameters()
        weights = [w.requires_grad_() for name, w in last if trained in name]
        with attach(model):
            logits = model(ids, **{CACHE: BoundedCache(64, "streaming", **plain)}).logits
        logits.double().logsumexp(-1).square().mean().backward()
        grads.append([w.grad.double() for w in weights])
    for mine, exact in zip(*grads, strict=True):
        assert float((mine - exact).norm() / exact.norm()) < (1e-4 if dtype == torch.float32 else 0.1)


def test_without_a_compiler_prompts_are_read_all_the_same(monkeypatch, caplog):
    monkeypatch.setenv("CXX", "no-such-compiler")
    calls = (cpp.load, cpp.runs)
    for call in calls:
        call.cache_clear()
    model, ids = tiny_model("llama", head_dim=16), list(range(2, 90))
    try:
        forms = {}, {"backend": "reference"}
        caches = [BoundedCache(24, "h2o", chunk=10, prompt_length=88, **form) for form in forms]
        with attach(model), torch.inference_mode():
            mine, plain = (session.prefill(model, ids, cache) for cache in caches)
    finally:
        for call in calls:
            call.cache_clear()
    assert torch.equal(mine, plain) and caches[0].settings.backend == "reference"
    assert [record.getMessage().count("no C++ compiler") for record in caplog.records] == [1]


def test_a_decode_that_does_not_compile_in_time_is_the_definition(monkeypatch):
    def late(source, *options):
        raise cpp.Unavailable("the compiler took too long")

    q, keys, values = random(1, 4, 16), random(20, 16), random(20, 16)
    spans = Spans(torch.tensor([[0, 9]]), torch.tensor([[9, 7]]), 9)
    monkeypatch.setattr(cpp, "load", late)
    cpp.runs.cache_clear()
    try:
        mine, exact = (decode(q, (keys, values), spans, 0.25, received=True) for decode in (on_cpu, ragged_decode))
    finally:
        cpp.runs.cache_clear()
    assert torch.equal(mine.out_BQD, exact.out_BQD) and torch.equal(mine.received_BHS, exact.received_BHS)


def test_products_of_bfloat16_are_rounded_once(monkeypatch):
    """By weights that are widened in several parts; the model is as it was after it."""
    monkeypatch.setattr(bfloat16, "lacks_bfloat16", lambda: True)
    monkeypatch.setattr(bfloat16, "AT_ONCE", 1000)
    model, x = tiny_model("llama", attention_bias=True).bfloat16(), random(1, 64, 48).bfloat16()
    linear = model.model.layers[0].self_attn.q_proj
    linear.bias.normal_(generator=torch.Generator().manual_seed(0))
    own = linear(x)
    undo = Undo()
    bfloat16.widen(undo, model, lambda x, *others: CpuBackend().operations(x))
    mine, few = linear(x), linear(x[:, :9])
    undo.run()
    exact = x.double() @ linear.weight.double().T + linear.bias.double()
    torch.testing.assert_close(mine.double(), exact, rtol=2**-8, atol=1e-4)
    assert torch.equal(few, linear(x[:, :9])) and torch.equal(linear(x), own) and "forward" not in vars(linear)
