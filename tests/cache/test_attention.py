"""Attention of new tokens over rows, in each of the forms that a device takes."""

import sys
from importlib import import_module
from inspect import signature

import pytest
import torch
from attention_oracle import attention, newest
from live_bytes import LiveBytes
from pretended import card, on_card
from torch.nn import functional as F
from torch.nn.attention.bias import CausalBias, CausalVariant

from locret_kit.backbones.handlers import Softmax
from locret_kit.cache import attend
from locret_kit.cache import backend as backends
from locret_kit.cache.attend import attend_rows, lower_right
from locret_kit.cache.backend import BACKENDS, TritonBackend
from locret_kit.cache.due import Schedule
from locret_kit.planning.inference_plan import ROTATION_COPIES

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


def test_a_mask_made_in_inference_mode_serves_training():
    """Masks are held from call to call; a prefill's must not break the backward pass that comes after it."""
    lower_right.cache_clear()
    q, k, v = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8)
    with torch.inference_mode():
        attend_rows(q, k, v, 0.3)
    v.requires_grad_()
    attend_rows(q, k, v, 0.3).sum().backward()
    assert v.grad is not None and v.grad.isfinite().all()


@pytest.fixture
def probed():
    """What runs on a device is found out anew."""
    for choice in CHOICES:
        choice.cache_clear()
    yield
    for choice in CHOICES:
        choice.cache_clear()


CHOICES = attend._running, attend.chunk_attention, attend.steady_attention


def operator(*sizes) -> str:
    """Name of a chunk's attention; that of PyTorch's choice where none of the kit's runs."""
    return (attend.chunk_attention(*sizes) or ("sdpa",))[0]


def meta(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, dtype=torch.bfloat16, device=META)


def test_a_chunk_over_rows_goes_to_flash_attention_with_its_log_sum_exp(probed, monkeypatch):
    """Lower right, grouped queries as they are, no mask; whole texts and full precision stay PyTorch's to choose."""
    q, k, asked = meta(1, 6, 5, 96), meta(1, 2, 12, 96), []
    real = attend._flash
    monkeypatch.setattr(attend, "_flash", lambda *given: asked.append(given) or real(*given))
    monkeypatch.setattr(attend, "lower_right", lambda *given: pytest.fail("a mask was made"))
    assert operator(META, torch.bfloat16, 96, (6, 2)) == "flash (FA2)"
    assert [x.shape for x in asked[0][:3]] == [(1, 6, 64, 96), (1, 2, 192, 96), (1, 2, 192, 96)], "heads as they are"
    asked.clear()
    out, lse = attend.chunk_attention(META, torch.bfloat16, 96, (6, 2))[1](q, k, k, 0.3)
    assert out.shape == q.shape and lse.shape == (1, 6, 5) and lse.dtype == torch.float32
    assert BACKENDS["triton"].attend(q, k, k, Softmax(0.3))[0].shape == q.shape
    assert len(asked) == 2 and asked[0][:2] == (q, k) and asked[0][3] == 0.3
    assert operator(CPU, torch.bfloat16, 96) == operator(META, torch.float32, 96) == "sdpa"


@pytest.mark.parametrize("error", [NotImplementedError("no kernel"), AssertionError("groups"), RuntimeError("sm_75")])
def test_without_it_the_definition_runs_and_that_is_said_once(probed, monkeypatch, caplog, error):
    def missing(*given):
        raise error

    monkeypatch.setattr(attend, "_flash", missing)
    q, k, want = meta(1, 6, 5, 96), meta(1, 2, 12, 96), frozenset({"sum"})
    for _ in range(3):
        out, (counted,) = BACKENDS["triton"].attend(q, k, k, Softmax(0.3), want=want)
        assert out.shape == q.shape and counted.sum.shape == (1, 2, 12)
        assert operator(META, torch.bfloat16, 96, (6, 2)) == "sdpa"
    (record,) = caplog.records
    assert record.levelname == "WARNING" and "6 heads over 2 of 96 in torch.bfloat16 on meta" in record.message
    assert f"flash (FA2) does not run ({type(error).__name__}: {error})" in record.message


@pytest.mark.parametrize(("Q", "H", "window"), [(6, 2, None), (4, 4, None), (6, 2, 7)])
def test_where_no_kernel_takes_it_logits_are_never_all_in_memory(Q, H, window, monkeypatch):
    """sm_75, or float32 with groups: the definition, a key/value head at a time, to the same result."""
    sizes = []
    real = attend.attend_and_count
    noted = lambda q, *given, **rest: sizes.append(q.shape) or real(q, *given, **rest)  # noqa: E731
    monkeypatch.setattr(attend, "attend_and_count", noted)
    torch.manual_seed(0)
    q, k, v = torch.randn(1, Q, 33, 64), torch.randn(1, H, 90, 64), torch.randn(1, H, 90, 64)
    expected = attention(q, k, v, 0.3, newest(33, 90, window))
    monkeypatch.setattr(attend, "_is_fused", lambda *asked: False)
    with card():
        made = attend_rows(*map(on_card, (q, k, v)), 0.3, window)
    torch.testing.assert_close(made.inner.double(), expected, rtol=1e-4, atol=1e-5)
    assert sizes == [(1, Q // H, 33, 64)] * H


def test_it_takes_less_than_the_plan_has_for_a_chunk():
    """At the sizes of a recipe, counted on the meta device: below the copies of rotating the keys (``inference_plan``)."""
    Q, H, T, S, D = 32, 8, 1024, 17408, 128
    q, k = meta(1, Q, T, D), meta(1, H, S, D)
    with LiveBytes() as live:
        pairs = zip(q.split(Q // H, 1), k.split(1, 1), strict=True)
        torch.cat([attend.attend_and_count(one, rows, rows, 0.1)[0] for one, rows in pairs], 1)
    planned = 2 * (ROTATION_COPIES * k.numel() - k.numel())  # the rotated keys stay beside attention
    assert live.peak < planned < 4 * Q * T * S / 10


def cudnn(q, k, v, bias, want, dropout, *, is_causal, scale):
    """In the place of cuDNN's operator, with its square mask: output in the inputs' type, log-sum-exp ``[B, Q, T, 1]``."""
    assert bias is None and want and not dropout and (not is_causal or q.shape[2] == k.shape[2])
    G = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(G, 1) for x in (k, v))
    x = q.double() @ k.mT * scale
    x = x.masked_fill(torch.ones(x.shape[-2:], dtype=torch.bool).triu(1), -torch.inf) if is_causal else x
    return (x.softmax(-1) @ v).to(q.dtype), x.logsumexp(-1, keepdim=True).float(), *[None] * 7


@pytest.mark.parametrize(
    ("Q", "H", "D", "T", "S"),
    [(4, 4, 96, 40, 150), (8, 2, 128, 33, 217), (3, 1, 64, 17, 18), (4, 2, 64, 9, 9), (4, 2, 96, 1, 40)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_parts_are_attention_to_the_lower_right(Q, H, D, T, S, dtype, monkeypatch):
    """Rows before the chunk may lie in any order, and logits be large."""
    calls = []
    monkeypatch.setattr(
        torch.ops.aten, "_scaled_dot_product_cudnn_attention", lambda *x, **y: calls.append(1) or cudnn(*x, **y)
    )
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, heads, n, D).to(dtype) for heads, n in ((Q, T), (H, S), (H, S)))
    q[:, 0] *= 30
    order = torch.cat((torch.randperm(S - T), torch.arange(S - T, S)))
    out, lse = attend._two_parts(q, k[:, :, order], v[:, :, order], D**-0.5)
    exact = attention(q, k, v, D**-0.5)
    assert len(calls) == 1 + (T < S) and out.dtype == dtype and lse.dtype == torch.float32
    error = (out.double() - exact).pow(2).mean().sqrt() / exact.pow(2).mean().sqrt()
    assert error < (1e-6 if dtype == torch.float32 else 5e-3)
    hidden = torch.ones(T, S, dtype=torch.bool).triu(S - T + 1)
    logits = q.double() @ k.double().repeat_interleave(Q // H, 1).mT * D**-0.5
    torch.testing.assert_close(lse.double(), logits.masked_fill(hidden, -torch.inf).logsumexp(-1), rtol=1e-6, atol=1e-6)


HOPPER, AMPERE, BLACKWELL, TURING = (9, 0), (8, 0), (10, 0), (7, 5)
TWO, FOUR, THREE = "flash_attn", "flash_attn.cute", "flash_attn_interface"
STEADY = 3072, 9072


@pytest.mark.parametrize(
    ("capability", "packages", "cudnn_version", "broken", "chosen", "size", "cudnn_rate"),
    [
        *((*case, 96, 410) for case in [
        (HOPPER, {TWO, FOUR, THREE}, 91600, set(), "flash (FA4)"), (HOPPER, {THREE}, 91600, set(), "flash (FA3)"),
        (HOPPER, {TWO, FOUR}, 91600, {"FA4"}, "cudnn"), (HOPPER, {TWO, FOUR, THREE}, 91600, {"FA4"}, "flash (FA3)"),
        (HOPPER, {TWO}, 91600, set(), "cudnn"), (HOPPER, set(), 91500, set(), "flash (FA2)"),
        (HOPPER, set(), None, set(), "flash (FA2)"), (HOPPER, set(), 91600, {"cudnn"}, "flash (FA2)"),
        (HOPPER, set(), 91600, {"cudnn", "FA2"}, "sdpa"), (AMPERE, {TWO, FOUR, THREE}, 91600, set(), "flash (FA2)"),
        (BLACKWELL, {TWO, FOUR, THREE}, 91600, set(), "flash (FA4)"), (BLACKWELL, {TWO, THREE}, 91600, set(), "flash (FA2)"),
        (TURING, {TWO, FOUR}, 91600, {"FA2"}, "sdpa"), (HOPPER, set(), 91600, {"timed"}, "flash (FA2)"),
        ]),
        (HOPPER, set(), 91600, set(), "flash (FA2)", 96, 376), (HOPPER, set(), 91600, set(), "cudnn", 96, 378),
        (HOPPER, set(), 91600, set(), "cudnn", 128, 315), (HOPPER, set(), 91600, set(), "flash (FA2)", 128, 313),
        (HOPPER, {TWO, FOUR}, 91600, set(), "cudnn", 128, 631), (HOPPER, set(), 91600, {"FA2"}, "cudnn", 96, 200),
        ("rocm", {TWO, FOUR}, 91600, set(), "flash (FA2)", 96, 631),
    ],
)  # fmt: skip
def test_the_fastest_attention_that_runs_is_chosen(
    capability, packages, cudnn_version, broken, chosen, size, cudnn_rate, probed, monkeypatch, caplog
):
    """By capability, installed packages, cuDNN's version and measured rates (FA2 314, FA3 and FA4 600 TFLOP/s), for steady chunks
    alone; what is chosen is what runs, and one line for each thing that failed says so."""
    active: list[str] = []
    caplog.set_level("INFO")

    def rate(form, device, dtype, head_size, heads, shape):
        assert (device, head_size, heads) == (CUDA, size, (32, 8)) and shape in (STEADY, attend.TRIAL)
        if form is attend._two_parts and "timed" in broken:
            raise AssertionError("no plan")
        return 1e12 * (cudnn_rate if form is attend._two_parts else 600 if active else 314)

    def runs(name):
        def call(q, k, v, scaling):
            assert q.shape == (1, 32, 64, size) and k.shape == v.shape == (1, 8, 192, size)
            if (active[-1:] or [name])[0] in broken if name == "FA2" else name in broken:
                raise ValueError(f"{name} does not run")
            return q, q[..., 0]

        return call

    def spec(module):
        if module == FOUR and TWO not in packages:
            raise ModuleNotFoundError(TWO)
        return True if module in packages else None

    torch_attention = torch.nn.attention
    if capability == "rocm":
        capability = (9, 4)
        monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: cudnn_version)
    monkeypatch.setattr(torch_attention, "restore_flash_attention_impl", active.clear, raising=False)
    monkeypatch.setattr(
        torch_attention, "current_flash_attention_impl", lambda: (active[-1:] or [None])[0], raising=False
    )
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, dtype, device: zeros(*size, dtype=dtype))
    for name, value in (
        ("find_spec", spec), ("_flash", runs("FA2")), ("_two_parts", runs("cudnn")), ("_rate", rate),
        ("activate_newer", active.append),
    ):  # fmt: skip
        monkeypatch.setattr(attend, name, value)
    sizes = CUDA, torch.bfloat16, size, (32, 8)
    backend = TritonBackend()
    backend.steady = STEADY
    assert (attend.steady_attention(*sizes, STEADY) or ("sdpa",))[0] == chosen
    wanted = {"cudnn": active, "flash (FA2)": [], "sdpa": []}  # what cuDNN is faster than stays active
    assert active == wanted.get(chosen, [chosen[-4:-1]])
    other = "sdpa" if "FA2" in broken else f"flash ({(active[-1:] or ['FA2'])[0]})"
    assert operator(*sizes) == other
    assert backend.reads_by(*sizes) == (chosen if chosen == other else f"cudnn, until the cache is full {other}")
    said = [one.message for one in caplog.records if one.levelname == "WARNING" and "on cuda" in one.message]
    assert len(said) == bool(broken - {"timed"}) + ("timed" in broken)
    assert all("does not run (" in line and (chosen == "sdpa" or "TFLOP/s" in line) for line in said)


def test_cudnn_is_for_chunks_over_a_full_cache_alone(monkeypatch):
    """Every other shape would make it plan anew: the first chunks of a prompt, and its last one."""
    asked = []

    def named(name):
        return lambda *sizes: (name, lambda q, k, v, scaling: asked.append((name, sizes[4:])) or (q, q[..., 0]))

    monkeypatch.setattr(backends, "steady_attention", named("cudnn"))
    monkeypatch.setattr(backends, "chunk_attention", named("flash"))
    backend = TritonBackend()
    backend.steady = 9, 29
    for T, S in ((9, 29), (9, 18), (4, 29), (4, 24)):
        q, k = meta(1, 4, T, 64), meta(1, 2, S, 64)
        backend.attend(q, k, k, Softmax(0.3))
    BACKENDS["triton"].attend(meta(1, 4, 9, 64), meta(1, 2, 29, 64), meta(1, 2, 29, 64), Softmax(0.3))
    assert asked == [("cudnn", ((9, 29),))] + [("flash", ())] * 4


@pytest.mark.parametrize(
    ("prompt", "rest", "steady"),
    [(1000, {}, (9, 29)), (None, {}, (9, 29)), (30, {}, None), (1000, dict(one_shot=True), None)],
)
def test_the_steady_chunk_of_a_schedule(prompt, rest, steady):
    assert Schedule(20, 9, 3, 4, prompt, **rest).steady == steady


@pytest.mark.parametrize("more", [(), (None, None), (None, None, None)])
def test_flash_attention_4_of_any_release(more, monkeypatch, tmp_path):
    """PyTorch's own code calls what is registered; releases return 2, 4 or 5 values of a forward, 3 or 4 of a backward."""
    (tmp_path / "flash_attn" / "cute").mkdir(parents=True)
    for folder in ("", "cute"):
        (tmp_path / "flash_attn" / folder / "__init__.py").touch()
    (tmp_path / "flash_attn" / "cute" / "interface.py").write_text(
        f"def _flash_attn_fwd(q, k, v, *, return_lse, **rest):\n    return (q + 1, q[..., 0], *{more})\n"
        f"def _flash_attn_bwd(q, k, v, *given, **rest):\n    return (q, k, v, *{more[:1]})\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    fa4, attention = import_module("torch.nn.attention._fa4"), torch.nn.attention
    monkeypatch.setattr(fa4, "_fa4_register_kernels", lambda: None)  # PyTorch's operators stay
    for name in [name for name in sys.modules if name.split(".")[0] == "flash_attn" or name.endswith(".flash4")]:
        monkeypatch.delitem(sys.modules, name)
    fa4._fa4_import_module.cache_clear()
    try:
        attend.activate_newer("FA4")
        assert attention.current_flash_attention_impl() == "FA4"
        q = torch.randn(1, 5, 2, 8)
        given = dict(query=q, key=q, value=q, grad_out=q, out=q, logsumexp=q[..., 0], scale=0.1, is_causal=True)

        def call(function):  # releases of PyTorch take more arguments or fewer
            names = [n for n, x in signature(function).parameters.items() if x.default is x.empty]
            return function(**{name: given.get(name) for name in names})

        out, lse = call(fa4._fa4_run_forward)
        assert torch.equal(out, q + 1) and torch.equal(lse, q[..., 0])
        made = call(fa4._fa4_run_backward)
        assert len(made) == 3 and all(x is q for x in made)
    finally:
        attention.restore_flash_attention_impl()
        attention.register_flash_attention_impl("FA4", register_fn=fa4.register_flash_attention_fa4)
        fa4._fa4_import_module.cache_clear()
        for name in [name for name in sys.modules if name.split(".")[0] == "flash_attn" or name.endswith(".flash4")]:
            del sys.modules[name]
