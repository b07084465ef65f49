"""Last used 2026-11-22, for recipes/smollm2-135m-lora.yaml.

Fine-tune a small LoRA on the kit's synthetic questions, so that heads can be trained for an adapted backbone.

    python scripts/research/train_lora.py [--model FOLDER_OR_REPO] [--to FOLDER] [--steps N]
    locret-train recipe=smollm2-135m-lora

The loss is the cross-entropy of the answers' tokens. The adapter is PEFT's own format.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from locret_kit.backbones.load import load_backbone
from locret_kit.naming import first_line
from locret_kit.samples.haystack import load_text
from locret_kit.samples.synthetic import synthetic_sample

ROOT = Path(__file__).resolve().parents[2]


def answer_loss(model: Any, sample: Any) -> torch.Tensor:
    """Mean cross-entropy of the answer tokens, nats."""
    ids = torch.tensor([sample.ids], device=model.device)
    at = torch.tensor([t for start, end in sample.answers for t in range(start, end)], device=model.device)
    logits = model(input_ids=ids, use_cache=False).logits[0, at - 1]
    return F.cross_entropy(logits.float(), ids[0, at])


def train(args: argparse.Namespace) -> None:
    """Train and save; one line a step on stderr."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(args.seed)
    backbone, tokenizer = load_backbone(args.model, dtype="float32")
    config = LoraConfig(
        r=args.rank, lora_alpha=2 * args.rank, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"
    )
    model = get_peft_model(backbone, config)
    optimiser = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=args.lr)
    texts = [load_text("pydoc")]
    for step in range(args.steps):
        sample = synthetic_sample(tokenizer, texts, args.max_tokens, args.seed, step, 0.3)
        loss = answer_loss(model, sample)
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        print(f"step {step + 1}/{args.steps}: loss {loss.item():.4f}", file=sys.stderr, flush=True)
    model.peft_config["default"].base_model_name_or_path = args.model
    model.save_pretrained(args.to)
    print(args.to)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[2])
    parser.add_argument("--model", default="checkpoints/SmolLM2-135M-Instruct")
    parser.add_argument("--to", type=Path, default=ROOT / "checkpoints" / "smollm2-135m-lora", help="folder to write")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--max-tokens", type=int, default=512, help="longest sample")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--seed", type=int, default=1)
    try:
        train(parser.parse_args(argv))
    except (ValueError, OSError, ImportError) as error:
        print(f"error: {first_line(error)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
