"""Settings that a server refuses, and engines and releases that cannot have a bounded cache."""

import pytest
import tiny
import torch
import vllm
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
from vllm.v1.sample.logits_processor import _load_custom_logitsprocs, validate_logits_processors_parameters

from locret_kit.validation import build
from locret_kit.vllm import attention_backend
from locret_kit.vllm.interfaces import missing
from locret_kit.vllm.refusals import refuse, refuse_engine
from locret_kit.vllm.server_settings import ServerSettings, VllmSettings
from locret_kit.vllm.worker import PROCESSOR, RequestInfo, Worker, engine_options

SECTION = dict(budget=64, chunk=32, stabilizers=8, local_len=16, policy="streaming")


@pytest.mark.parametrize(
    ("section", "said"),
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
def test_what_a_server_cannot_have_is_refused(section, said):
    with pytest.raises(ValueError, match=said):
        ServerSettings(build(VllmSettings, section))


def test_a_budget_without_room_for_what_is_protected_is_refused_where_a_request_arrives(llama):
    """Whatever its length: a worker that raises would end the engine for everybody. What is taken runs."""
    server = ServerSettings(build(VllmSettings, {**SECTION, "protect": "first"}))
    worker = Worker.of(server, tiny.configuration(llama, SECTION).model_config, torch.device("cpu"))
    said = "budget=20 must be above 20: 4 protected tokens and 16 stabilizers or tail tokens"
    with pytest.raises(ValueError, match=said):
        server.request({"budget": 20}, 1)
    server.request({"budget": 21}, 1)
    for tokens in (1, 16, 500):
        worker.text(RequestInfo(tokens, {"budget": 21}))


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"speculative_config": {"method": "ngram"}}, "speculative_config must be left out: rejected drafts"),
        ({"enable_prefix_caching": True}, "enable_prefix_caching must be left out: a page holds"),
        ({"decode_context_parallel_size": 2}, "decode_context_parallel_size=2 must be 1"),
        ({"prefill_context_parallel_size": 2}, "prefill_context_parallel_size=2 must be 1"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size=2 must be 1: on CPUs vLLM's own"),
        ({"api_server_count": 2}, "api_server_count=2 must be 1: start several servers"),
        ({"nnodes": 2}, "nnodes=2 must be 1: a layer split over several machines"),
        ({"enable_sleep_mode": True}, "enable_sleep_mode must be left out"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype=fp8 must be auto or bfloat16 or float16"),
        ({"enable_lora": True}, "enable_lora must be left out: it was not tried"),
        ({"enable_prompt_embeds": True}, "enable_prompt_embeds must be left out: the length"),
        ({"kv_connector": "NixlConnector"}, "kv_connector=NixlConnector must be Documents"),
        ({"documents": "library"}, "documents=library needs vLLM's connector Documents"),
        ({"runner": "pooling"}, "runner=pooling must be auto or generate"),
        ({"documents": "library", "is_hybrid": True}, "documents=library must be left out: layers of this model hold"),
    ],
)
def test_what_does_not_go_together_is_refused(facts, said):
    with pytest.raises(ValueError, match=said):
        refuse(facts)


@pytest.mark.parametrize("name", ["enable_prefix_caching", "enable_lora", "pipeline_parallel_size"])
def test_an_engine_is_refused_by_its_configuration(llama, name):
    with pytest.raises(ValueError, match=f"{name}(=2)? must be"):
        refuse_engine(tiny.configuration(llama, SECTION, **{name: 2 if name.endswith("size") else True}), None)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"enable_prefix_caching": True}, "enable_prefix_caching must be left out"),
        *(
            ({"additional_config": one}, "additional_config must hold the settings of locret_kit.vllm:Requests")
            for one in ({}, {"locret": []}, {"locret": None})
        ),
    ],
)
def test_an_engine_that_is_refused_does_not_start(llama, options, said):
    """As one that asks for a bounded cache, and says no settings."""
    with pytest.raises(Exception, match=said):
        with tiny.started(llama, SECTION, **options):
            pass


def test_another_release_is_taken_where_it_has_what_the_kit_uses(monkeypatch, caplog):
    """As vLLM asks: by the name of the logits processor. One that has not is refused by what is missing."""
    assert not [*missing()]
    monkeypatch.setattr(vllm, "__version__", "0.33.1+cpu")
    assert _load_custom_logitsprocs([PROCESSOR])[0].__name__ == "Requests" and "vllm==0.33.1: not tested" in caplog.text
    monkeypatch.delattr("vllm.v1.attention.backend.AttentionBackend.customize_spec")
    absent = "vllm==0.33.1: it has no vllm.v1.attention.backend.AttentionBackend.customize_spec"
    with pytest.raises(RuntimeError, match=absent):
        _load_custom_logitsprocs([PROCESSOR])


def test_attention_that_is_not_known_is_refused_by_what_was_seen(llama, monkeypatch):
    """Queries that are doubled in one channel after the rotation: no rotation of transformers' frequencies."""
    turn = RotaryEmbedding.forward_native

    def other(self, *args):
        q, k = turn(self, *args)
        return q * torch.linspace(1, 2, q.shape[-1]), k

    monkeypatch.setattr(RotaryEmbedding, "forward_native", other)
    monkeypatch.setattr(RotaryEmbedding, "forward_cpu", other)
    said = r"architecture=LlamaForCausalLM: model\.layers\.0\.self_attn\.attn rotates otherwise than transformers'"
    with pytest.raises(Exception, match=said):
        with tiny.started(llama, SECTION):
            pass


def test_settings_of_ones_own_are_refused_where_the_servers_are_not_known():
    """As in the process of ``vllm serve`` that takes requests: a worker that refuses them would end the engine for everybody."""
    for own in ({"budget": 16}, {"policy": "knorm"}, {"chunk": 5}, {"positions": "original"}):
        with pytest.raises(VLLMValidationError, match="a request has settings of its own where locret-vllm started"):
            validate_logits_processors_parameters([PROCESSOR], SamplingParams(extra_args=own))
    validate_logits_processors_parameters([PROCESSOR], SamplingParams(extra_args={"of another": 1}))
    server = ServerSettings(VllmSettings(budget=64, chunk=32, policy="knorm"))
    engine_options(server)
    try:
        validate_logits_processors_parameters([PROCESSOR], SamplingParams(extra_args={"budget": 48}))
        with pytest.raises(VLLMValidationError, match="budget=65 must be an integer from 1 to 64, the server's"):
            validate_logits_processors_parameters([PROCESSOR], SamplingParams(extra_args={"budget": 65}))
        for name, nearest in (("chunk", ""), ("bugdet", " Did you mean 'budget'?"), ("kv_transfer_params", "")):
            with pytest.raises(VLLMValidationError) as refused:
                validate_logits_processors_parameters([PROCESSOR], SamplingParams(extra_args={"budget": 48, name: 5}))
            assert f"vllm_xargs={name!r} is unknown.{nearest} Known: budget, policy" in str(refused.value)
        engine_options(server, processors=["another:Processor"])  # whose settings they may be
        validate_logits_processors_parameters([PROCESSOR], SamplingParams(extra_args={"of another": 1}))
    finally:
        tiny.forget()


def test_attention_of_another_kind_is_an_error(llama, monkeypatch):
    """As with a card and no ``--attention-backend CUSTOM``: the plugin is there, and the layers are not its own."""
    monkeypatch.setattr(attention_backend, "is_bounded", lambda: False)
    said = r"attention of model\.layers\.0\.self_attn\.attn is CPUAttentionBackend, not locret_kit's"
    with pytest.raises(Exception, match=said):
        with tiny.started(llama, SECTION) as llm:
            tiny.generate(llm, tiny.prompts([20]), 1)
