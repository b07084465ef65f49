"""Last used 2026-11-26, for docs/howto/laptop.md.

Measure how far retaining heads keep the same slots on a GGUF file as on the float model that they were trained on.

    python scripts/research/gguf_agreement.py --ckpt checkpoints/smollm2-135m-locret --gguf FILE.gguf

Both models read the same tokens in the same budget. Printed for each text: the share of kept slots (of all layers that evict and
all heads) that both keep, and the length of the common beginning of both greedy answers.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import mean

import torch

from locret_kit import BoundedCache, RetainingHeads, attach
from locret_kit.backbones.load import load_backbone
from locret_kit.runtime.session import Sampling, prefill
from locret_kit.samples.haystack import load_text
from locret_kit.settings import RunSettings

sys.path.append(str(Path(__file__).parents[1]))
from decoding import decode


@torch.inference_mode()
def read(
    model: torch.nn.Module, heads: RetainingHeads, ids: list[int], args: argparse.Namespace
) -> tuple[list, list[int]]:
    """Kept positions of every layer that evicts, by head, and a greedy answer."""
    cache = BoundedCache(RunSettings.of({"budget": args.budget}), None, heads, prompt_length=len(ids))
    with attach(model):
        cache.bind(model)
        logits = prefill(model, ids, cache)
        layers = [i for i, rows in enumerate(cache.bounded) if rows.window is None]
        kept = [[set(map(int, head)) for head in cache.kept_positions(i)[0]] for i in layers]
        rest = dict(prompt=ids, max_new_tokens=args.new_tokens, sampling=Sampling(), stop=frozenset())
        return kept, list(decode(model, cache, logits, **rest))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ckpt", required=True)
    parser.add_argument("--gguf", required=True)
    parser.add_argument("--model", help="the float model; default: the heads' own")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--texts", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=8)
    args = parser.parse_args()
    heads = RetainingHeads.from_pretrained(args.ckpt)
    models = [
        load_backbone(name, dtype="float32", device="cpu") for name in (args.model or heads.config.backbone, args.gguf)
    ]
    words, shares = models[0][1](load_text("jargon"), verbose=False).input_ids, []
    for n in range(args.texts):
        ids = words[n * args.length : (n + 1) * args.length]
        (a, said), (b, other) = (read(model, heads, ids, args) for model, _ in models)
        pairs = [pair for one, two in zip(a, b, strict=True) for pair in zip(one, two, strict=True)]
        shares.append(mean(len(one & two) / len(one) for one, two in pairs))
        alike = next((i for i, pair in enumerate(zip(said, other, strict=True)) if pair[0] != pair[1]), len(said))
        print(f"text {n}: {shares[-1]:.3f} of the slots, {alike} of {len(said)} tokens", flush=True)
    print(f"mean: {mean(shares):.3f} of the slots")


if __name__ == "__main__":
    main()
