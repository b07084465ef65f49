"""The table of a layer's launches and bytes, by hand at the sizes of two recipes."""

from dataclasses import replace

import pytest
from interpreted import common  # noqa: F401  (before anything else imports the kernels)
from scripts_loaded import load_script

from locret_kit.planning.backbone_sizes import BackboneSizes

tool = load_script("scripts/launches.py")


@pytest.mark.parametrize(("name", "most"), {"phi3-mini": (13, 6), "llama3.1-8b": (16, 6)}.items())
def test_launches_and_bytes_of_a_layer(name, most):
    """A token reads every matrix once, in four launches; evictions select for all layers in one, and move each row that stays."""
    config, setting = tool.setting_of(name)
    chunk, ends, token = tool.record(config, setting)
    assert len(chunk) <= most[0] and len(token) <= most[1], (chunk, token)
    assert all([x.operator for x in some].count("enter_rows") == 1 for some in (chunk, token))
    backbone = BackboneSizes.of(config)
    spec, matrices = backbone.spec, 2 * sum(inputs * outputs for inputs, outputs in backbone.matrices)
    matrices += 2 * setting.width * config.hidden_size  # the head that is folded
    assert [x.operator for x in token] == ["row_products", "enter_rows", "ragged_decode", *["row_products"] * 3]
    assert matrices <= sum(x.nbytes for x in token if x.operator == "row_products") <= 1.001 * matrices
    (decode,) = [x.nbytes for x in token if x.operator == "ragged_decode"]
    assert setting.budget <= decode / (4 * spec.n_kv_heads * spec.head_dim) <= setting.budget + setting.chunk
    # Scores of all layers side by side, the choice, keys with values, positions with scores: whatever layers there are.
    assert [x.operator for x in ends] == ["cat", "select_rows", "compact_rows", "compact_rows"]
    assert not any(x.operator in ("select_rows", "compact_rows", "sort", "topk") for x in chunk)
    row = 2 * spec.head_dim * 2 + 4 + 4  # keys, values, position and score; a row's number is read with each
    rows = 2 * spec.n_kv_heads * setting.budget
    assert 0 < sum(x.nbytes for x in ends[2:]) - rows * (2 * row + 4 * 4) < 999


def test_rows_in_eight_bits_take_no_launch_more():
    """A token in 8 bits takes the launches of one in 16, and all layers are cut at once, levels beside codes."""
    config, setting = tool.setting_of("phi3-mini")
    plain, eight = (tool.record(config, replace(setting, run=replace(setting.run, kv_bits=bits))) for bits in (None, 8))
    names = [[[x.operator for x in some] for some in run] for run in (eight, plain)]
    assert names[0][2] == names[1][2] and names[0][1] == [*names[1][1], "compact_rows"]
    (mine,), (theirs,) = ([x.nbytes for x in run[2] if x.operator == "ragged_decode"] for run in (eight, plain))
    assert mine == (1 + 2 * 2 / 32) / 2 * theirs


def test_eight_texts_take_the_launches_of_two():
    """A token of each text: what is launched for one more text is nothing."""
    config, setting = tool.setting_of("phi3-mini")
    two, eight = (tool.record_texts(config, setting, texts) for texts in (2, 8))
    assert [x.operator for x in two] == [x.operator for x in eight] and len(eight) <= 13
    assert sum(x.operator == "ragged_decode" for x in eight) == 1


def test_the_command(capsys):
    assert tool.main(["--model", "phi3-mini"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "phi3-mini, one layer, budget 6000, chunk 3072, bfloat16: a chunk of 3072 tokens"
    assert "a token" in said and sum(line.split()[0] == "all" and line.split()[1].isdigit() for line in said) == 3
