"""Precision that nobody named: the processor alone decides, so that the next start loads what this one saves."""

import platform

import pytest
import torch

from locret_kit.backbones import bfloat16
from locret_kit.backbones.load import choose_precision, pick_dtype

CPU = torch.device("cpu")


@pytest.mark.parametrize("machine", ["x86_64", "AMD64", "aarch64", "arm64"])
@pytest.mark.parametrize("there", [False, True])
def test_bfloat16_where_the_processor_has_instructions_for_it(machine, there, monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: there)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: there)
    bfloat16.lacks_bfloat16.cache_clear()
    assert bfloat16.lacks_bfloat16() == (not there)
    said = "bfloat16: cpu computes in it" if there else "float32: this processor widens bfloat16 to it"
    assert str(choose_precision(CPU)) == said
    assert pick_dtype("auto", CPU) == (torch.bfloat16 if there else torch.float32)
    assert pick_dtype("auto", torch.device("cuda")) == torch.bfloat16
    assert pick_dtype("float16", CPU) == torch.float16
    bfloat16.lacks_bfloat16.cache_clear()
