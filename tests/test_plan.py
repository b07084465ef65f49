"""The memory plan against models on PyTorch's meta device, whose storages are counted as they are made."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from live_bytes import FusedAttention, LiveBytes
from tiny_models import FAMILIES, tiny_model
from transformers import AutoConfig, AutoModelForCausalLM

from locret_kit import BoundedCache, HeadsConfig, RetainingHeads, attach
from locret_kit.backbones.families import decoder_of, ropes_of, spec_of
from locret_kit.backbones.intercept import Attachment
from locret_kit.cli import plan as cli
from locret_kit.cli.config import known_recipes
from locret_kit.runtime import plan as p
from locret_kit.runtime.session import prefill
from locret_kit.training.observer import Observer

CONFIGS = Path(__file__).resolve().parents[1] / "recipes" / "configs"
NAMES = sorted(file.stem for file in CONFIGS.glob("*.json"))
GIB = 2**30


def configuration(name: str, layers: int | None = None):
    raw = json.loads((CONFIGS / f"{name}.json").read_text())
    raw.pop("_name_or_path")
    if layers:
        raw["num_hidden_layers"] = layers
        if "layer_types" in raw:
            raw["layer_types"] = raw["layer_types"][-layers:]
    return AutoConfig.for_model(raw.pop("model_type"), **raw)


def on_meta(config):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval().requires_grad_(False)


def heads_on_meta(config, d_hidden: int, dtype: torch.dtype):
    with torch.device("meta"):
        return RetainingHeads(HeadsConfig.for_backbone(spec_of(config), "x", d_hidden)).to(dtype)


def nbytes(module: torch.nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())


@cache
def backbone(name: str) -> p.Backbone:
    return p.Backbone.of(configuration(name))


# ---- weights, heads, cache: exact ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_parameters_are_those_of_the_model(name):
    config = configuration(name)
    assert p.parameters_of(config) == sum(parameter.numel() for parameter in on_meta(config).parameters())


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_of_tiny_models(family):
    model = tiny_model(family)
    assert p.parameters_of(model.config) == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("change", [{"attention_bias": True}, {"mlp_bias": True}, {"tie_word_embeddings": True}])
def test_parameters_with_options(change):
    settings = dict(vocab_size=97, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=6)
    config = AutoConfig.for_model("llama", num_key_value_heads=2, **settings, **change)
    assert p.parameters_of(config) == sum(parameter.numel() for parameter in on_meta(config).parameters())


@pytest.mark.parametrize(
    ("name", "published"),  # half the bytes that the published safetensors indices name as total_size
    [
        ("phi3-mini", 3_821_079_552),
        ("llama3.1-8b", 8_030_261_248),
        ("qwen2.5-7b", 7_615_616_512),
        ("qwen3-8b", 8_190_735_360),
        ("mistral-7b", 7_248_023_552),
        ("gemma3-270m", 268_098_176),
    ],
)
def test_published_parameter_counts(name, published):
    assert backbone(name).parameters == published


def test_published_sizes():
    """Locret, section 1 (a 128K cache of Phi-3-mini: more than 50 GB) and the published heads' 606 MB."""
    phi = backbone("phi3-mini")
    assert p.full_cache_bytes(phi.spec, 131072) == 48 * GIB == 51_539_607_552
    assert p.full_cache_bytes(backbone("llama3.1-8b").spec, 131072) == 16 * GIB
    plan = p.plan_inference(phi, p.Setting(131072, 6000, 3072))
    assert 14 <= 48 * GIB / plan.cache < 15
    assert round(plan.heads / 1e6) == 606


@pytest.mark.parametrize("name", NAMES)
def test_heads_are_those_of_the_model(name):
    heads = heads_on_meta(configuration(name), 96, torch.bfloat16)
    assert p.plan_inference(backbone(name), p.Setting(999, 64, 32, d_hidden=96)).heads == nbytes(heads)


@pytest.mark.parametrize("family", ["llama", "llama-mha", "llama-mqa", "qwen3", "phi3", "mistral-window", "gemma3"])
def test_cache_bytes_are_those_of_the_cache(family):
    model = tiny_model(family)
    kept = BoundedCache(40, "streaming", chunk=24, prompt_length=150, stabilizers=8, local_len=8)
    with attach(model):
        prefill(model, range(1, 97), kept)
    setting = p.Setting(150, 40, 24, dtype="float32")
    assert p.cache_bytes(spec_of(model.config), setting) == kept.nbytes


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("policy", ["h2o", "roco", "scissorhands", "tova", "snapkv", "pyramidkv", "ada-snapkv", "nacl"])
def test_cache_bytes_of_policies(policy, family):
    model = tiny_model(family)
    kept = BoundedCache(64, policy, chunk=48, prompt_length=250, stabilizers=8, local_len=8)
    with attach(model):
        prefill(model, [1 + i % 90 for i in range(150)], kept)
    setting = p.Setting.for_policy(kept.policy, 250, 64, 48, dtype="float32", d_hidden=1024)
    assert p.cache_bytes(spec_of(model.config), setting) == kept.nbytes


# ---- workspace: what PyTorch would allocate ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "budget", "chunk", "context"),
    [
        ("phi3-mini", 6000, 3072, 13000),
        ("llama3.1-8b", 16384, 1024, 18500),
        ("llama3.1-8b", 2048, 4096, 9000),
        ("qwen2.5-7b", 8000, 1024, 10000),
        ("qwen3-8b", 2048, 4096, 9000),
        ("mistral-7b", 4096, 512, 6000),
        ("gemma3-270m", 1024, 512, 3000),
    ],
)
def test_peak_of_prefill(name, budget, chunk, context, monkeypatch):
    """Three layers of the real sizes on the meta device, attention fused and unmasked as on a GPU."""
    monkeypatch.setattr("locret_kit.cache.attention.causal_lower_right", lambda *args: None)
    config = configuration(name, layers=3)
    model, heads = on_meta(config), heads_on_meta(config, 1024, torch.bfloat16)
    with FusedAttention(), LiveBytes() as live:
        kept = BoundedCache(budget, "locret", heads, chunk=chunk, prompt_length=context)
        with attach(model):
            prefill(model, range(context), kept)
    plan = p.plan_inference(p.Backbone.of(config), p.Setting(context, budget, chunk))
    assert plan.weights == nbytes(model) and plan.heads == nbytes(heads) and plan.cache == kept.nbytes
    assert plan.cache + plan.workspace == pytest.approx(live.peak, rel=0.03)


@pytest.mark.parametrize(("name", "tokens", "answer"), [("phi3-mini", 10240, 200), ("llama3.1-8b", 10240, 64)])
def test_peak_of_a_training_step(name, tokens, answer):
    config = configuration(name, layers=2)
    model, heads = on_meta(config), heads_on_meta(config, 1024, torch.float32)
    loss = dict(smoothing=0.0025, top_fraction=0.05, top_weight=20.0, beta=1.0)
    with FusedAttention(), LiveBytes() as live:
        observer = Observer(
            heads, ropes_of(model, tokens), spec_of(config).windows, ((tokens - answer, tokens),),
            kind="log_prob", floor=-12.0, lead=1, loss=loss, backward=torch.Tensor.backward,
        )  # fmt: skip
        ids = torch.zeros(1, tokens, dtype=torch.long, device="meta")
        with Attachment(model) as attached, torch.no_grad(), attached.handled_by(observer):
            decoder_of(model)(input_ids=ids, use_cache=False)
    plan = p.plan_training(p.Backbone.of(config), p.TrainSetting(tokens, answer))
    assert plan.heads == 4 * nbytes(heads), "weights, gradients and two moments"
    assert plan.workspace + nbytes(heads) == pytest.approx(live.peak, rel=0.03)


# ---- what fits ---------------------------------------------------------------------------------------------------

SIZES = st.integers(1, 40_000)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(budget=SIZES, chunk=SIZES, more=SIZES, name=st.sampled_from(NAMES))
def test_more_never_takes_less(budget, chunk, more, name):
    one = backbone(name)
    setting = p.Setting(131072, budget, chunk)
    least = p.plan_inference(one, setting).peak
    assert p.plan_inference(one, replace(setting, budget=budget + more)).peak >= least
    assert p.plan_inference(one, replace(setting, chunk=chunk + more)).peak >= least
    assert p.plan_inference(one, replace(setting, statistics=1)).peak > least
    assert p.plan_inference(one, replace(setting, dtype="float32")).peak > least


@settings(max_examples=25, deadline=None, derandomize=True)
@given(budget=st.integers(64, 60_000), chunk=st.integers(64, 20_000), cap=st.integers(10 * GIB, 24 * GIB))
def test_the_largest_fit_and_the_next_do_not(budget, chunk, cap):
    one, setting = backbone("phi3-mini"), p.Setting(131072, budget, chunk)

    def fits(**change: int) -> bool:
        return p.plan_inference(one, replace(setting, **change)).peak <= cap

    most = p.largest_budget(one, setting, cap)
    assert most % p.STEP == 0 and (not most or fits(budget=most))
    assert most + p.STEP > setting.context or not fits(budget=most + p.STEP)
    most = p.largest_chunk(one, setting, cap)
    assert most % p.STEP == 0 and (not most or fits(chunk=most))
    assert most + p.STEP > setting.context or not fits(chunk=most + p.STEP)
    near = p.nearest_fitting(one, setting, cap)
    assert len(near) == len(set(near)) <= 3
    assert all(p.plan_inference(one, s).peak <= cap and s.budget <= budget and s.chunk <= chunk for s in near)


def test_a_refused_plan_names_three_that_fit():
    one, setting = backbone("llama3.1-8b"), p.Setting(131072, 16384, 1024)
    cap = 16 * GIB
    with pytest.raises(p.DoesNotFit) as caught:
        p.require_fit(one, setting, cap)
    near = p.nearest_fitting(one, setting, cap)
    assert len(near) == 3
    assert "budget 16384, chunk 1024 at context 131072 needs 17.67 GiB, above the cap of 16.00 GiB" in str(caught.value)
    assert all(str(s) in str(caught.value) for s in near)


def test_a_cap_below_the_weights():
    with pytest.raises(p.DoesNotFit, match=r"No setting fits: weights and heads alone take 15\.33 GiB"):
        p.require_fit(backbone("llama3.1-8b"), p.Setting(131072, 16384, 1024), 15 * GIB)


def test_the_promise_of_24_gib():
    """The paper's two settings at 128K, beside one GiB for everything that is not PyTorch's."""
    for name, budget, chunk in (("phi3-mini", 6000, 3072), ("llama3.1-8b", 16384, 1024)):
        assert p.require_fit(backbone(name), p.Setting(131072, budget, chunk), 23 * GIB).peak < 18 * GIB


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"budget": 0}, "budget=0 must be at least 1"),
        ({"chunk": 0}, "chunk=0 must be at least 1"),
        ({"context": 0}, "prompt_length=0 must be at least 1"),
        ({"dtype": "int8"}, "dtype='int8' must be one of: bfloat16, float16, float32"),
        ({"statistics": -1}, "statistics=-1 must be at least 0"),
        ({"budget": 2**31}, "must be at most 2147483647 (32-bit positions)"),
    ],
)
def test_settings_out_of_bounds(change, message):
    with pytest.raises(ValueError) as caught:
        replace(p.Setting(131072, 6000, 3072), **change)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "size"), [("24GiB", 24 * GIB), ("24 GB", 24 * 10**9), ("1.5MiB", 3 * 2**19), ("4096", 4096), ("7B", 7)]
)
def test_sizes(text, size):
    assert p.parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "24Gi", "24 gigabytes", "-1GiB", "0", "infGiB", "nanGB"])
def test_sizes_that_are_none(text):
    with pytest.raises(ValueError):
        p.parse_bytes(text)


# ---- the command -------------------------------------------------------------------------------------------------


def test_every_shipped_configuration_is_a_recipes_backbone():
    shipped = cli.shipped_configs()
    assert set(shipped) <= set(known_recipes())
    for name, raw in shipped.items():
        config, recipe = cli.resolve(name)
        assert config.num_hidden_layers == raw["num_hidden_layers"]
        if not recipe["backbone.model"].startswith("checkpoints/"):
            assert recipe["backbone.model"] == raw["_name_or_path"]
            assert cli.resolve(raw["_name_or_path"])[0].to_dict() == config.to_dict()


def test_the_command_prints_a_plan(capsys):
    assert cli.main(["--model", "phi3-mini", "--gpu-memory", "24GiB"]) == 0
    out = capsys.readouterr().out
    assert "budget 6000, chunk 3072" in out and "7.12 GiB" in out and "48.00 GiB, 14.2 times" in out
    assert cli.main(["--model", "Qwen/Qwen3-8B", "--gpu-memory", "24GiB", "--train", "10240"]) == 0
    assert "longest sample that fits" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "phi3min", "--gpu-memory", "24GiB"], "is no recipe and no folder. Did you mean 'phi3-mini'?"),
        (["--model", "tiny", "--gpu-memory", "24GiB"], "names no backbone"),
        (["--model", "phi3-mini", "--gpu-memory", "24Gi"], "'24Gi' is not a size such as 24GiB"),
        (["--model", "phi3-mini", "--gpu-memory", "1GiB"], "gpu_memory=1GiB must be above reserve=1GiB"),
        (["--model", "phi3-mini", "--gpu-memory", "24GiB", "--budget", "0"], "budget=0 must be at least 1"),
        (["--model", "llama3.1-8b", "--gpu-memory", "17GiB"], "These fit: budget"),
        (["--model", "llama3.1-8b", "--gpu-memory", "17GiB", "--train", "10240"], "at most 0 tokens fit"),
    ],
)
def test_refusals_are_one_line(arguments, message, capsys):
    assert cli.main(arguments) == 1
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_help_is_light():
    code = (
        "import sys\nfrom locret_kit.cli.plan import parser\nparser().format_help()\n"
        "print({'torch', 'transformers'} & set(sys.modules))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=CONFIGS.parents[1], capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == "set()"
