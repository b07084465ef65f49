"""Measure how often the fact is among the three passages that an answer shows as its evidence, beside BM25's three.

    python scripts/research/evidence.py QUESTIONS.jsonl OUT.jsonl --model MODEL --policy compactor --budget 1024

QUESTIONS.jsonl has L-Eval's records (``scripts/code_questions.py``, or pass keys by ``--keys N TOKENS``): a text, questions, and
the values that right answers hold. A passage is right if it holds the value. BM25 ranks pieces of 96 tokens by the question.
A row a question; the sums are printed. With ``--seconds`` each question is also asked without evidence, by turns, for the cost.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path
from statistics import median

from locret_kit import Document
from locret_kit.backbones.load import load_backbone
from locret_kit.evals.engine.bm25 import ranking
from locret_kit.runtime.evidence import WINDOW
from locret_kit.samples.haystack import load_text

NAMES = ("vault", "cellar", "archive", "harbour", "tower", "library", "garden", "bridge")


def keys(tokenizer, number: int, tokens: int, each: int = 4) -> list[dict]:
    """Records of ``each`` pass keys (at most eight) in the Jargon File."""
    rng, text, records, names = random.Random(0), load_text("jargon"), [], NAMES[:each]
    for _ in range(number):
        start = rng.randrange(len(text) - 8 * tokens)
        ids = tokenizer(text[start : start + 8 * tokens], add_special_tokens=False).input_ids[:tokens]
        lines, values = tokenizer.decode(ids).split("\n"), [str(rng.randrange(10000, 99999)) for _ in names]
        for name, value in zip(names, values, strict=True):
            lines.insert(rng.randrange(len(lines)), f"The pass key of the {name} is {value}.")
        asked = [f"What is the pass key of the {name}?" for name in names]
        records.append({"input": "\n".join(lines), "instructions": asked, "outputs": values})
    return records


def pieces(tokenizer, text: str) -> list[str]:
    """The text in pieces of twice a window: about what a passage has grown to."""
    ids = tokenizer(text, add_special_tokens=False).input_ids
    return [tokenizer.decode(ids[i : i + 2 * WINDOW]) for i in range(0, len(ids), 2 * WINDOW)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("questions")
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", required=True)
    parser.add_argument("--policy", default="compactor")
    parser.add_argument("--ckpt")
    parser.add_argument("--budget", type=int, default=1024)
    parser.add_argument("--keys", type=int, nargs=2, metavar=("N", "TOKENS"))
    parser.add_argument("--seconds", action="store_true")
    args = parser.parse_args()
    model, tokenizer = load_backbone(args.model)
    if args.keys:
        records = keys(tokenizer, *args.keys)
    else:
        records = [json.loads(line) for line in Path(args.questions).read_text().splitlines()]
    rows = []
    with args.out.open("w") as out:
        for number, record in enumerate(records):
            document = Document.read(model, tokenizer, record["input"], args.budget, args.policy, args.ckpt)
            parts = pieces(tokenizer, record["input"])
            for question, value in zip(record["instructions"], record["outputs"], strict=True):
                answer = document.ask(question, max_new_tokens=40, evidence=True)
                shown = answer.evidence
                row = {
                    "text": number,
                    "question": question,
                    "right": value in str(answer),
                    "decode_s": answer.report.decode_s,
                }
                row |= {"evidence": any(value in one.text for one in shown), "share": sum(one.share for one in shown)}
                row["bm25"] = any(value in parts[i] for i in ranking(parts, question)[:3])
                if args.seconds:
                    row["plain_s"] = document.ask(question, max_new_tokens=40).report.decode_s
                rows.append(row)
                print(json.dumps(row), file=out, flush=True)
    right = [row for row in rows if row["right"]]
    print(
        f"{len(rows)} questions, {len(right)} answers are right; the value is in the evidence of "
        f"{sum(row['evidence'] for row in rows)}, of right answers {sum(row['evidence'] for row in right)}; in BM25's "
        f"{sum(row['bm25'] for row in rows)}"
    )
    for name, some in (("right", right), ("wrong", [row for row in rows if not row["right"]])):
        if some:
            print(f"share of attention of {name} answers: median {median(row['share'] for row in some):.2f}")
    if args.seconds:
        print(
            f"decoding with evidence takes {median(row['decode_s'] / row['plain_s'] for row in rows):.3f} times as long"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
