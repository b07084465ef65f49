"""The memory plan against models on PyTorch's meta device, whose storages are counted as they are made."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from live_bytes import FusedAttention, LiveBytes
from plan_cases import backbone, configuration, on_meta
from planned import changed, setting_of
from tiny_models import FAMILIES, tiny_model

from locret_kit import BoundedCache, HeadsConfig, RetainingHeads, attach
from locret_kit.backbones.spec import spec_of
from locret_kit.planning import inference_plan as p
from locret_kit.planning.backbone_sizes import BackboneSizes
from locret_kit.policies.grammar import parse_policy
from locret_kit.runtime.session import prefill

GIB = 2**30


def heads_on_meta(config, d_hidden: int, dtype: torch.dtype):
    with torch.device("meta"):
        return RetainingHeads(HeadsConfig.for_backbone(spec_of(config), "x", d_hidden)).to(dtype)


def nbytes(module: torch.nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())


# ---- weights, heads, cache: exact ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("gemma3-270m", 268098176), ("llama3.1-8b", 8030261248), ("mistral-7b", 7248023552), ("phi3-mini", 3821079552),
        ("qwen2.5-7b", 7615616512), ("qwen3-8b", 8190735360), ("smollm2-135m", 134515008),
    ],
)  # fmt: skip
def test_parameters_are_those_of_the_published_weights(name, parameters):
    config = configuration(name)
    before = config.to_dict()
    assert BackboneSizes.of(config).parameters == parameters and config.to_dict() == before


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_of_tiny_models(family):
    model = tiny_model(family)
    assert BackboneSizes.of(model.config).parameters == sum(parameter.numel() for parameter in model.parameters())


def test_published_sizes():
    """Locret, section 1 (a 128K cache of Phi-3-mini: more than 50 GB) and the published heads' 606 MB."""
    phi = backbone("phi3-mini")
    assert p.full_cache_bytes(phi.spec, 131072) == 48 * GIB == 51_539_607_552
    assert p.full_cache_bytes(backbone("llama3.1-8b").spec, 131072) == 16 * GIB
    plan = p.plan_inference(phi, setting_of(131072, 6000, 3072))
    assert 14 <= 48 * GIB / plan.cache < 15
    assert round(plan.heads / 1e6) == 606 + 201, "and what stands behind the projections, which are a third as wide"


POLICIES = ["h2o", "roco", "scissorhands", "tova", "snapkv", "pyramidkv", "nacl", "kvcrush", "full", "merge"]
POLICIES += ["h2o reread=passages(6,5,3)", "ada-snapkv", "ada-pyramid", "score=aas allocation=adaptive"]
IN_BITS = ["h2o", "snapkv", "pyramidkv", "full"]
OTHERS = ["llama-mha", "llama-mqa", "qwen3", "phi3", "mistral-window"]
CACHES = [
    *product(POLICIES, ["gemma3"], [None]),
    *product(["streaming"], OTHERS, [None]),
    *product(IN_BITS, ["llama"], [4, 2]),
    ("h2o", "gemma3", 4),
]


@pytest.mark.parametrize(("policy", "family", "bits"), CACHES)
def test_cache_bytes_are_those_of_the_cache(policy, family, bits):
    model = tiny_model(family)
    settings = dict(stabilizers=8, local_len=8, kv_bits=bits)
    kept = BoundedCache(64, policy, chunk=48, prompt_length=150, **settings)
    with attach(model):
        prefill(model, [1 + i % 90 for i in range(150)], kept)
    holders = [one for layer in kept.layers for one in (layer, layer.layout, layer.codec)]
    tensors = {id(x): x for one in holders for x in vars(one).values() if isinstance(x, torch.Tensor)}
    held = sum(x.numel() * x.element_size() for x in tensors.values()) + kept.state.scratch.nbytes
    plain = setting_of(150, 64, 48, "float32", policy=parse_policy(policy), stabilizers=8, local_len=8)
    spec = spec_of(model.config)
    assert held == kept.nbytes == p.cache_bytes(spec, changed(plain, kv_bits=bits)) < 2 * p.cache_bytes(spec, plain)


@pytest.mark.parametrize("policy", ["snapkv", "locret", "pyramid-locret"])
def test_cache_and_heads_of_a_whole_prompt_at_once(policy):
    model = tiny_model("llama")
    heads = RetainingHeads(HeadsConfig.for_backbone(spec_of(model.config), "x", 24))
    kept = BoundedCache(64, policy, heads, prompt_length=150, one_shot=True)
    with attach(model):
        prefill(model, [1 + i % 90 for i in range(150)], kept)
    setting = setting_of(150, 64, 9, "float32", 24, parse_policy(policy), one_shot=True)
    plan = p.plan_inference(BackboneSizes.of(model.config), setting)
    assert plan.cache == kept.nbytes
    assert plan.weights == nbytes(model) and plan.heads == (0 if policy == "snapkv" else nbytes(heads))


# ---- workspace: what PyTorch would allocate ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "policy", "budget", "chunk", "context", "bits"),
    [
        ("phi3-mini", "locret", 6000, 3072, 10000, 4),
        ("llama3.1-8b", "locret", 16384, 8192, 25000, 2),
        ("llama3.1-8b", "locret", 2048, 12000, 20000, None),  # MLPs in slices
        ("qwen2.5-7b", "locret", 8000, 2048, 11000, None),
        ("gemma3-270m", "locret", 1024, 512, 2100, None),
        ("llama3.1-8b", "recency prefill_mask=sliding(512)", 6000, 2048, 9000, None),  # a reading picks rows
        ("llama3.1-8b", "recency prefill_mask=sliding(4096)", 6000, 2048, 9000, None),
    ],
)
def test_peak_of_prefill(name, policy, budget, chunk, context, bits, monkeypatch):
    """Two layers of the real sizes on the meta device, attention fused and without a mask as on a GPU (`lower_right`)."""
    monkeypatch.setattr("locret_kit.cache.attend.lower_right", lambda *args: None)
    config, policy = configuration(name, layers=2), parse_policy(policy)
    model, heads = on_meta(config), heads_on_meta(config, 1024, torch.bfloat16) if policy.needs_heads else None
    with FusedAttention(), LiveBytes() as live:
        kept = BoundedCache(budget, policy, heads, chunk=chunk, prompt_length=context, kv_bits=bits)
        with attach(model):
            prefill(model, range(context), kept)
    setting = setting_of(context, budget, chunk, policy=policy, kv_bits=bits)
    plan = p.plan_inference(BackboneSizes.of(config), setting)
    folded = name != "gemma3-270m"  # which has norms between
    own = 0 if heads is None else nbytes(heads) + 2 * folded * 1024 * config.hidden_size * 2
    assert (plan.weights, plan.heads, plan.cache) == (nbytes(model), own, kept.nbytes)
    assert plan.cache + plan.workspace == pytest.approx(live.peak, rel=0.03)
