"""Weights in 4 and 8 bits: what is quantised and how, its bytes against bitsandbytes' own, runs on a CPU, and refusals.

bitsandbytes' CPU kernels do the arithmetic here. What its CUDA kernels take beside the weights while they multiply is
planned from their source and is not measured.
"""

from __future__ import annotations

import io
import sys
from pathlib import Path

import bitsandbytes as bnb
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import NAMES, backbone, configuration, on_meta
from planned import setting_of
from tiny_bits import TINY
from tiny_models import FAMILIES, tiny_model
from tiny_tokenizer import TEXT, save_tiny_backbone
from training_plans import LARGER, measured
from transformers import AutoConfig, AutoModelForCausalLM

from locret_kit import BoundedCache, attach
from locret_kit.backbones import patches, weight_bits
from locret_kit.backbones.load import load_backbone
from locret_kit.backbones.spec import decoder_of
from locret_kit.cli.infer import main as infer
from locret_kit.cli.plan import main as plan
from locret_kit.planning import inference_plan as p
from locret_kit.planning.backbone_sizes import BackboneSizes
from locret_kit.planning.fitting_settings import TrainSetting, plan_training
from locret_kit.runtime.session import prefill

CPU = torch.device("cpu")


def stored(tensors) -> int:
    """Bytes of the storages of tensors, each counted once."""
    storages = (tensor.untyped_storage() for tensor in tensors if isinstance(tensor, torch.Tensor))
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def tensors_of(weight):
    """A weight with everything that bitsandbytes keeps beside it."""
    state = getattr(weight, "quant_state", None)
    nested = [state.absmax, state.code, state.offset, state.state2.absmax, state.state2.code] if state else []
    return [weight.data, *nested, getattr(weight, "CB", None), getattr(weight, "SCB", None)]


def quantised(folder: Path, bits: int, dtype: torch.dtype):
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, device_map={"": "cpu"}, quantization_config=weight_bits.quantisation(bits, dtype, CPU)
    )


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    return save_tiny_backbone(tmp_path_factory.mktemp("bits") / "backbone", **TINY)


# ---- bytes ---------------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(inputs=st.integers(1, 300), outputs=st.integers(1, 150))
def test_the_bytes_of_a_matrix(inputs, outputs):
    packed = bnb.nn.Params4bit(torch.rand(outputs, inputs), quant_type="nf4", compress_statistics=True).to("cpu")
    assert stored(tensors_of(packed)) == weight_bits.stored_bytes(inputs, outputs, 4)
    coarse = bnb.nn.Int8Params(torch.rand(outputs, inputs), requires_grad=False).to("cpu")
    assert stored(tensors_of(coarse)) == weight_bits.stored_bytes(inputs, outputs, 8)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_bytes_of_a_backbone(family, bits, tmp_path):
    tiny_model(family).save_pretrained(tmp_path)
    model = quantised(tmp_path, bits, torch.bfloat16)
    held = stored(tensor for weight in model.parameters() for tensor in tensors_of(weight))
    setting = setting_of(99, 16, 8, weight_bits=bits)
    assert held == p.plan_inference(BackboneSizes.of(model.config), setting).weights
    assert held == plan_training(BackboneSizes.of(model.config), TrainSetting(99, weight_bits=bits)).weights


@pytest.mark.parametrize("name", NAMES)
def test_the_matrices_are_those_of_a_layer(name):
    layer = decoder_of(on_meta(configuration(name, layers=1))).layers[0]
    found = [(m.in_features, m.out_features) for m in layer.modules() if isinstance(m, torch.nn.Linear)]
    assert sorted(backbone(name).matrices) == sorted(found)


def test_what_fits_a_smaller_card():
    """Llama-3.1-8B at 128K: weights of 8 bits in 16 GB, of 4 bits in 12 GB, each less one GiB for all that is not ours."""
    for bits, size in ((8, 16), (4, 12)):
        setting = setting_of(131072, 16384, 1024, weight_bits=bits)
        assert p.plan_inference(backbone("llama3.1-8b"), setting).peak < size * 10**9 - 2**30
        assert str(setting) == f"budget 16384, chunk 1024, bfloat16, {bits}-bit weights"


def test_scratch_is_planned():
    """As up is made, activation and up stand beside a dequantised matrix with its scales twice (4 bits), or beside int8
    activations and an int32 and a float16 product (8 bits); else activation, up and their product are the widest."""
    one, rows, hidden, wide = backbone("llama3.1-8b"), 256, 4096, 14336
    plain, eight, four = (
        p.plan_inference(one, setting_of(131072, 16384, rows, weight_bits=bits)).phases for bits in (None, 8, 4)
    )
    assert four["mlp"] - plain["mlp"] == hidden * wide * (2 + 2 * 4 / 64) - rows * wide * 2
    assert eight["mlp"] - plain["mlp"] == rows * (hidden + wide * (4 + 2)) - rows * wide * 2
    assert "project" not in plain and eight["project"] < four["project"]


@pytest.mark.parametrize("kind", ["llama", "phi3"])
def test_the_peak_of_a_step_with_4_bits(kind, tmp_path):
    """Whole steps on a CPU, whose kernels dequantise a matrix as a GPU's do for many tokens."""
    config = AutoConfig.for_model(kind, vocab_size=97, max_position_embeddings=2048, pad_token_id=0, **LARGER)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    model = quantised(tmp_path, 4, torch.float32)
    for module in model.modules():
        if isinstance(module, bnb.nn.Linear4bit):
            module.support_avx512bf16_for_cpu = False  # such a CPU has a kernel of its own, and a layout for it
    held = stored(tensor for weight in model.parameters() for tensor in tensors_of(weight))
    setting = TrainSetting(192, 32, 1, "float32", 32, weight_bits=4)
    step = plan_training(BackboneSizes.of(config), setting)
    assert max(step.phases, key=step.phases.__getitem__) == "mlp" and step.weights == held
    assert step.peak == pytest.approx(held + measured(config, setting, model)[0], rel=0.02)


# ---- runs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("bits", "off"), [(8, 0.05), (4, 0.35)])
def test_a_backbone_in_few_bits(place, bits, off):
    ids = torch.arange(2, 62)[None]
    plain, _ = load_backbone(str(place), device="cpu", dtype="float32")
    model, _ = load_backbone(str(place), device="cpu", dtype="float32", weight_bits=bits)
    kind = {8: bnb.nn.Linear8bitLt, 4: bnb.nn.Linear4bit}[bits]
    linear = {name: m for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    assert {name for name, m in linear.items() if type(m) is torch.nn.Linear} == {"lm_head"}
    assert sum(type(m) is kind for m in linear.values()) == 7 * 3
    if bits == 4:
        state = model.model.layers[0].mlp.up_proj.weight.quant_state
        assert (state.quant_type, state.nested, state.blocksize) == ("nf4", True, 64)
        assert model.model.layers[0].mlp.up_proj.compute_dtype == torch.float32
    with torch.no_grad():
        want, got = (m(input_ids=ids).logits for m in (plain, model))
    assert 0 < (got - want).norm() < off * want.norm()
    assert not model.training and not any(weight.requires_grad for weight in model.parameters())
    assert weight_bits.weight_bits_of(model) == bits and weight_bits.weight_bits_of(plain) is None
    assert weight_bits.precision_of(model) == f"float32, {bits}-bit weights"
    assert weight_bits.precision_of(plain) == "float32"
    model.model.to("cpu")  # as training does


def test_a_spread_backbone_in_few_bits(place):
    model, _ = load_backbone(str(place), device="cpu", device_map="auto", gpu_memory="1GiB", weight_bits=4)
    assert type(model.model.layers[2].mlp.up_proj) is bnb.nn.Linear4bit


@pytest.mark.parametrize("bits", [8, 4])
def test_mlps_in_slices(place, bits, monkeypatch):
    model, _ = load_backbone(str(place), device="cpu", dtype="float32", weight_bits=bits)
    logits = []
    for length in (7, 10**6):
        monkeypatch.setattr(patches, "SLICE", length)
        with attach(model):
            logits.append(prefill(model, range(2, 92), BoundedCache(24, "streaming", chunk=30, prompt_length=90)))
    torch.testing.assert_close(*logits, atol=2e-2, rtol=2e-2)


def test_the_command(place, monkeypatch, capfd):
    for bits in ("8", "4"):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(TEXT.encode()), encoding="utf-8"))
        flags = ["--policy", "h2o", "--budget", "24", "--chunk", "16", "--max-new-tokens", "3", "--device", "cpu"]
        assert infer(["--model", str(place), *flags, "--weight-bits", bits]) == 0
        err = capfd.readouterr().err
        said = [line for line in err.splitlines() if not line.startswith("precision: ")]
        assert "prefill: " in err and "float16" not in "".join(said), "bitsandbytes says nothing of its own"
    assert plan(["--model", "llama3.1-8b", "--gpu-memory", "12GB", "--weight-bits", "4"]) == 0
    out = capfd.readouterr().out
    assert "8.03e9 parameters, bfloat16, 4-bit weights" in out and "weights       5.31 GiB" in out
    assert plan(["--model", "llama3.1-8b", "--gpu-memory", "12GB", "--weight-bits", "4", "--train", "4096"]) == 0
    assert "weights       5.31 GiB" in capfd.readouterr().out


# ---- refusals ------------------------------------------------------------------------------------------------------


def test_without_the_package_the_extra_is_named(place, monkeypatch, capsys):
    monkeypatch.setattr(weight_bits, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(TEXT.encode()), encoding="utf-8"))
    assert infer(["--model", str(place), "--policy", "h2o", "--weight-bits", "4", "--quiet"]) == 1
    said = "weight_bits=4 needs bitsandbytes: in the clone, pip install -e '.[quantised]'"
    assert capsys.readouterr().err == f"locret-infer: {said}\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weight_bits": 3}, "weight_bits=3 must be 8 or 4"),
        ({"weight_bits": 4, "device": "meta"}, "device='meta' holds no numbers"),
        ({"weight_bits": 8, "adapter": "lab/lora"}, "adapter='lab/lora' would be rounded .* merge it first"),
    ],
)
def test_what_cannot_be(place, options, message):
    with pytest.raises(ValueError, match=message):
        load_backbone(str(place), **{"device": "cpu", **options})


def test_an_absent_backbone_is_one_line(tmp_path):
    with pytest.raises(FileNotFoundError, match="cannot be loaded"):
        load_backbone(str(tmp_path), device="cpu", weight_bits=4)
