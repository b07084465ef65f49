"""Last used 2026-11-23, for scripts/research/logs/sessions.md.

Measure documents and conversations: write the tables of scripts/research/logs/sessions.md.

    python scripts/research/sessions.py questions --ckpt HEADS                # a text of 128K tokens, read once, asked 20 times
    python scripts/research/sessions.py turns --ckpt HEADS --turns 1000       # a conversation, with and without a pin

``questions`` hides 20 facts at 20 depths of the Jargon File, reads it in one process (``read``, unless that was done before),
loads the file in another and asks there. ``turns`` tells 20 facts in the first message and asks for them in a short
conversation and after many turns: pinned, not pinned, and under full attention, which shows what the model itself can do.
Each rewrites its block of the page, between HTML comments.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import torch

from locret_kit import Chat, Document, RetainingHeads, attach
from locret_kit.backbones.load import load_backbone, resolve_model
from locret_kit.files import write_text
from locret_kit.runtime.provenance import versions
from locret_kit.samples.haystack import load_text, starts, take
from locret_kit.samples.wording import NAMES
from locret_kit.settings import RunSettings

PAGE = Path(__file__).resolve().parents[2] / "docs" / "results" / "sessions.md"
OPENING = "Remember these facts.\n"
FILLERS = (
    "How are you today?", "Tell me something about the sea.", "What is seven times eight?", "Name a colour.",
    "What do cats like?", "Why is the sky blue?", "Tell me a short joke.", "What is a good breakfast?",
)  # fmt: skip


ANSWER = 24
"""Tokens of an answer in a conversation, at most: enough for a fact in a sentence."""


def facts(count: int, seed: int) -> list[tuple[str, str, str]]:
    """Statement, question and answer of ``count`` facts about different people."""
    rng = random.Random(seed)
    people = rng.sample(list(NAMES), count)
    keys = [str(key) for key in rng.sample(range(10000, 100000), count)]
    return [
        (
            f"The pass key of {who} is {key}. Remember it. {key} is the pass key of {who}.\n",
            f"What is the pass key of {who}?",
            key,
        )
        for who, key in zip(people, keys, strict=True)
    ]


def load(ckpt: str) -> tuple[object, object, RetainingHeads]:
    """Backbone, tokenizer and heads."""
    heads = RetainingHeads.from_pretrained(ckpt)
    model, tokenizer = load_backbone(resolve_model(heads.config.backbone))
    return model, tokenizer, heads


def ground() -> str:
    """Date, commit and machine."""
    found = versions()
    return (
        f"{time.strftime('%Y-%m-%d')}, commit {found.get('commit', found['locret_kit'])}, torch {found['torch']}, "
        f"{os.cpu_count()} CPU cores ({platform.machine()}), {torch.get_num_threads()} threads"
    )


def hidden(tokenizer: object, tokens: int, told: Sequence[tuple[str, str, str]]) -> tuple[str, list[float]]:
    """The Jargon File's first ``tokens`` tokens with the facts in it, each at the start of a line, and their depths."""
    text = take(load_text("jargon"), 0, tokenizer, tokens)
    places = starts(text)
    depths = [(i + 0.5) / len(told) for i in range(len(told))]
    at = [min(places, key=lambda place: abs(place - depth * len(text))) for depth in depths]
    for place, (statement, _, _) in reversed(list(zip(at, told, strict=True))):
        text = text[:place] + statement + text[place:]
    return text, depths


def read(args: argparse.Namespace) -> None:
    """The first process: read and save."""
    model, tokenizer, heads = load(args.ckpt)
    text, _ = hidden(tokenizer, args.tokens, facts(args.questions, args.seed))
    began = time.perf_counter()
    document = Document.read(model, tokenizer, text, args.budget, heads=heads, chunk=args.chunk, kv_bits=args.kv_bits)
    seconds = time.perf_counter() - began
    document.save(args.file)
    figures = {"tokens": document.tokens, "read_s": seconds, "cache_bytes": document.cache.nbytes, "ground": ground()}
    write_text(figures_of(args.file), json.dumps(figures))


def figures_of(file: Path) -> Path:
    """Where ``read`` writes its figures."""
    return file.with_suffix(".json")


def questions(args: argparse.Namespace) -> None:
    """The second process: load, ask, write the page."""
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in vars(args).items() if value and name != "command"]
    if not figures_of(args.file).exists():
        subprocess.run([sys.executable, __file__, "read", *flags], check=True)
    figures = json.loads(figures_of(args.file).read_text(encoding="utf-8"))
    model, tokenizer, heads = load(args.ckpt)
    told = facts(args.questions, args.seed)
    began = time.perf_counter()
    document = Document.load(args.file, model, tokenizer, heads)
    load_s = time.perf_counter() - began
    rows = []
    with attach(model):
        began = time.perf_counter()
        document.prepare()
        prepare_s = time.perf_counter() - began
        for number, (_, question, key) in enumerate(told):
            began = time.perf_counter()
            answer = document.ask(question, max_new_tokens=16)
            text = str(answer)
            rows.append(((number + 0.5) / len(told), key, text, answer.first_token_s, time.perf_counter() - began))
    right = sum(key in text for _, key, text, _, _ in rows)
    size = args.file.stat().st_size
    chosen = {
        "ckpt": args.ckpt,
        "tokens": args.tokens,
        "budget": args.budget,
        "chunk": args.chunk,
        "kv-bits": args.kv_bits,
    }
    said = " ".join(f"--{name} {value}" for name, value in {**chosen, "seed": args.seed}.items() if value is not None)
    lines = [
        f"`python scripts/research/sessions.py questions {said}`; {ground()}.",
        "",
        f"- Read once: {figures['tokens']} tokens in {figures['read_s']:.0f} s ({figures['ground']}).",
        f"- Loading the file: {load_s:.2f} s, {load_s / figures['read_s']:.2%} of that (the model's own loading excluded). "
        f"Reading the text's end ahead of the questions: {prepare_s:.2f} s.",
        f"- The file: {size / 2**20:.1f} MiB, {size / figures['cache_bytes']:.2f} of the cache's buffers.",
        f"- First token after {max(row[3] for row in rows):.2f} s at most, answers of at most 16 tokens after "
        f"{max(row[4] for row in rows):.2f} s at most. Right: {right} of {len(rows)}.",
        "",
        "| depth | pass key | answer | right | first token (s) | whole answer (s) |",
        "|---|---|---|---|---|---|",
        *(
            f"| {depth:.3f} | {key} | {' '.join(text.split())[:60].replace('|', ' ')} | {'yes' if key in text else 'no'} "
            f"| {first:.2f} | {whole:.2f} |"
            for depth, key, text, first, whole in rows
        ),
    ]
    put("questions", lines)


def turns(args: argparse.Namespace) -> None:
    """A conversation with its first message pinned; up to ``until`` turns the same without, and under full attention while the
    model's window lasts."""
    model, tokenizer, heads = load(args.ckpt)
    told = facts(args.questions, args.seed)
    window = model.config.max_position_embeddings
    settings = RunSettings(budget=args.budget, chunk=args.chunk, stabilizers=args.stabilizers, protect=args.protect)
    kinds = {
        "first message pinned": {"settings": settings, "heads": heads},
        "not pinned": {"settings": settings, "heads": heads},
        "full attention": {"settings": window, "policy": "full"},
    }
    checks = sorted({turn for turn in args.checks if turn <= args.turns} | {min(args.until, args.turns)})
    answered: dict[tuple[str, int], list[bool]] = {}
    memory: dict[int, int] = {}
    began = time.perf_counter()
    with attach(model):
        for kind, given in kinds.items():
            pinned = kind == "first message pinned"
            chat = Chat(model, tokenizer, max_new_tokens=ANSWER, **given)
            list(chat.say(OPENING + "".join(f"{statement}\n" for statement, _, _ in told)))
            if pinned:
                chat.pin()
            for turn in range(1, (args.turns if pinned else min(args.until, args.turns)) + 1):
                if turn > 1:
                    list(chat.say(FILLERS[turn % len(FILLERS)]))
                if len(chat.ids) > window - 256 and kind == "full attention":
                    break
                if turn in checks:
                    answered[kind, turn] = [asked(chat, question, key) for _, question, key in told]
                if pinned and turn in (min(10, args.turns), args.turns):
                    memory[turn] = psutil.Process().memory_info().rss
                if turn in checks or turn % 50 == 0:
                    right = f", {sum(answered[kind, turn])} right" if (kind, turn) in answered else ""
                    print(f"{kind}, turn {turn}, {time.perf_counter() - began:.0f} s{right}", flush=True)
    early, late = min(memory), max(memory)
    short = [i for i, right in enumerate(answered["first message pinned", checks[0]]) if right]
    lasting = sum(answered["first message pinned", checks[-1]][i] for i in short)
    chosen = {"budget": args.budget, "chunk": args.chunk, "stabilizers": args.stabilizers, "protect": args.protect}
    more = "".join(f" --{name} {value}" for name, value in chosen.items() if value is not None)
    lines = [
        f"`python scripts/research/sessions.py turns --ckpt {args.ckpt} --turns {args.turns} --until {args.until}{more} "
        f"--seed {args.seed}`; {ground()}.",
        "",
        f"{len(told)} facts are told in the first message, fillers follow. Right answers after so many turns:",
        "",
        f"| turns | {' | '.join(kinds)} |",
        f"|---|{'---|' * len(kinds)}",
        *(
            f"| {turn} | "
            + " | ".join(str(sum(answered[kind, turn])) if (kind, turn) in answered else "-" for kind in kinds)
            + " |"
            for turn in checks
        ),
        "",
        f"Pinned, of the {len(short)} answered after turn {checks[0]}, {lasting} are after turn {checks[-1]}.",
        "",
        f"Resident memory of the pinned conversation: {memory[early] / 2**20:.0f} MiB after turn {early}, "
        f"{memory[late] / 2**20:.0f} MiB after turn {late} ({(memory[late] - memory[early]) / 2**20:+.1f} MiB).",
    ]
    put("turns", lines)


def asked(chat: Chat, question: str, key: str) -> bool:
    """Whether the answer holds the key; the conversation stays as it was."""
    text = "".join(chat.say(question))
    chat.undo()
    return key in text


def put(name: str, lines: Sequence[str]) -> None:
    """Rewrite one block of the page."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    page = PAGE.read_text(encoding="utf-8")
    head, rest = page.split(begin)
    write_text(PAGE, f"{head}{begin}\n" + "\n".join(lines) + f"\n{end}{rest.split(end)[1]}")
    print("\n".join(lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["questions", "turns", "read"])
    parser.add_argument("--ckpt", required=True)
    parser.add_argument("--budget", type=int, default=1024)
    parser.add_argument("--chunk", type=int)
    parser.add_argument("--tokens", type=int, default=131072)
    parser.add_argument("--questions", type=int, default=20)
    parser.add_argument("--turns", type=int, default=1000)
    parser.add_argument(
        "--until", type=int, default=200, help="last turn of the conversations without a pin, and of questions"
    )
    parser.add_argument(
        "--checks", type=int, nargs="*", default=[1, 4, 12, 50], help="turns after which the facts are asked for"
    )
    parser.add_argument(
        "--stabilizers", type=int, help="of a conversation: what is pinned and they must fit into the budget"
    )
    parser.add_argument("--protect", help="the run setting")
    parser.add_argument("--kv-bits", type=int, choices=[2, 4])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--file", type=Path, default=Path("document.locret"))
    args = parser.parse_args()
    {"read": read, "questions": questions, "turns": turns}[args.command](args)


if __name__ == "__main__":
    main()
