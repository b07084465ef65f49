"""Pieces that several tests of attach share."""

from __future__ import annotations

import torch
from tiny_models import COMMON
from transformers import AutoConfig, AutoModelForCausalLM


def tokens(length, batch=1, seed=0):
    return torch.randint(2, 97, (batch, length), generator=torch.Generator().manual_seed(seed))


def fingerprint(model):
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    return model.config._attn_implementation, hooks, sorted(model.state_dict())


def stranger(model_type):
    torch.manual_seed(0)
    changes = {"gpt_neox": {"num_key_value_heads": 6}, "gptj": {"num_key_value_heads": 6, "rotary_dim": 4}}.get(
        model_type, {}
    )
    config = AutoConfig.for_model(model_type, **{**COMMON, **changes})
    model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.mul_(6.0)
    return model
