"""Last used 2026-11-23, for docs/results/speed.md.

Seconds a prompt token at each length and policy, in turn, in one process; with --full next to model.generate's prefill.

    python scripts/research/cost.py --ckpt checkpoints/smollm2-135m-locret --length 8192 65536 --budget 1024
    python scripts/research/cost.py --ckpt ... --length 16384 --budget 512 --policy recency h2o snapkv 'kvcrush(base=snapkv)'

Nothing else should run meanwhile. A line holds one measurement; the first policy is what ratios are taken against.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch

from locret_kit.backbones.intercept import attach
from locret_kit.backbones.load import load_backbone
from locret_kit.cache.bounded import BoundedCache
from locret_kit.heads import RetainingHeads
from locret_kit.runtime.session import prefill
from locret_kit.samples.haystack import make_needle
from locret_kit.text.tokens import stream_ids


def full_prefill(model: Any, ids: list[int]) -> float:
    """Seconds that ``model.generate`` takes for the prompt and one token, with its own cache."""
    ids_1T = torch.tensor([ids])
    began = time.perf_counter()
    model.generate(ids_1T, attention_mask=torch.ones_like(ids_1T), max_new_tokens=1)
    return time.perf_counter() - began


def bounded_prefill(model: Any, ids: list[int], cache: BoundedCache) -> float:
    """Seconds to read the prompt through the cache."""
    began = time.perf_counter()
    with attach(model):
        prefill(model, ids, cache)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ckpt", required=True)
    parser.add_argument("--model", help="default: the backbone that the heads name")
    parser.add_argument("--length", type=int, nargs="+", required=True)
    parser.add_argument("--budget", type=int, nargs="+", required=True)
    parser.add_argument("--policy", nargs="+", default=["locret"])
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--positions", default="compact")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--full", action="store_true", help="model.generate with full attention beside each length")
    args = parser.parse_args()

    heads = RetainingHeads.from_pretrained(args.ckpt)
    model, tokenizer = load_backbone(args.model or heads.config.backbone)
    for repeat in range(args.repeats):
        for length in args.length:
            needle = make_needle("R.PassKey", tokenizer, n_tokens=length, depth=0.5, seed=repeat)
            ids = list(stream_ids(tokenizer, [needle.prompt], special=True))
            for budget in args.budget:
                first = None
                for policy in args.policy:
                    cache = BoundedCache(
                        budget, policy, heads, chunk=args.chunk, prompt_length=len(ids), positions=args.positions
                    )
                    seconds = bounded_prefill(model, ids, cache)
                    first = first or seconds
                    ms, share = 1e3 * seconds / len(ids), cache.counters.computed_share
                    sparse = "" if share is None else f", {share:.1%} of the attention computed"
                    print(
                        f"run {repeat} length {len(ids)} budget {budget} {policy}: {ms:.3f} ms a token, "
                        f"{seconds / first:.2f} of {args.policy[0]}{sparse}",
                        flush=True,
                    )
            if args.full:
                print(
                    f"run {repeat} length {len(ids)} full: {1e3 * full_prefill(model, ids) / len(ids):.3f} ms",
                    flush=True,
                )


if __name__ == "__main__":
    main()
