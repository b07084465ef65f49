"""A codec, a layout, a backend and a driver from outside, each in one file of a user's."""

import sys

import pytest
import torch
from checkout import forget_plugins
from policy_runs import answer, held, make, tokens

from locret_kernels.backend import function
from locret_kit.cache.backend import BACKENDS
from locret_kit.cache.storage import rows as rows_module
from locret_kit.cache.storage.codec import CODECS
from locret_kit.cache.storage.layouts import LAYOUTS
from locret_kit.cli.infer import main
from locret_kit.policies.registry import load_plugin
from locret_kit.runtime.drivers import DRIVERS

CODEC = '''
from locret_kit.cache.storage.codec import CODECS, Plain


class Negative(Plain):
    """Keys and values with the other sign."""

    def write(self, at, k_HTD, v_HTD):
        super().write(at, -k_HTD, -v_HTD)

    def read(self, name, at):
        return -super().read(name, at)

    def flat(self):
        keys, values = super().flat()
        return -keys, -values


@CODECS.register("negative")
def negative(bits, scratch, compiled, grows):
    return Negative()
'''
BACKEND = """
from locret_kit.cache.backend import BACKENDS, Backend

calls = []


class Counting(Backend):
    name = "counting"

    def attend(self, q_BQTD, *args, **rest):
        calls.append(q_BQTD.shape[2])
        return super().attend(q_BQTD, *args, **rest)


BACKENDS.register("counting")(Counting())
"""
LAYOUT = '''
from locret_kit.cache.storage.layouts import LAYOUTS, RaggedRows
from locret_kit.policies.registry import Adaptive, part


@LAYOUTS.register("wide")
class Wide(RaggedRows):
    """Ragged rows under a name of their own."""


@part("allocation", "wide")
class WideAdaptive(Adaptive):
    """Adaptive, in that layout."""

    layout = "wide"
'''
DRIVER = """
import torch

from locret_kit.runtime.drivers import DRIVERS, Driver, logits_after


class Listening(Driver):
    name = "listening"
    heard = []

    def __init__(self, model):
        self.model = model

    def __call__(self, caches, tokens):
        self.heard += tokens
        return logits_after(self.model, caches, torch.tensor([tokens]), [1] * len(caches)).float()


@DRIVERS.register("listening")
def listening(model, cache, graph):
    return Listening(model) if cache.policy.name == "h2o" else None
"""
REGISTRIES = (CODECS, BACKENDS, LAYOUTS, DRIVERS)


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Load a plugin; what it registers is forgotten after the test."""
    forget_plugins(monkeypatch)
    before = [dict(registry) for registry in REGISTRIES]

    def from_text(text: str):
        path = tmp_path / "plugin.py"
        path.write_text(text)
        load_plugin(str(path))
        return sys.modules[str(path.resolve())]

    yield from_text
    for registry, items in zip(REGISTRIES, before, strict=True):
        registry.clear()
        registry.update(items)


def answered(policy: str = "h2o", **settings):
    """A cache after its prompt and an answer, and the answer's tokens."""
    cache = make(policy, **settings)
    return cache, answer(cache, tokens(), 9)


def same(mine, plain) -> None:
    assert mine[1] == plain[1] and held(mine[0]) == held(plain[0])


def test_a_codec(load):
    load(CODEC)
    mine, plain = answered(kv_bits="negative", backend="reference"), answered(backend="reference")
    same(mine, plain)
    assert all(torch.equal(a.codec.keys, -b.codec.keys) for a, b in zip(mine[0].bounded, plain[0].bounded, strict=True))


def test_a_backend(load):
    calls = load(BACKEND).calls
    mine = answered(backend="counting")
    same(mine, answered(backend="reference"))
    assert mine[0].settings.backend == "counting" and max(calls) > 1 and min(calls) == 1


def test_a_backend_whose_operations_are_launches(load, monkeypatch):
    """It takes the ways of a card, here with the definitions of the kernels, and gives the same rows."""
    backend = load(BACKEND.replace("counting", "launching")).Counting
    monkeypatch.setattr(backend, "launches", True)
    entered = []
    monkeypatch.setattr(rows_module, "function", lambda name, kernels: entered.append(name) or function(name, kernels))
    mine = answered(backend="launching")
    assert "enter_rows" in entered
    entered.clear()
    same(mine, answered(backend="reference"))
    assert "enter_rows" not in entered


def test_a_layout(load):
    wide = load(LAYOUT).Wide
    names = (f"score=aas allocation={name} scope=window" for name in ("wide", "adaptive"))
    mine, plain = (answered(name, backend="reference") for name in names)
    same(mine, plain)
    assert all(type(rows.layout) is wide for rows in mine[0].bounded)


def test_a_driver(load):
    heard = load(DRIVER).Listening.heard
    mine = answered()
    assert mine[0].counters.decoding == "listening" and heard == mine[1][:-1]
    same(mine, answered(backend="reference"))
    assert answered("snapkv", backend="reference")[0].counters.decoding != "listening" and len(heard) == 2 * 8


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"backend": "refrence"},
            "backend='refrence' must be one of: reference, triton, cpu. Did you mean 'reference'?",
        ),
        ({"kv_bits": "nf4"}, "kv_bits='nf4' must be one of: 8, 4, 2"),
        ({"kv_bits": "a b"}, "kv_bits=a b must be one of: 8, 4, 2"),
        ({"backend": 3}, "backend=3 must be one of: reference, triton, cpu"),
    ],
)
def test_a_name_that_nobody_has(given, said):
    with pytest.raises(ValueError) as caught:
        answered(**given)
    assert str(caught.value).startswith(said)


@pytest.mark.parametrize("option", ["backend", "kv_bits"])
def test_a_command_says_so_before_it_loads_a_backbone(option, capsys):
    words = [f"--{option.replace('_', '-')}", "mine", "--model", "no/such/model", "--policy", "h2o"]
    assert main([*words, "README.md"]) == 1
    assert f"{option}='mine' must be one of" in capsys.readouterr().err
