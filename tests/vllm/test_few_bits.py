"""Weights in few bits, as vLLM has them on a CPU: with a budget that holds the text tokens are those of vLLM's own attention."""

import json

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

GROUP = 32
AVX512 = pytest.mark.skipif(not torch.cpu._is_avx512_supported(), reason="vLLM's build for AVX2 has no cpu_gemm_wna16")


def packed(x: Tensor) -> Tensor:
    """Eight numbers from 0 to 15 along the first axis in each int32."""
    x = x.long().unflatten(0, (-1, 8))
    return torch.stack([x[:, i] << 4 * i for i in range(8)]).sum(0).to(torch.int32)


def int8(name: str, weight: Tensor) -> dict[str, Tensor]:
    scale = weight.abs().amax(1, keepdim=True) / 127
    return {name: (weight / scale).round().to(torch.int8), f"{name}_scale": scale}


def gptq(name: str, weight: Tensor) -> dict[str, Tensor]:
    groups_OGI = weight.unflatten(1, (-1, GROUP))
    scale_OG = groups_OGI.abs().amax(2) / 7
    numbers_OI = ((groups_OGI / scale_OG[..., None]).round() + 8).flatten(1)
    parts = {
        "qweight": packed(numbers_OI.T), "qzeros": packed(torch.full_like(scale_OG, 7)).T.contiguous(),
        "scales": scale_OG.T.contiguous(), "g_idx": (torch.arange(weight.shape[1]) // GROUP).int(),
    }  # fmt: skip
    return {name.replace("weight", part): x for part, x in parts.items()}


EIGHT = {"num_bits": 8, "type": "int", "symmetric": True}
FORMS = {
    "int8": (int8, "float32", {
        "quant_method": "compressed-tensors", "format": "int-quantized", "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"all": {
            "targets": ["Linear"], "weights": EIGHT | {"strategy": "channel", "dynamic": False},
            "input_activations": EIGHT | {"strategy": "token", "dynamic": True},
        }},
    }),
    "gptq": (gptq, "float16", {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True}),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("form", ["int8", pytest.param("gptq", marks=AVX512)])
def test_weights_in_few_bits(form, tmp_path):
    quantised, dtype, config = FORMS[form]
    (_, heads), path = tiny.make_both(tmp_path, "wide"), tmp_path / "model/model.safetensors"
    weights: dict[str, Tensor] = {}
    for name, weight in load_file(path).items():
        weights |= quantised(name, weight) if "proj" in name else {name: weight}
    save_file(weights, path, {"format": "pt"})
    settings = tmp_path / "model/config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"quantization_config": config}))
    section = dict(chunk=32, stabilizers=8, local_len=16, heads=heads, policy="locret", positions="compact")
    tokens, ids = {}, tiny.prompts((20, 64, 150, 300))
    for budget in (None, 400, 64):
        given = None if budget is None else section | {"budget": budget}
        with tiny.started(tmp_path / "model", given, dtype=dtype, kv_cache_memory_bytes=64 << 20) as llm:
            tokens[budget] = tiny.generate(llm, ids, 16)
    assert tokens[400] == tokens[None]
    assert tokens[64][:2] == tokens[None][:2] and tokens[64] != tokens[None]
