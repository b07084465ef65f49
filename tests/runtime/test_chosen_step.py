"""Width and length that are chosen for a model and a device."""

from __future__ import annotations

import pytest
import torch

from locret_kit.cli.plan import resolve, shipped_configs
from locret_kit.config.recipes import choose_for_device
from locret_kit.planning import text_budget
from locret_kit.planning.backbone_sizes import SHARE, WIDTHS, BackboneSizes, choose_width, head_parameters

GIB = 2**30


def backbone(name):
    return BackboneSizes.of(resolve(name)[0])


@pytest.mark.parametrize("name", shipped_configs())
def test_the_width_is_the_largest_within_its_share(name):
    own = backbone(name)
    width = choose_width(own)
    assert head_parameters(own.spec, width) <= SHARE * own.parameters
    assert width == WIDTHS[-1] or head_parameters(own.spec, 2 * width) > SHARE * own.parameters


def test_a_container_s_bound_is_its_memory(monkeypatch, tmp_path):
    monkeypatch.setattr(text_budget, "control_groups", lambda: [tmp_path])
    for words, memory in (("max\n", 2**60), (f"{GIB // 4}\n", GIB // 4), (f"{2**60}\n", 2**60)):
        (tmp_path / "memory.max").write_text(words)
        assert 0 < (text_budget.free_memory(torch.device("cpu")) or 1) <= memory


def test_it_says_what_it_chose(monkeypatch, capsys, tmp_path):
    config, _ = resolve("smollm2-135m")
    config.save_pretrained(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    values = {"recipe": "auto", "backbone.model": str(tmp_path)}
    chosen = choose_for_device(values, ["heads.d_hidden", "data.max_tokens"])
    assert chosen == {"heads.d_hidden": 256, "data.max_tokens": 2048}
    assert "on this CPU: chose heads.d_hidden=256 data.max_tokens=2048\n" in capsys.readouterr().err
    assert choose_for_device(values, ["heads.d_hidden"]) == {"heads.d_hidden": 256}
    assert "chose heads.d_hidden=256\n" in capsys.readouterr().err
