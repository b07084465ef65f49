"""Interrupts and threads: nothing of a forward stays behind, and threads that share an attached model do not meet."""

import gc
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import pytest
import torch
from strangers import tokens
from tiny_heads import tiny_heads
from tiny_models import tiny_model
from tiny_tokenizer import tiny_tokenizer

from locret_kit import BoundedCache, attach
from locret_kit.backbones import intercept
from locret_kit.backbones.intercept import active_handler, attached, is_attached
from locret_kit.backbones.libraries import CACHE
from locret_kit.backbones.skipped_rotations import ROTATION
from locret_kit.runtime import session
from locret_kit.runtime.session import prefill

TOKENIZER = tiny_tokenizer()
RESETS = [
    ("streaming", 300, 450, {}), ("h2o", 450, 300, {"positions": "original"}), ("rereading-locret", 300, 450, {}),
    ("ada-snapkv", 300, 320, {}), ("snapkv", 300, 320, {"kv_bits": 4}), ("snapkv", 300, 120, {"one_shot": True}),
    ("nacl allocation=pyramid(3)", 122, 150, {"one_shot": True}), ("windowed-locret", 300, 450, {}), ("full", 120, 300, {}),
    ("h2o", 300, 450, {"settings": 0.2}),
]  # fmt: skip


def test_an_interrupt_leaves_nothing_behind():
    """The cache is freed, and the guard of a model that is not attached still works."""
    model, ids = tiny_model("llama"), tokens(20)
    cache = BoundedCache(8, "streaming", chunk=4)
    with attach(model):
        hook = model.model.layers[1].mlp.register_forward_pre_hook(lambda *_: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            model.generate(ids, **{CACHE: cache}, max_new_tokens=2)
        hook.remove()
    assert active_handler() is None
    alive = weakref.ref(cache)
    cache.reset()
    with pytest.raises(RuntimeError, match="not attached"):
        model(input_ids=ids, **{CACHE: cache})
    del cache
    gc.collect()
    assert alive() is None


def test_real_signals_leave_nothing_behind(monkeypatch):
    """SIGINT at moments all over a prefill; again where Python dropped it, as in a destructor."""
    monkeypatch.setattr(sys, "unraisablehook", lambda dropped: None)  # pytest's would hold frames, and they the caches
    model, ids = tiny_model("llama"), tokens(400)[0].tolist()
    caught, caches = 0, weakref.WeakSet()
    for n in range(12):
        timer = threading.Timer(0.002 * (n + 1), os.kill, (os.getpid(), signal.SIGINT))
        try:
            timer.start()
            while True:
                caches.add(cache := BoundedCache(16, "h2o", chunk=8))
                str(session.Answer(model, TOKENIZER, ids, cache, max_new_tokens=8))
                if not timer.is_alive():
                    signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            caught += 1
        timer.join()
        assert active_handler() is None and not is_attached(model)
    assert caught == 12
    del cache
    gc.collect()
    assert not caches


def interrupted(work: Callable[[], None], n: int) -> bool:
    """Whether ``work`` came to its ``n``-th call in ``locret_kit/backbones``, where KeyboardInterrupt was raised: Python looks
    for signals where a function begins and where a call has returned."""
    here, calls = str(Path(intercept.__file__).parent), 0

    def profile(frame, event, _):
        nonlocal calls
        if event in ("call", "c_return") and frame.f_code.co_filename.startswith(here):
            calls += 1
            if calls == n:
                raise KeyboardInterrupt

    try:
        sys.setprofile(profile)
        work()
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(None)
    return False


@pytest.mark.parametrize(
    ("family", "more"), [("llama", {}), ("gemma3", {"layer_types": ["sliding_attention", "full_attention"]})]
)
def test_an_interrupt_while_attaching_or_detaching_leaves_the_model_as_it_was(family, more):
    """At every call within both, one after the other."""
    model, ids = tiny_model(family, num_hidden_layers=2, **more), tokens(20)
    module = sys.modules[type(model.model.layers[0].self_attn).__module__]

    def state():
        return [
            ({name: value for name, value in vars(part).items() if callable(value)}, list(part._forward_pre_hooks))
            for part in model.modules()
        ]

    def work():
        with attached(model):
            pass

    own, rotate, logits = state(), getattr(module, ROTATION), model(ids).logits
    n = 1
    while interrupted(work, n):
        with attach(model):
            pass
        assert not is_attached(model) and not intercept._SHARED, n
        assert state() == own and getattr(module, ROTATION) is rotate, n
        n += 1
    assert n > 50, "calls within attaching and detaching"
    assert torch.equal(model(ids).logits, logits)
    with attach(model):
        model(input_ids=ids, **{CACHE: BoundedCache(8, "streaming", chunk=4)})


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_an_interrupted_cache_is_refused(layer):
    """Its layers have seen different numbers of tokens, or the last one has not evicted yet."""
    model, ids = tiny_model("llama"), tokens(20)[0].tolist()
    cache, fresh = (BoundedCache(8, "streaming", chunk=4, prompt_length=20) for _ in range(2))
    prefill(model, ids[:8], cache)
    with (
        mock.patch.object(cache.bounded[layer], "keep", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        prefill(model, ids, cache)
    for use in (lambda: prefill(model, ids, cache), cache.fork):
        with pytest.raises(ValueError, match=r"interrupted.* reset\(\) it"):
            use()
    cache.reset(20)
    assert torch.equal(prefill(model, ids, cache), prefill(model, ids, fresh))
    assert torch.equal(cache.kept_positions(1), fresh.kept_positions(1))


def test_attaching_does_not_disturb_a_thread_without_a_cache():
    model, ids = tiny_model("llama"), tokens(60)
    wanted = model(input_ids=ids).logits
    stop = threading.Event()

    def others():
        while not stop.is_set():
            with torch.no_grad(), attach(model):
                model(input_ids=ids[:, :8], **{CACHE: BoundedCache(16, "streaming", chunk=8)})

    with ThreadPoolExecutor(1) as pool:
        busy = pool.submit(others)
        found = [model(input_ids=ids).logits for _ in range(60)]
        stop.set()
        busy.result()
    assert all(torch.equal(logits, wanted) for logits in found)


def test_detaching_under_a_running_forward_is_said():
    model, ids = tiny_model("llama"), tokens(8)
    attachment = attach(model)
    model.model.layers[1].mlp.register_forward_pre_hook(lambda *_: attachment.detach())
    with pytest.raises(RuntimeError, match="detached while this forward ran"):
        model(input_ids=ids, **{CACHE: BoundedCache(16, "streaming")})


def test_a_model_that_is_attached_once_answers_many_threads():
    model, ids = tiny_model("llama"), tokens(50)[0].tolist()

    def answer(policy):
        cache = BoundedCache(16, policy, chunk=8, prompt_length=50)
        return str(session.Answer(model, TOKENIZER, ids, cache, max_new_tokens=6))

    policies = ["streaming", "h2o", "sirllm"] * 2
    wanted = [answer(policy) for policy in policies]
    with attach(model), ThreadPoolExecutor(3) as pool:
        assert list(pool.map(answer, policies)) == wanted


# ---- another text in the same cache ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "policy", "first", "second", "more"), [*(("llama", *one) for one in RESETS), ("gemma3", *RESETS[1])]
)
def test_reset_for_another_length_equals_a_new_cache(family, policy, first, second, more):
    model = tiny_model(family)
    heads = tiny_heads(model, 32, seed=1)
    given = {"settings": 100, "chunk": 64, **more}
    used, fresh = (BoundedCache(policy=policy, heads=heads, prompt_length=n, **given) for n in (first, second))
    ids = tokens(second, seed=3)[0].tolist()
    prefill(model, tokens(first)[0].tolist(), used)
    used.reset(prompt_length=second)
    assert used.get_seq_length() == 0 and used.counters.evictions == 0
    assert torch.equal(prefill(model, ids, used), prefill(model, ids, fresh))
    assert used.settings == fresh.settings and used.nbytes == fresh.nbytes
    for layer in range(3):
        for a, b in zip(used.kept_positions(layer)[0], fresh.kept_positions(layer)[0], strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("policy", ["snapkv", "full"])
def test_reset_alone_forgets_the_length(policy):
    """A longer and a shorter text, as ``model.generate`` reads them: the answers of a new cache."""
    model = tiny_model("llama")
    given = {"settings": 48, "policy": policy, "chunk": 32, "stabilizers": 8, "local_len": 8}
    for first, second in ((60, 180), (180, 60)):
        used, fresh = BoundedCache(**given, prompt_length=first), BoundedCache(**given)
        ids = tokens(second, seed=3)
        with attach(model):
            prefill(model, tokens(first)[0].tolist(), used)
            used.reset()
            wanted = model.generate(ids, **{CACHE: fresh}, do_sample=False, max_new_tokens=6)
            assert torch.equal(model.generate(ids, **{CACHE: used}, do_sample=False, max_new_tokens=6), wanted)
        assert used.schedule == fresh.schedule and used.nbytes == fresh.nbytes
    shared = BoundedCache(0.5, policy, prompt_length=40)
    with pytest.raises(ValueError, match="pass prompt_length="):
        shared.reset()
    assert shared.schedule.prompt_length == 40


def test_a_length_that_is_refused_leaves_the_cache_as_it_was():
    """Pins for which a share of the prompt has no room are found late, after the settings are made."""
    model, ids = tiny_model("llama"), tokens(60)
    cache = BoundedCache(0.5, "h2o", chunk=8, stabilizers=2, local_len=4, prompt_length=40, protect="first")
    cache.pin(0, 12)
    with attach(model), torch.no_grad():
        prefill(model, ids[0, :40].tolist(), cache)
        before, held = dict(vars(cache)), [rows.codec.keys.clone() for rows in cache.bounded]
        with pytest.raises(ValueError, match="pins=4 tokens must be at most 2"):
            cache.reset(prompt_length=14)
        assert vars(cache) == before and cache.pins == ((0, 12),)
        assert all(torch.equal(rows.codec.keys, keys) for rows, keys in zip(cache.bounded, held, strict=True))
        model(input_ids=ids[:, 40:41], **{CACHE: cache})


def test_a_prompt_of_another_length_is_refused():
    model, ids = tiny_model("llama"), tokens(40)[0].tolist()
    for length in (30, 50):
        cache = BoundedCache(16, "h2o", chunk=8, prompt_length=length)
        with pytest.raises(ValueError, match=rf"prompt_length={length} of the cache must be the 40 tokens.*reset\("):
            session.Answer(model, TOKENIZER, ids, cache, max_new_tokens=2)
    with attach(model), pytest.raises(ValueError, match="prompt_length=30 of the cache"):
        prefill(model, ids, BoundedCache(16, "h2o", chunk=8, prompt_length=30))
