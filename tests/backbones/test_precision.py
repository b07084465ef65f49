"""Precision that nobody named: what was measured decides, and is said."""

from __future__ import annotations

import pytest
import torch
from tiny_models import tiny_model

from locret_kit.backbones import load as precision
from locret_kit.backbones.load import pick_dtype

CPU = torch.device("cpu")


@pytest.mark.parametrize(("half", "dtype"), [(0.010, torch.bfloat16), (0.0101, torch.float32)])
def test_the_faster_type_and_bfloat16_where_none_is(half, dtype, monkeypatch):
    config, timed = tiny_model("llama").config, []
    monkeypatch.setattr(precision, "lacks_bfloat16", lambda: False)
    monkeypatch.setattr(precision, "seconds", lambda *sizes: timed.append(sizes) or (0.010, half))
    precision._measured.cache_clear()
    chosen = [precision.choose_precision(CPU, config) for _ in range(2)]
    assert chosen[0] == chosen[1] and timed == [(64, 48)]  # once in a process, by the model's own matrix
    assert chosen[0].dtype == pick_dtype("auto", CPU, config) == dtype
    assert f"{1e3 * half:.1f} ms in bfloat16" in str(chosen[0]) and "10.0 in float32" in str(chosen[0])
    precision._measured.cache_clear()


def test_without_a_measurement(monkeypatch):
    config = tiny_model("llama").config
    monkeypatch.setattr(precision, "seconds", None)
    monkeypatch.setattr(precision, "lacks_bfloat16", lambda: True)
    assert str(precision.choose_precision(CPU, config)) == "float32: this processor widens bfloat16 to it"
    assert precision.choose_precision(torch.device("cuda"), config).dtype == torch.bfloat16
    assert pick_dtype("float16", CPU, config) == torch.float16
