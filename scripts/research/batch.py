"""Last used 2026-11-23, for docs/results/serving.md.

Measure many prompts at once against one at a time: write a table of docs/results/serving.md.

    python scripts/research/batch.py --ckpt checkpoints/smollm2-135m-locret
    python scripts/research/batch.py --ckpt HEADS --name long --prompts 32 --lengths 4096 4096 --new-tokens 16

Both ways run in one process, by turns, on the same prompts: stretches of the Jargon File of lengths drawn with a fixed seed.
Every answer has all its tokens. CPU seconds are this process's own, whatever else the machine does.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median

import torch

from locret_kit import BoundedCache, RetainingHeads, attach
from locret_kit.backbones.load import load_backbone, resolve_model
from locret_kit.files import write_text
from locret_kit.runtime.engine import Engine, Request
from locret_kit.runtime.report import versions
from locret_kit.runtime.session import Sampling, decode, prefill
from locret_kit.samples.haystack import load_text

PAGE = Path(__file__).resolve().parents[2] / "docs" / "results" / "serving.md"
Tokens = list[list[int]]


def prompts(tokenizer: object, count: int, lengths: Sequence[int], seed: int) -> Tokens:
    """``count`` stretches of the Jargon File, of ``lengths[0]`` to ``lengths[1]`` tokens."""
    ids = tokenizer(load_text("jargon"), verbose=False).input_ids
    rng, found = random.Random(seed), []
    for _ in range(count):
        length = rng.randint(*lengths)
        start = rng.randrange(len(ids) - length)
        found.append(ids[start : start + length])
    return found


def one_by_one(model: object, texts: Tokens, cache: Callable[[list[int]], BoundedCache], new: int) -> Tokens:
    """Answers of runs one after the other."""
    found = []
    for ids in texts:
        mine = cache(ids)
        mine.bind(model)
        logits = prefill(model, ids, mine)
        rest = dict(prompt=ids, max_new_tokens=new, sampling=Sampling(), stop=frozenset())
        found.append(list(decode(model, mine, logits, **rest)))
    return found


def together(
    model: object, texts: Tokens, cache: Callable[[list[int]], BoundedCache], new: int, at_once: int
) -> Tokens:
    """Answers of a batch."""
    batch, waiting, answers = Engine(model, frozenset()), iter(texts), []
    while len(answers) < len(texts) or batch.running:
        for ids in islice(waiting, at_once - len(batch.running)):
            answers.append(batch.add(Request(ids, new), partial(cache, ids)))
        batch.step()
    return [answer.tokens for answer in answers]


def timed(ask: Callable[[], Tokens]) -> tuple[Tokens, float, float]:
    """What it gives, and its seconds by the clock and of the CPU."""
    wall, cpu = time.perf_counter(), time.process_time()
    found = ask()
    return found, time.perf_counter() - wall, time.process_time() - cpu


def measure(args: argparse.Namespace) -> list[str]:
    """Lines of the page."""
    heads = RetainingHeads.from_pretrained(args.ckpt)
    model, tokenizer = load_backbone(resolve_model(heads.config.backbone), dtype="float32", device="cpu")
    texts = prompts(tokenizer, args.prompts, args.lengths, args.seed)

    def cache(ids: list[int]) -> BoundedCache:
        return BoundedCache(None, None, heads, prompt_length=len(ids))

    ways = {
        "one at a time": lambda: one_by_one(model, texts, cache, args.new_tokens),
        f"a batch, {args.batch_size} at once": lambda: together(model, texts, cache, args.new_tokens, args.batch_size),
    }
    figures: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    said: dict[str, Tokens] = {}
    with attach(model):
        one_by_one(model, texts[:1], cache, 2)  # the first forward of a process is slower
        for _ in range(args.rounds):
            for name, ask in ways.items():
                said[name], wall, cpu = timed(ask)
                figures[name].append((wall, cpu))
                print(f"{name}: {wall:.1f} s, {cpu:.1f} CPU s", file=sys.stderr, flush=True)
    alone, batch = said.values()
    same = sum(one == other for one, other in zip(alone, batch, strict=True))
    middle = {name: [median(column) for column in zip(*rounds, strict=True)] for name, rounds in figures.items()}
    (wall, cpu), _ = middle.values()
    tokens = args.prompts * args.new_tokens
    found = versions()
    return [
        f"`python scripts/research/batch.py {shlex.join(sys.argv[1:])}`; {time.strftime('%Y-%m-%d')}, commit "
        f"{found.get('commit', found['locret_kit'])}, torch {found['torch']}, float32, {os.cpu_count()} CPU cores "
        f"({platform.machine()}), {torch.get_num_threads()} threads, load {os.getloadavg()[1]:.1f} (5 minutes).",
        "",
        f"{args.prompts} prompts of {min(map(len, texts))} to {max(map(len, texts))} tokens, {sum(map(len, texts))} together, "
        f"{args.new_tokens} new tokens each; {args.rounds} rounds (medians). {same} of {args.prompts} answers are the same, "
        "token for token.",
        "",
        "| | seconds | CPU seconds | new tokens per CPU second | of one at a time (seconds) | (CPU seconds) |",
        "|---|---|---|---|---|---|",
        *(
            f"| {name} | {w:.1f} | {c:.1f} | {tokens / c:.1f} | {w / wall:.2f} | {c / cpu:.2f} |"
            for name, (w, c) in middle.items()
        ),
    ]


def put(name: str, lines: Sequence[str]) -> None:
    """Rewrite one block of the page."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    head, rest = PAGE.read_text(encoding="utf-8").split(begin)
    write_text(PAGE, f"{head}{begin}\n" + "\n".join(lines) + f"\n{end}{rest.split(end)[1]}")
    print("\n".join(lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ckpt", required=True)
    parser.add_argument("--name", default="short", choices=["short", "long"], help="the block of the page")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--lengths", type=int, nargs=2, default=[64, 512])
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    put(args.name, measure(args))


if __name__ == "__main__":
    main()
