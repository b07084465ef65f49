"""Tokens of vLLM with a bounded cache equal those of ``BoundedCache``: every family, policy and scheme of positions."""

from __future__ import annotations

import pytest
import tiny

POLICIES = ("lookahead-locret", "locret", "knorm", "keydiff", "streaming", "random", "lagkv", "h2o", "tova", "snapkv")
SETTINGS = dict(budget=64, chunk=32, stabilizers=8, local_len=16)
TOKENS = 50


SLOW = pytest.mark.slow


@pytest.mark.parametrize("positions", ["compact", "original", pytest.param("clipped(48)", marks=SLOW)])
def test_every_policy(positions, tmp_path):
    """Eight requests at once, of which each step takes 48 tokens."""
    model = tiny.make(tmp_path / "model", "llama")
    heads, settings = (
        tiny.make_heads(tmp_path / "heads", model, tmp_path / "model"),
        {**SETTINGS, "positions": positions},
    )
    llm = tiny.start(
        tmp_path / "model", {**settings, "heads": heads, "policy": POLICIES[0], "policies": list(POLICIES[1:])}
    )
    ids = tiny.prompts()
    for policy in POLICIES:
        own = {"heads": heads} if "locret" in policy else {}
        wanted = [tiny.kit(model, one, TOKENS, policy=policy, **settings, **own) for one in ids]
        assert tiny.generate(llm, ids, TOKENS, policy=policy) == wanted, policy


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "gemma3" else SLOW) for name in tiny.MODELS if name != "llama"]
)
def test_every_family(name, tmp_path):
    model = tiny.make(tmp_path / "model", name)
    heads = tiny.make_heads(tmp_path / "heads", model, tmp_path / "model")
    for positions in ("compact", "original") if "longrope" in name else ("compact",):
        settings = {**SETTINGS, "positions": positions}
        with tiny.started(tmp_path / "model", {**settings, "heads": heads, "policy": "locret"}) as llm:
            ids = tiny.prompts()
            wanted = [tiny.kit(model, one, TOKENS, policy="locret", heads=heads, **settings) for one in ids]
            assert tiny.generate(llm, ids, TOKENS) == wanted
