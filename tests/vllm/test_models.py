"""Tokens of vLLM with a bounded cache equal those of ``BoundedCache``: every family, policy and scheme of positions."""

from __future__ import annotations

import pytest
import tiny

POLICIES = ("lookahead-locret", "locret", "knorm", "keydiff", "streaming", "random", "lagkv", "h2o", "tova", "snapkv")
SETTINGS = dict(budget=64, chunk=32, stabilizers=8, local_len=16)
TOKENS = 50
SCHEMES = [
    pytest.param("compact", POLICIES, id="compact"),
    pytest.param("original", POLICIES, id="original"),
    pytest.param("clipped(48)", POLICIES[:3], id="clipped", marks=pytest.mark.slow),
]
SLOW = {"gemma3", *tiny.MEASURED} - {"gpt_oss", "gemma2", "smollm3"}
"""Sinks, caps, and layers without a rotation are tried always."""
FAMILIES = [
    pytest.param(name, marks=[pytest.mark.slow][name not in SLOW :])
    for name in (*tiny.MODELS, *tiny.MEASURED)
    if name != "llama"
]


@pytest.mark.parametrize(("positions", "policies"), SCHEMES)
def test_every_policy(positions, policies, tmp_path):
    """Eight requests at once, of which each step takes 48 tokens."""
    model = tiny.make(tmp_path / "model", "llama")
    heads, settings = (
        tiny.make_heads(tmp_path / "heads", model, tmp_path / "model"),
        {**SETTINGS, "positions": positions},
    )
    section = {**settings, "heads": heads, "policy": policies[0], "policies": list(policies[1:])}
    ids = tiny.prompts()
    with tiny.started(tmp_path / "model", section) as llm:
        for policy in policies:
            own = {"heads": heads} if "locret" in policy else {}
            wanted = [tiny.kit(model, one, TOKENS, policy=policy, **settings, **own) for one in ids]
            assert tiny.generate(llm, ids, TOKENS, policy=policy) == wanted, policy


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family(name, tmp_path):
    model = tiny.make(tmp_path / "model", name)
    heads = tiny.make_heads(tmp_path / "heads", model, tmp_path / "model")
    ids = tiny.prompts()
    for positions in ("compact", "original") if "longrope" in name else ("compact",):
        settings = {**SETTINGS, "positions": positions}
        wanted = [tiny.kit(model, one, TOKENS, policy="locret", heads=heads, **settings) for one in ids]
        with tiny.started(tmp_path / "model", {**settings, "heads": heads, "policy": "locret"}) as llm:
            assert tiny.generate(llm, ids, TOKENS) == wanted
