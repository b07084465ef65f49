"""Tiny random backbones, one a family, in float32."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

COMMON = dict(
    vocab_size=97, hidden_size=48, intermediate_size=64, num_hidden_layers=3, num_attention_heads=6,
    num_key_value_heads=2, max_position_embeddings=512, bos_token_id=1, eos_token_id=None, pad_token_id=0,
)  # fmt: skip
LONGROPE = dict(
    max_position_embeddings=512,
    original_max_position_embeddings=64,
    rope_parameters={
        "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 64,
        "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 3.0, 4.0, 5.0],
    },
)  # fmt: skip
FAMILIES = {
    "llama": dict(model_type="llama"),
    "llama-mha": dict(model_type="llama", num_key_value_heads=6),
    "llama-mqa": dict(model_type="llama", num_key_value_heads=1),
    "mistral": dict(model_type="mistral", sliding_window=None),
    "mistral-window": dict(model_type="mistral", sliding_window=24),
    "qwen2": dict(model_type="qwen2"),
    "qwen3": dict(model_type="qwen3", head_dim=16),
    "phi3": dict(model_type="phi3", sliding_window=None),
    "phi3-longrope": dict(model_type="phi3", sliding_window=None, **LONGROPE),
    "phi3-longrope-window": dict(model_type="phi3", sliding_window=24, **LONGROPE),
    "gemma3": dict(model_type="gemma3_text", head_dim=16, sliding_window=16, num_hidden_layers=6),
}


def tiny_model(family: str, seed: int = 0, **changes):
    """A random model of ``family`` or of a model type, large enough weights that greedy tokens vary."""
    torch.manual_seed(seed)
    settings = {**COMMON, **FAMILIES.get(family, {"model_type": family}), **changes}
    model_type = settings.pop("model_type")
    config = AutoConfig.for_model(model_type, **settings)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.mul_(6.0)
    return model
