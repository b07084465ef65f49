"""Last used 2026-11-26, for scripts/research/logs/decoding.md.

Measure policies on what a model writes, while its prompt stays: agreement, likelihood and repetition.

    python scripts/research/decoding.py TEXTS --ckpt HEADS --tokens 1000 --slots 256 512 --samples 8 --out runs/decoding.jsonl

Full attention continues a beginning of each text by so many sampled tokens. Each policy then reads them after the same prompt,
which is pinned, with so many slots for what is written: how often its likeliest token is full attention's, and nats a token of
what was written. With ``--free`` each policy also writes a continuation of its own with the same seed: the share of its 4-grams
that stood in it before. A rerun measures what is missing; the table is printed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.nn import functional as F
from transformers import PreTrainedModel

from locret_kit.backbones.intercept import attach
from locret_kit.backbones.load import load_backbone
from locret_kit.backbones.releases import CACHE
from locret_kit.cache.bounded import BoundedCache
from locret_kit.evals.cells import mean_and_stderr
from locret_kit.heads import RetainingHeads
from locret_kit.runtime.sampling import Sampling
from locret_kit.runtime.session import Answer, prefill
from locret_kit.runtime.tokens import stream_ids

PIECE = 128
"""Tokens of a forward."""


def cache_of(policy: str, slots: int, prompt: int, heads: RetainingHeads) -> BoundedCache:
    """A cache whose prompt stays and whose ``slots`` others are evicted 64 tokens at a time."""
    if policy == "full":
        return BoundedCache(prompt + slots, "full", prompt_length=prompt)
    cache = BoundedCache(prompt + slots, policy, heads, chunk=64, stabilizers=min(64, slots // 4), prompt_length=prompt)
    cache.pin(0, prompt)
    return cache


def read(
    model: PreTrainedModel, prompt: Sequence[int], written: Sequence[int], cache: BoundedCache
) -> tuple[list[int], float]:
    """The likeliest token in place of each written one, and nats a token of those that were written."""
    best, nats = [], 0.0
    logits_1V = prefill(model, list(prompt), cache)[None]
    for start in range(0, len(written), PIECE):
        piece = torch.tensor([written[start : start + PIECE]])
        after_TV = model(input_ids=piece, **{CACHE: cache}).logits[0].float()
        logits_TV = torch.cat((logits_1V, after_TV[:-1]))
        nats += float(F.cross_entropy(logits_TV, piece[0], reduction="sum"))
        best += logits_TV.argmax(-1).tolist()
        logits_1V = after_TV[-1:]
    return best, nats / len(written)


def repetition(tokens: Sequence[int], n: int = 4) -> float:
    """Share of n-grams that stood in the text before."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return 1 - len(set(grams)) / len(grams)


def figure(values: list[float]) -> str:
    """Mean and standard error of a cell; a dash where nothing was measured."""
    mean, error = mean_and_stderr(values)
    return "-" if mean is None else f"{mean:.3f}" if error is None else f"{mean:.3f} ± {error:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", nargs="+", type=Path)
    parser.add_argument("--ckpt", required=True)
    parser.add_argument("--prompt", type=int, default=256, help="tokens of a text's beginning")
    parser.add_argument("--tokens", type=int, default=1000, help="tokens that are written")
    parser.add_argument("--slots", type=int, nargs="+", default=[256, 512])
    parser.add_argument("--policy", nargs="+", default=["random", "streaming", "rkv", "locret", "lookahead-locret"])
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--free", type=int, default=0, help="samples of which each policy writes its own continuation")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    heads = RetainingHeads.from_pretrained(args.ckpt)
    model, tokenizer = load_backbone(heads.config.backbone, dtype="float32")
    sampling = Sampling(temperature=0.8, logit_bias=((int(tokenizer.eos_token_id), -100.0),))
    rows = [json.loads(line) for line in args.out.read_text().splitlines()] if args.out.exists() else []
    args.out.parent.mkdir(parents=True, exist_ok=True)

    def write(prompt: list[int], cache: BoundedCache) -> list[int]:
        answer = Answer(model, tokenizer, prompt, cache, max_new_tokens=args.tokens, sampling=sampling)
        for _ in answer:
            pass
        return list(answer.tokens)

    def keep(row: dict[str, object]) -> None:
        rows.append(row)
        with args.out.open("a") as file:
            file.write(json.dumps(row) + "\n")

    with attach(model), torch.inference_mode():
        for sample in range(args.samples):
            text = args.texts[sample % len(args.texts)].read_text(encoding="utf-8")
            start = (2 * sample + 1) * len(text) // (2 * args.samples)
            prompt = list(stream_ids(tokenizer, text[start : start + 20 * args.prompt]))[: args.prompt]
            base = {"sample": sample, "tokens": args.tokens, "prompt": args.prompt}
            full = next((r for r in rows if r["policy"] == "full" and base.items() <= r.items()), None)
            if full is None:
                written = write(prompt, cache_of("full", args.tokens, args.prompt, heads))
                best, nats = read(model, prompt, written, cache_of("full", args.tokens, args.prompt, heads))
                full = base | {"policy": "full", "slots": 0, "nats": nats, "repetition": repetition(written)}
                full |= {"written": written, "best": best}
                keep(full)
            for slots in args.slots:
                for policy in args.policy:
                    key = base | {"policy": policy, "slots": slots}
                    if any(key.items() <= r.items() for r in rows):
                        continue
                    best, nats = read(model, prompt, full["written"], cache_of(policy, slots, args.prompt, heads))
                    same = sum(a == b for a, b in zip(best, full["best"], strict=True)) / len(best)
                    row = key | {"nats": nats, "agreement": same}
                    if sample < args.free:
                        row["repetition"] = repetition(write(prompt, cache_of(policy, slots, args.prompt, heads)))
                    keep(row)
    print(
        "| slots | policy | n | agreement | nats a token more than full attention | repeated 4-grams |\n|---|---|---|---|---|---|"
    )
    mine = [row for row in rows if row["tokens"] == args.tokens and row["prompt"] == args.prompt]
    nats_of = {row["sample"]: row["nats"] for row in mine if row["policy"] == "full"}
    for slots, policy in dict.fromkeys((row["slots"], row["policy"]) for row in mine):
        cell = [row for row in mine if (row["slots"], row["policy"]) == (slots, policy)]
        figures = [
            [row["agreement"] for row in cell if "agreement" in row],
            [row["nats"] - nats_of[row["sample"]] for row in cell] if slots else [],
            [row["repetition"] for row in cell if "repetition" in row],
        ]
        print(f"| {slots or 'all'} | `{policy}` | {len(cell)} | {' | '.join(map(figure, figures))} |")


if __name__ == "__main__":
    main()
