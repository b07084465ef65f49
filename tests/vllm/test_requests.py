"""What a request may ask for, what a server refuses, and that a plugin that did not load is an error."""

from __future__ import annotations

import pytest
import tiny
import vllm
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from locret_kit.vllm import choice, plugin, versions
from locret_kit.vllm.refusals import refuse
from locret_kit.vllm.server_settings import Served, ServerSettings

SETTINGS = dict(budget=96, chunk=32, stabilizers=8, local_len=16, positions="compact")


def test_each_request_has_a_budget_and_a_policy_of_its_own(tmp_path):
    model = tiny.make(tmp_path / "model", "llama")
    with tiny.started(tmp_path / "model", {**SETTINGS, "policy": "knorm", "policies": ["snapkv", "h2o"]}) as llm:
        ids, asked = (
            tiny.prompts([300, 400, 500, 310]),
            [{}, {"budget": 48}, {"policy": "snapkv", "budget": 64}, {"policy": "h2o"}],
        )
        params = [
            SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, detokenize=False, extra_args=own or None)
            for own in asked
        ]
        answers = llm.generate([{"prompt_token_ids": one} for one in ids], params, use_tqdm=False)
        for one, own, answer in zip(ids, asked, answers, strict=True):
            settings = {**SETTINGS, "policy": "knorm", **own}
            assert list(answer.outputs[0].token_ids) == tiny.kit(model, one, 40, **settings)
        for own, said in (
            ({"budget": 97}, "budget=97 must be an integer from 1 to 96"),
            ({"budget": -3}, "budget=-3 must be an integer"),
            ({"budget": 8}, "stabilizers=8 must be below budget=8"),
            ({"policy": "tova"}, "policy='tova' must be one of: knorm, snapkv, h2o"),
        ):
            with pytest.raises(VLLMValidationError, match=said):
                tiny.generate(llm, ids[:1], 1, **own)
        with pytest.raises(VLLMValidationError, match=r"seed=1: vLLM .* fails at seeds"):
            llm.generate([{"prompt_token_ids": ids[0]}], SamplingParams(seed=1, detokenize=False), use_tqdm=False)


@pytest.mark.parametrize(
    ("served", "said"),
    [
        ({"budget": 0.5}, "budget=0.5: a page's rows must be known"),
        ({"one_shot": True}, "one_shot=True does not go with vLLM"),
        ({"kv_bits": 4}, "kv_bits=4 does not go with vLLM"),
        ({"protect": "system"}, "protect='system': with vLLM requests protect 'first' alone"),
        ({"policy": "full"}, "it evicts nothing"),
        ({"policy": "ada-snapkv"}, "its heads differ"),
        ({"policy": "pyramidkv"}, "its layers differ"),
        ({"policy": "locret"}, "scores with retaining heads"),
        ({"policy": "expected-attention"}, "its score remembers more"),
        ({"policy": "sirllm"}, "scores by the model's probabilities"),
        ({"policy": "streaming", "policies": ["merge"]}, "it has a part merge"),
        ({"budget": 8, "stabilizers": 8}, "stabilizers=8 must be below budget=8"),
        ({"budgets": 8}, "budgets"),
    ],
)
def test_what_a_server_cannot_have_is_refused(served, said):
    with pytest.raises(ValueError, match=said):
        ServerSettings(Served.read(served))


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"speculative_config": {"method": "ngram"}}, "speculative_config: rejected drafts"),
        ({"enable_prefix_caching": True}, "enable_prefix_caching: a page holds"),
        ({"decode_context_parallel_size": 2}, "decode_context_parallel_size=2 must be 1"),
        ({"prefill_context_parallel_size": 2}, "prefill_context_parallel_size=2 must be 1"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size=2 must be 1"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype=fp8 must be auto"),
        ({"enable_lora": True}, "enable_lora: it was not tried"),
        ({"enable_prompt_embeds": True}, "enable_prompt_embeds: the length"),
        ({"connector": "NixlConnector"}, "kv_connector=NixlConnector must be Documents"),
        ({"documents": "library"}, "documents=library needs vLLM's connector Documents"),
        ({"runner": "pooling"}, "runner=pooling must be generate"),
        ({"architectures": ["OPTForCausalLM"]}, "architecture OPTForCausalLM was not tried"),
    ],
)
def test_what_does_not_go_together_is_refused(facts, said):
    with pytest.raises(ValueError, match=said):
        refuse(facts)


def test_an_engine_refuses_it_too(tmp_path):
    tiny.make(tmp_path / "model", "llama")
    with pytest.raises(Exception, match="enable_prefix_caching: a page holds"):
        with tiny.started(tmp_path / "model", {**SETTINGS, "policy": "streaming"}, enable_prefix_caching=True):
            pass


def test_a_plugin_that_did_not_load_is_an_error(tmp_path):
    """As with a VLLM_PLUGINS that leaves it out: attention would be vLLM's own."""
    tiny.make(tmp_path / "model", "llama")
    for backend in (AttentionBackendEnum.CPU_ATTN, AttentionBackendEnum.CUSTOM):
        backend.clear_override()
    try:
        with pytest.raises(Exception, match="locret_kit's plugin did not load, so vLLM would use full attention"):
            with tiny.started(tmp_path / "model", {**SETTINGS, "policy": "streaming"}):
                pass
    finally:
        plugin.register()


def test_another_release_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(vllm, "__version__", "0.33.1+cpu")
    with pytest.raises(RuntimeError, match=r"vllm==0.33.1: locret_kit's plugin takes 0.32.0 alone"):
        versions.check_version()


def test_an_engine_that_asks_for_nothing_is_vllms_own(tmp_path):
    tiny.make(tmp_path / "model", "llama")
    with tiny.started(tmp_path / "model", None) as llm:
        (layer,) = {
            type(layer.impl).__module__
            for layer in llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
        }
        assert layer == "vllm.v1.attention.backends.cpu_attn"


def test_attention_of_another_kind_is_an_error(tmp_path, monkeypatch):
    """As with a card and no ``--attention-backend CUSTOM``: the plugin is there, and the layers are not its own."""
    tiny.make(tmp_path / "model", "llama")
    monkeypatch.setattr(choice, "asked", lambda: False)
    with pytest.raises(
        Exception, match=r"attention of model\.layers\.0\.self_attn\.attn is CPUAttentionBackendImpl, not locret_kit's"
    ):
        with tiny.started(tmp_path / "model", {**SETTINGS, "policy": "streaming"}) as llm:
            tiny.generate(llm, tiny.prompts([20]), 1)
