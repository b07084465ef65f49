"""A GGUF file becomes a backbone's folder: the weights that went in, in bfloat16, and the tokens of the file."""

from __future__ import annotations

import torch
from tiny_gguf import write_gguf
from tiny_models import tiny_model
from tiny_tokenizer import tiny_tokenizer

from locret_kit.backbones.demo import dequantise
from locret_kit.backbones.load import load_backbone


def test_a_folder_holds_the_weights_and_the_tokens(tmp_path, capsys):
    tokenizer = tiny_tokenizer()
    model = tiny_model("qwen2", vocab_size=len(tokenizer))
    write_gguf(tmp_path / "tiny.gguf", model, "F32", tokenizer)
    dequantise(tmp_path / "tiny.gguf", tmp_path / "made", "any/tiny").save_pretrained(tmp_path / "made")
    assert capsys.readouterr().err.splitlines() == ["dequantising in float32", "saving in bfloat16"], "and no bar"
    made, split = load_backbone(str(tmp_path / "made"), dtype="bfloat16", device="cpu")
    wanted = model.bfloat16().state_dict()
    assert made.state_dict().keys() == wanted.keys()
    assert all(torch.equal(weight, wanted[name]) for name, weight in made.state_dict().items())
    text = "The pass key is 4711.\n\nRemember it; 3 of 12."
    assert split.get_vocab().items() >= tokenizer.get_vocab().items() and split.eos_token == tokenizer.eos_token
    assert split.decode(split(text).input_ids) == text
    assert made.config._name_or_path == str(tmp_path / "made") and made.config.dtype == torch.bfloat16
