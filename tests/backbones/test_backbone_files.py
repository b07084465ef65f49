"""Backbones whose files are wrong, incomplete, or bring code of their own."""

from __future__ import annotations

import io
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_tokenizer import save_tiny_backbone

from locret_kit.backbones.load import load_backbone, load_config, load_tokenizer, other_backbone
from locret_kit.cli.infer import main as infer
from locret_kit.cli.plan import main as plan
from locret_kit.text.template import render_prompt

WEIGHT = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def backbone(tmp_path) -> Path:
    return save_tiny_backbone(tmp_path / "backbone")


def rewrite(folder: Path, change) -> None:
    state = load_file(folder / "model.safetensors")
    change(state)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def test_a_missing_weight_is_named_and_nothing_runs_on_random_numbers(backbone):
    rewrite(backbone, lambda state: state.pop(WEIGHT))
    with pytest.raises(ValueError, match=f"lack weights.*{WEIGHT}"):
        load_backbone(str(backbone))


def test_a_weight_of_another_shape_is_named(backbone):
    rewrite(backbone, lambda state: state.update({WEIGHT: torch.zeros(3, 3)}))
    with pytest.raises(ValueError, match=WEIGHT):
        load_backbone(str(backbone))


def test_a_document_cannot_allow_a_backbone_to_run_its_code(backbone, tmp_path, monkeypatch, capsys):
    """transformers asks on stdin whether foreign code may run, and stdin is the document."""
    ran = tmp_path / "ran"
    (backbone / "foreign.py").write_text(
        f"from pathlib import Path\nPath({str(ran)!r}).touch()\n"
        "from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast\n"
        "class Config(LlamaConfig):\n    model_type = 'foreign'\n"
    )
    config = json.loads((backbone / "config.json").read_text())
    config |= {"model_type": "foreign", "auto_map": {"AutoConfig": "foreign.Config"}}
    (backbone / "config.json").write_text(json.dumps(config))
    text = "A quiet harbour.\ny\n" * 3
    for command, flags in ((infer, ["--policy", "streaming"]), (plan, ["--gpu-memory", "4GiB"])):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode()), encoding="utf-8"))
        assert command(["--model", str(backbone), *flags]) == 1
        assert "cannot be loaded" in capsys.readouterr().err
    for load in (load_config, load_backbone):
        with pytest.raises(FileNotFoundError, match="cannot be loaded"):
            load(str(backbone))
    load_tokenizer(str(backbone))  # it has no code of its own
    assert not ran.exists()


def test_heads_on_another_backbone_are_warned_of(backbone, tmp_path):
    copy = shutil.copytree(backbone, tmp_path / "elsewhere" / "backbone")
    assert other_backbone("lab/model", "lab/model") is None
    assert other_backbone("lab/backbone", str(copy)) is None, "a local copy goes by its name"
    assert "trained on 'lab/model-instruct', and this runs 'lab/model'" in other_backbone(
        "lab/model-instruct", "lab/model"
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_attention_heads", 0), ("num_key_value_heads", 3), ("head_dim", 7), ("max_position_embeddings", "x"),
        ("hidden_act", "evil"), ("rope_type", "evil"), ("num_hidden_layers", 10**9),
    ],
)  # fmt: skip
def test_an_impossible_field_is_one_line_that_names_file_and_field(backbone, field, value):
    """Tracebacks before, a plan of nonsense, or for 10**9 layers no end."""
    path = backbone / "config.json"
    config = json.loads(path.read_text())
    change = (
        {"rope_parameters": {**config["rope_parameters"], field: value}} if field == "rope_type" else {field: value}
    )
    path.write_text(json.dumps(config | change))
    for load in (load_config, load_backbone):
        with pytest.raises((ValueError, OSError)) as caught:
            load(str(backbone))
        said = str(caught.value)
        assert "config.json" in said and field in said and str(value) in said and "\n" not in said, said


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("tokenizer.json", b"{}", "tokenizer"),
        ("config.json", b"[" * 100_000, "config.json"),
        ("pytorch_model.bin", b"", "cannot be loaded"),
    ],
)
def test_a_damaged_file_is_one_line(backbone, name, content, words):
    (backbone / name).write_bytes(content)
    if name == "pytorch_model.bin":
        (backbone / "model.safetensors").unlink()
        torch.save({"x": Path("a pickle holds more than tensors")}, backbone / name)
    with pytest.raises((ValueError, OSError), match=words) as caught:
        load_backbone(str(backbone))
    assert "\n" not in str(caught.value) and str(backbone) in str(caught.value)


def test_a_template_that_runs_wild_is_one_line(backbone):
    tokenizer = load_tokenizer(str(backbone))
    for loop, said in (("999999", "refuses"), ("9999999", "holds 9999999: numbers are"), ("10**9", "computes a power")):
        tokenizer.chat_template = f"{{% for i in range({loop}) %}}x{{% endfor %}}"
        with pytest.raises(ValueError, match=f"the chat template {said}"):
            render_prompt(tokenizer, "text", "question")
