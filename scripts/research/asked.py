"""Last used 2026-11-30, for checkpoints/smollm2-135m-locret/LOG.md.

Four facts in each text, asked of documents that were read once, by policy: rows on stdout.

    python scripts/research/asked.py TEXT.txt [--ckpt HEADS] [--budget 256] [--tokens 1950] [--texts 6] [--policies NAME ...]
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from locret_kit import Document, RetainingHeads
from locret_kit.backbones.load import load_backbone

FACTS = (
    ("The harbour of Melby opens at {} in the morning.", "When does the harbour of Melby open?"),
    ("The keeper of the red lighthouse is called {}.", "Who is the keeper of the red lighthouse?"),
    ("The pass key of the north gate is {}.", "What is the pass key of the north gate?"),
    ("The spare battery is kept in the {} drawer.", "In which drawer is the spare battery kept?"),
)
"""A sentence, and its question."""
VALUES = (
    ("seven", "eight", "nine", "ten"), ("Amara", "Tobias", "Ingrid", "Mateo"), ("48213", "90377", "15562", "70918"),
    ("green", "bottom", "left", "kitchen"),
)  # fmt: skip
"""Answers of each fact, of which a text has one."""
POLICIES = (
    "rereading-locret", "lookahead-locret reread=passages", "rereading-lookahead-locret", "locret", "lookahead-locret",
)  # fmt: skip

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text", type=Path)
    parser.add_argument("--ckpt", default="checkpoints/smollm2-135m-locret")
    parser.add_argument("--budget", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=1950)
    parser.add_argument(
        "--texts", type=int, default=6, help="pieces of the file, each from 9,000 tokens after the one before"
    )
    parser.add_argument("--policies", nargs="+", default=POLICIES)
    args = parser.parse_args()
    backbone = RetainingHeads.from_pretrained(args.ckpt).config.backbone
    model, tokenizer = load_backbone(backbone, dtype="float32", device="cpu")
    ids = tokenizer(args.text.read_text()).input_ids
    for number in range(args.texts):
        draw, start = random.Random(number), 20000 + number * 9000
        lines, wanted = tokenizer.decode(ids[start : start + args.tokens]).split("\n"), []
        for part, (sentence, _) in enumerate(FACTS):
            wanted.append(draw.choice(VALUES[part]))
            at = int(len(lines) * draw.uniform(0.03 + 0.22 * part, 0.22 + 0.22 * part))
            lines.insert(at, sentence.format(wanted[-1]))
        for policy in args.policies:
            document = Document.read(model, tokenizer, "\n".join(lines), args.budget, policy, args.ckpt)
            answers = [str(document.ask(question, max_new_tokens=24)) for _, question in FACTS]
            right = [want.lower() in answer.lower() for want, answer in zip(wanted, answers, strict=True)]
            print(json.dumps({"text": number, "policy": policy, "budget": args.budget, "right": right}), flush=True)
