"""A LoRA for a tiny backbone, as peft saves it."""

from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model

from locret_kit.backbones.load import load_backbone


def make_lora(
    backbone: Path, to: Path, seed: int = 0, targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
) -> Path:
    """A LoRA whose B is not zero: it changes the model."""
    torch.manual_seed(seed)
    model, _ = load_backbone(str(backbone), dtype="float32", device="cpu")
    wrapped = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=list(targets), task_type="CAUSAL_LM"))
    with torch.no_grad():
        for name, weight in wrapped.named_parameters():
            if "lora_B" in name or "lora_embedding" in name:
                weight.normal_(std=0.3)
    wrapped.save_pretrained(to)
    return to


def adapted(model):
    """A model in a LoRA that changes what it says."""
    peft = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False))
    for name, weight in peft.named_parameters():
        if "lora_" in name:
            weight.data.mul_(20)
    return peft.eval()
