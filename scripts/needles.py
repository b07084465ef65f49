"""Hidden-digits tables (InfiniteBench's R.PassKey and R.Number): one JSONL row an example, resumable, then a table.

    python scripts/needles.py run --ckpt checkpoints/smollm2-135m-locret --task R.PassKey --haystack jargon \\
        --length 4096 --budget 512 1024 --policy locret streaming --samples 20 --out rows.jsonl
    python scripts/needles.py table rows.jsonl [more.jsonl ...]
    python scripts/needles.py cost --ckpt checkpoints/smollm2-135m-locret --length 8192 65536 --budget 1024

A rerun does only what is missing. The policy `random-heads` is `locret` with untrained heads; several checkpoints (`--ckpt
A B`) are told apart by their folder's name.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from pathlib import Path

import torch

from locret_kit.backbones.intercept import attach
from locret_kit.backbones.load import load_backbone
from locret_kit.cache.bounded import BoundedCache
from locret_kit.heads import RetainingHeads
from locret_kit.policies.registry import parse_policy
from locret_kit.runtime.session import generate, prefill
from locret_kit.runtime.tokens import stream_ids
from locret_kit.samples.needles import make_needle, score
from locret_kit.samples.text import load_text

KEY = ("task", "haystack", "length", "budget", "policy", "heads", "sample")


def read_rows(paths: list[Path]) -> dict[tuple, dict]:
    """Finished examples by key; a half line at a file's end (a kill) is left aside."""
    rows: dict[tuple, dict] = {}
    for path in paths:
        for line in path.read_text().splitlines() if path.exists() else ():
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                continue
            rows[tuple(row[k] for k in KEY)] = row
    return rows


def load(ckpt: str, model: str | None) -> tuple:
    """The backbone with its tokenizer, and the heads on its device."""
    heads = RetainingHeads.from_pretrained(ckpt)
    backbone, tokenizer = load_backbone(model or heads.config.backbone)
    return backbone, tokenizer, heads.to(backbone.device, backbone.dtype)


def cache_for(policy: str, heads: RetainingHeads, budget: int, length: int, args: argparse.Namespace) -> BoundedCache:
    """A fresh cache; lengths scale with the budget as in ``locret-infer``."""
    default = heads.config.inference
    stabilizers = min(default["stabilizers"], default["stabilizers"] * budget // default["budget"])
    return BoundedCache(
        budget, "locret" if policy == "random-heads" else policy, heads, chunk=args.chunk, prompt_length=length,
        stabilizers=stabilizers, local_len=min(default["local_len"], budget // 8), positions=args.positions,
    )  # fmt: skip


def run(args: argparse.Namespace) -> None:
    """Answer every example that has no row yet."""
    finished = read_rows([args.out])
    text = None if args.haystack == "repeated" else load_text(args.haystack)
    model, tokenizer, first = load(args.ckpt[0], args.model)
    trained = {ckpt: RetainingHeads.from_pretrained(ckpt).to(model.device, model.dtype) for ckpt in args.ckpt}
    torch.manual_seed(0)
    untrained = RetainingHeads(first.config).to(model.device, model.dtype)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with args.out.open("a") as out:
        for length in args.length:
            # An order in which a run that is cut short has seen all depths.
            for sample in sorted(range(args.samples), key=lambda i: 7 * i % args.samples):
                depth = (sample + 0.5) / args.samples
                needle = make_needle(
                    args.task,
                    tokenizer,
                    n_tokens=length,
                    depth=depth,
                    seed=f"{args.haystack}:{length}:{sample}",
                    haystack=text,
                )
                ids = stream_ids(tokenizer, [needle.prompt], special=True)
                for policy in args.policy:
                    learned = policy != "random-heads" and parse_policy(policy).needs_heads
                    for ckpt in args.ckpt if learned else args.ckpt[:1]:
                        heads = untrained if policy == "random-heads" else trained[ckpt]
                        name = "untrained" if policy == "random-heads" else Path(ckpt).name if learned else "-"
                        for budget in args.budget if policy != "full" else [0]:
                            row = dict(
                                zip(KEY, (args.task, args.haystack, length, budget, policy, name, sample), strict=True)
                            )
                            if tuple(row.values()) in finished:
                                continue
                            cache = cache_for(policy, heads, budget or 1024, len(ids), args)
                            output, report = generate(model, tokenizer, ids, cache, max_new_tokens=12)
                            row |= {
                                "score": score(output, needle.answer), "output": output, "answer": needle.answer,
                                "depth": round(needle.depth, 3), "tokens": len(ids), "samples": args.samples,
                                "positions": args.positions, "chunk": args.chunk, "prefill_s": round(report.prefill_s, 2),
                                "dtype": report.dtype, "date": time.strftime("%Y-%m-%d"),
                            }  # fmt: skip
                            out.write(json.dumps(row) + "\n")
                            out.flush()
                            print(*(row[k] for k in KEY), row["score"], repr(output[:40]), file=sys.stderr, flush=True)


def table(args: argparse.Namespace) -> None:
    """Mean score and number of examples, a line a policy and a column a (length, budget)."""
    cells: dict[tuple, dict[tuple, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in read_rows(args.rows).values():
        policy = row["policy"] if row["heads"] in ("-", "untrained") else f"{row['policy']} ({row['heads']})"
        cells[row["task"], row["haystack"]][policy, row["length"], row["budget"]].append(row["score"])
    for (task, haystack), scores in sorted(cells.items()):
        columns = sorted({(length, budget) for _, length, budget in scores if budget})
        names = sorted({p for p, _, _ in scores}, key=lambda p: (p != "full", not p.startswith("locret"), p))
        print(f"\n**{task}, haystack: {haystack}**\n")
        print("| policy | " + " | ".join(f"{n // 1024}K, budget {b}" for n, b in columns) + " |")
        print("|---|" + "---|" * len(columns))
        for name in names:
            found = [scores.get((name, n, 0 if name == "full" else b)) for n, b in columns]
            print(
                f"| {name} | " + " | ".join(f"{sum(x) / len(x):.2f} (n={len(x)})" if x else "-" for x in found) + " |"
            )


def cost(args: argparse.Namespace) -> None:
    """Seconds a prompt token at each length, in turn, in one process; and peak resident memory of each in a fresh one."""
    model, tokenizer, heads = load(args.ckpt[0], args.model)
    for repeat in range(args.repeats):
        for length in args.length:
            needle = make_needle("R.PassKey", tokenizer, n_tokens=length, depth=0.5, seed=repeat)
            ids = stream_ids(tokenizer, [needle.prompt], special=True)
            for budget in args.budget:
                cache = cache_for("locret", heads, budget, len(ids), args)
                with attach(model):
                    began = time.perf_counter()
                    prefill(model, ids, cache)
                bounded = time.perf_counter() - began
                line = f"run {repeat} length {len(ids)} budget {budget}: {1e3 * bounded / len(ids):.3f} ms a token"
                if args.full:
                    began = time.perf_counter()
                    model.generate(
                        torch.tensor([list(ids)]),
                        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
                        max_new_tokens=1,
                    )
                    line += (
                        f"; model.generate with full attention {1e3 * (time.perf_counter() - began) / len(ids):.3f} ms"
                    )
                print(line, flush=True)


def main() -> None:
    """Parse the arguments and run one of the three subcommands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    runner, costs, tables = commands.add_parser("run"), commands.add_parser("cost"), commands.add_parser("table")
    for sub, default in ((runner, 512), (costs, 512)):
        sub.add_argument("--ckpt", nargs="+", required=True)
        sub.add_argument("--model")
        sub.add_argument("--length", type=int, nargs="+", required=True)
        sub.add_argument("--budget", type=int, nargs="+", required=True)
        sub.add_argument("--chunk", type=int, default=default)
        sub.add_argument("--positions", default="compact")
    runner.add_argument("--task", default="R.PassKey")
    runner.add_argument("--haystack", default="repeated", help="repeated, pydoc, jargon or a file")
    runner.add_argument("--policy", nargs="+", default=["locret"])
    runner.add_argument("--samples", type=int, default=20)
    runner.add_argument("--out", type=Path, required=True)
    runner.set_defaults(call=run)
    costs.add_argument("--repeats", type=int, default=1)
    costs.add_argument("--full", action="store_true", help="time model.generate's full-attention prefill beside it")
    costs.set_defaults(call=cost)
    tables.add_argument("rows", type=Path, nargs="+")
    tables.set_defaults(call=table)
    args = parser.parse_args()
    args.call(args)


if __name__ == "__main__":
    main()
