"""A GGUF file becomes a backbone's folder: the weights that went in, in bfloat16, and the tokens of the file."""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch
from gguf import GGUFWriter, TokenType
from tiny_models import tiny_model
from tiny_tokenizer import tiny_tokenizer

from locret_kit.backbones.demo import dequantise
from locret_kit.backbones.load import load_backbone

NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def gguf_name(name: str) -> str:
    """llama.cpp's name of a weight of Qwen2."""
    layer = re.match(r"model\.layers\.(\d+)\.(.*)\.(weight|bias)$", name)
    if layer:
        return f"blk.{layer[1]}.{NAMES[layer[2]]}.{layer[3]}"
    module, kind = name.rsplit(".", 1)
    return f"{NAMES[module]}.{kind}"


def write(file: Path, model, tokenizer) -> None:
    """The model in float32, and its byte-level BPE."""
    config, out = model.config, GGUFWriter(file, "qwen2")
    out.add_block_count(config.num_hidden_layers)
    out.add_context_length(config.max_position_embeddings)
    out.add_embedding_length(config.hidden_size)
    out.add_feed_forward_length(config.intermediate_size)
    out.add_head_count(config.num_attention_heads)
    out.add_head_count_kv(config.num_key_value_heads)
    out.add_layer_norm_rms_eps(config.rms_norm_eps)
    out.add_rope_freq_base(config.rope_parameters["rope_theta"])
    tokens = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    special = set(tokenizer.all_special_tokens)
    out.add_vocab_size(len(tokens))
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre("qwen2")
    out.add_token_list(tokens)
    out.add_token_types([TokenType.CONTROL if token in special else TokenType.NORMAL for token in tokens])
    out.add_token_merges(
        [" ".join(pair) for pair in json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]]
    )
    out.add_eos_token_id(tokenizer.eos_token_id)
    for name, weight in model.state_dict().items():
        out.add_tensor(gguf_name(name), weight.float().numpy())
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


def test_a_folder_holds_the_weights_and_the_tokens(tmp_path):
    tokenizer = tiny_tokenizer()
    model = tiny_model("qwen2", vocab_size=len(tokenizer))
    write(tmp_path / "tiny.gguf", model, tokenizer)
    dequantise(tmp_path / "tiny.gguf", tmp_path / "made", "any/tiny").save_pretrained(tmp_path / "made")
    made, split = load_backbone(str(tmp_path / "made"), dtype="bfloat16", device="cpu")
    wanted = model.bfloat16().state_dict()
    assert made.state_dict().keys() == wanted.keys()
    assert all(torch.equal(weight, wanted[name]) for name, weight in made.state_dict().items())
    text = "The pass key is 4711.\n\nRemember it; 3 of 12."
    assert split.get_vocab().items() >= tokenizer.get_vocab().items() and split.eos_token == tokenizer.eos_token
    assert split.decode(split(text).input_ids) == text
    assert made.config._name_or_path == str(tmp_path / "made") and made.config.dtype == torch.bfloat16
