"""Tokens of vLLM with a bounded cache equal those of ``BoundedCache``: every family, policy and scheme of positions."""

import pytest
import tiny
import torch
from vllm import SamplingParams

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
    (model, heads), settings = tiny.make_both(tmp_path, "llama"), {**SETTINGS, "positions": positions}
    section = {**settings, "heads": heads, "policy": policies[0], "policies": list(policies[1:])}
    ids = tiny.prompts()
    with tiny.started(tmp_path / "model", section) as llm:
        for policy in policies:
            own = {"heads": heads} if "locret" in policy else {}
            wanted = [tiny.kit(model, one, TOKENS, policy=policy, **settings, **own) for one in ids]
            assert tiny.generate(llm, ids, TOKENS, policy=policy) == wanted, policy


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family(name, tmp_path):
    model, heads = tiny.make_both(tmp_path, name)
    ids = tiny.prompts()
    for positions in ("compact", "original") if "longrope" in name else ("compact",):
        settings = {**SETTINGS, "positions": positions}
        wanted = [tiny.kit(model, one, TOKENS, policy="locret", heads=heads, **settings) for one in ids]
        with tiny.started(tmp_path / "model", {**settings, "heads": heads, "policy": "locret"}) as llm:
            assert tiny.generate(llm, ids, TOKENS) == wanted


TIE = 0.1
"""Nats between two tokens that bfloat16 may exchange: six steps of logits of 2 to 4. Two to three were seen."""


def margin(llm, ids, one, other):
    """Nats between the probabilities of two tokens after a prompt."""
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=20, detokenize=False)
    (answer,) = llm.generate([{"prompt_token_ids": list(ids)}], params, use_tqdm=False)
    (logprobs,) = answer.outputs[0].logprobs
    return abs(logprobs[one].logprob - logprobs[other].logprob)


@pytest.mark.parametrize("name", tiny.HYBRIDS)
def test_states_of_layers_live_beside_the_pages(name, tmp_path):
    """Tokens are those of transformers where the budget holds the whole text, and of vLLM's own cache for a model that it runs
    in bfloat16 alone. With less, they do not depend on the page's last owner: a text or a state."""
    model, ids = tiny.make(tmp_path, name), tiny.prompts((20, 64, 150, 300))
    rounds = name == "qwen3_next"
    more = {"kv_cache_memory_bytes": 64 << 20, "dtype": "bfloat16" if rounds else "float32"}
    if rounds:
        with tiny.started(tmp_path, None, **more) as llm:
            wanted = tiny.generate(llm, ids, 16)
    else:
        made = (model.generate(torch.tensor([one]), max_new_tokens=16, do_sample=False) for one in ids)
        wanted = [tokens[0, len(one) :].tolist() for one, tokens in zip(ids, made, strict=True)]
    for budget, same in ((512, 4), (64, 2)):
        section = {**SETTINGS, "budget": budget, "positions": "original", "policy": "streaming"}
        with tiny.started(tmp_path, section, **more) as llm:
            groups = tiny.scheduler(llm).kv_cache_config.kv_cache_groups
            kinds = [type(group.kv_cache_spec).__name__ for group in groups]
            assert sorted(kinds) == ["BoundedSpec", "MambaSpec"]
            found = tiny.generate(llm, ids, 16)
            for prompt, mine, theirs in zip(ids[:same], found, wanted, strict=False):
                at = next((i for i, pair in enumerate(zip(mine, theirs, strict=True)) if len({*pair}) > 1), None)
                # Of a model in bfloat16, whose sums a processor without its instructions rounds otherwise: a tie of two tokens.
                assert at is None or (rounds and margin(llm, prompt + mine[:at], mine[at], theirs[at]) < TIE)
            alone = [tiny.generate(llm, [one], 16)[0] for one in ids]
            again = tiny.generate(llm, ids, 16)
            assert again == found and (rounds or alone == found)  # what is rounded depends on how prompts are cut
            assert tiny.free_pages(llm) == tiny.scheduler(llm).kv_cache_config.num_blocks - 1
