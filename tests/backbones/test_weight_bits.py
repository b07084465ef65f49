"""Weights in 4 and 8 bits: what is quantised and how, its bytes against bitsandbytes' own, runs on a CPU, and refusals.

bitsandbytes' CPU kernels do the arithmetic here. What its CUDA kernels take beside the weights while they multiply is
planned from their source and is not measured.
"""

import io
import json
import shutil
import sys
from pathlib import Path

import bitsandbytes as bnb
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from plan_cases import NAMES, backbone, configuration, on_meta
from planned import setting_of
from tiny_models import tiny_model
from tiny_tokenizer import TEXT, save_tiny_backbone
from transformers import AutoModelForCausalLM

from locret_kit import BoundedCache, attach
from locret_kit.backbones import weight_bits
from locret_kit.backbones.decoder_modules import decoder_of
from locret_kit.backbones.load import load_backbone
from locret_kit.cli.eval import main as evaluate
from locret_kit.cli.infer import main as infer
from locret_kit.cli.plan import main as plan
from locret_kit.cli.train import main as train
from locret_kit.config.eval_options import load_eval_config
from locret_kit.config.recipes import load_config
from locret_kit.planning import inference_plan as p
from locret_kit.planning.backbone_sizes import BackboneSizes
from locret_kit.runtime.drivers.graph import GraphDriver
from locret_kit.runtime.session import prefill

CPU = torch.device("cpu")
TINY = dict(hidden_size=128, intermediate_size=320)
"""Sizes that every CPU kernel takes: those for AVX512-BF16 want outputs in 32s and inputs in 64s."""


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


@given(inputs=st.integers(1, 300), outputs=st.integers(1, 150))
def test_the_bytes_of_a_matrix(inputs, outputs):
    packed = bnb.nn.Params4bit(torch.rand(outputs, inputs), quant_type="nf4", compress_statistics=True).to("cpu")
    assert stored(tensors_of(packed)) == weight_bits.stored_bytes(inputs, outputs, 4)
    coarse = bnb.nn.Int8Params(torch.rand(outputs, inputs), requires_grad=False).to("cpu")
    assert stored(tensors_of(coarse)) == weight_bits.stored_bytes(inputs, outputs, 8)


@pytest.mark.parametrize(("family", "bits"), [("llama", 8), ("qwen2", 4), ("phi3", 4), ("gemma3", 8)])
def test_the_bytes_of_a_backbone(family, bits, tmp_path):
    tiny_model(family).save_pretrained(tmp_path)
    model = quantised(tmp_path, bits, torch.bfloat16)
    held = stored(tensor for weight in model.parameters() for tensor in tensors_of(weight))
    setting = setting_of(99, 16, 8, weight_bits=bits)
    assert held == p.plan_inference(BackboneSizes.of(model.config), setting).weights


@pytest.mark.parametrize("name", NAMES)
def test_the_matrices_are_those_of_a_layer(name):
    layer = decoder_of(on_meta(configuration(name, layers=1))).layers[0]
    found = [(m.in_features, m.out_features) for m in layer.modules() if isinstance(m, torch.nn.Linear)]
    assert sorted(backbone(name).matrices) == sorted(found)


def test_scratch_is_planned():
    """As up is made, activation and up stand beside a dequantised matrix with its scales twice (4 bits), or beside int8
    activations and an int32 and a float16 product (8 bits); else activation, up and their product are the widest."""
    one, rows, hidden, wide = backbone("llama3.1-8b"), 256, 4096, 14336
    settings = (setting_of(131072, 16384, rows, weight_bits=bits) for bits in (None, 8, 4))
    plain, eight, four = (p.plan_inference(one, setting).phases for setting in settings)
    assert four["mlp"] - plain["mlp"] == hidden * wide * (2 + 2 * 4 / 64) - rows * wide * 2
    assert eight["mlp"] - plain["mlp"] == rows * (hidden + wide * (4 + 2)) - rows * wide * 2
    assert "project" not in plain and eight["project"] < four["project"]


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
        ({"weight_bits": 4, "device": "meta"}, "device='meta' stores no data"),
        ({"weight_bits": 8, "adapter": "lab/lora"}, "adapter='lab/lora' would be rounded .* merge it first"),
    ],
)
def test_what_cannot_be(place, options, message):
    with pytest.raises(ValueError, match=message):
        load_backbone(str(place), **{"device": "cpu", **options})


def test_weights_that_are_quantised_already(place, tmp_path):
    folder = shutil.copytree(place, tmp_path / "quantised")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**config, "quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}})
    )
    with pytest.raises(ValueError, match="weight_bits=8: the weights of .* are quantised already: leave it out"):
        load_backbone(str(folder), device="cpu", weight_bits=8)


def test_heads_train_on_few_bits_and_rows_say_so(place, tmp_path):
    settings = ["recipe=tiny", f"backbone.model={place}", "trainer.accelerator=cpu", "backbone.weight_bits=4"]
    out = tmp_path / "rows"
    assert (
        train([*settings, "data.max_tokens=384", "data.val_samples=0", "optim.steps=2", f"out={tmp_path / 'run'}"]) == 0
    )
    assert json.loads((tmp_path / "run/heads/training.json").read_text())["backbone"]["weight_bits"] == 4
    rows = ["tasks=[passkey]", "lengths=[300]", "samples=1", "policies=[locret]", "budgets=[64]", "device=cpu"]
    rows += ["dtype=float32", "weight_bits=8", "max_new_tokens=2", f"out={out}", f"ckpt={tmp_path / 'run/heads'}"]
    assert evaluate(rows) == 0
    (file,) = out.glob("rows.*.jsonl")
    assert json.loads(file.read_text().splitlines()[0])["dtype"] == "float32, 8-bit weights"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["backbone.weight_bits=3"], "backbone.weight_bits=3 must be one of: 8, 4"),
        (["backbone.weight_bits=4", "trainer.strategy=fsdp"], "weights, which trainer.strategy=fsdp would shard"),
        (["backbone.weight_bits=8", "trainer.strategy=deepspeed_stage_3"], "choose auto, ddp or deepspeed_stage_2"),
    ],
)
def test_training_and_evaluation_refuse(settings, message):
    with pytest.raises(ValueError, match=message):
        load_config(["recipe=tiny", "backbone.model=some/model", *settings])
    assert load_config(["recipe=tiny", "backbone.model=some/model"]).backbone.weight_bits is None
    with pytest.raises(ValueError, match="weight_bits=2 must be one of: 8, 4"):
        load_eval_config(["tasks=[passkey]", "out=x", "weight_bits=2"])


@pytest.mark.parametrize("bits", [8, 4])
def test_only_weights_of_8_bits_are_against_a_graph(place, bits):
    model, _ = load_backbone(str(place), device="cpu", dtype="float32", weight_bits=bits)
    cache = BoundedCache(24, "h2o", chunk=16, prompt_length=90)
    with attach(model):
        prefill(model, range(90), cache)
    reason = GraphDriver(model, cache).refusal(cache)
    assert (reason is None) if bits == 4 else ("weights of 8 bits" in reason)
