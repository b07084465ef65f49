"""A GGUF file becomes a backbone's folder: the numbers of its matrices, in bfloat16, and its tokens."""

from __future__ import annotations

import pytest
import torch
from tiny_gguf import tiny_source, write_gguf
from tiny_tokenizer import tiny_tokenizer

from locret_kit.backbones.demo import unpack
from locret_kit.backbones.load import load_backbone


@pytest.mark.parametrize("form", ["F32", "Q4_1"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3"])
def test_a_folder_holds_the_weights_and_the_tokens(family, form, tmp_path, capsys):
    tokenizer, model = tiny_tokenizer(), tiny_source(family)
    write_gguf(tmp_path / "tiny.gguf", model, form)
    unpack(tmp_path / "tiny.gguf", tmp_path / "made", "any/tiny")
    assert capsys.readouterr().err.splitlines() == ["unpacking tiny.gguf"], "and no bar"
    made, split = load_backbone(str(tmp_path / "made"), dtype="bfloat16", device="cpu")
    wanted = model.bfloat16().state_dict()
    assert made.state_dict().keys() == wanted.keys()
    assert all(torch.equal(weight, wanted[name]) for name, weight in made.state_dict().items())
    text = "The pass key is 4711.\n\nRemember it; 3 of 12."
    assert split.get_vocab().items() >= tokenizer.get_vocab().items() and split.eos_token == tokenizer.eos_token
    assert split.decode(split(text).input_ids) == text
    assert made.config.dtype == torch.bfloat16 and made.config.eos_token_id == tokenizer.eos_token_id
    assert not hasattr(made.config, "gguf")
