"""bm25 as a policy of an evaluation."""

import json
import math
import re
from collections import Counter

import pytest
from tiny_text import tiny_tokenizer

from locret_kit.evals.engine import bm25
from locret_kit.evals.tasks import Example, find_tasks
from locret_kit.text.tokens import encode

TEXTS = [
    "The ferry leaves at noon. The ferry is late!", "A ferry, a bridge and a tunnel; no ferry after dark.", "",
    "Bridge repairs go on until winter, and the bridge stays closed for cars and for horses.", "Nothing of the kind.",
]  # fmt: skip
STOP = {"the", "it", "at", "is", "and", "no", "on", "for", "of", "does"}


def by_definition(texts: list[str], question: str) -> list[int]:
    """Lucene's BM25 in plain floats, k1 = 1.5 and b = 0.75."""
    corpus = [[w for w in re.findall(r"\w\w+", text.lower()) if w not in STOP] for text in texts]
    mean, scores = sum(map(len, corpus)) / len(corpus), []
    for words in corpus:
        count, score = Counter(words), 0.0
        for word in (w for w in re.findall(r"\w\w+", question.lower()) if w not in STOP):
            n = sum(word in other for other in corpus)
            tf = count[word] / (count[word] + 1.5 * (0.25 + 0.75 * len(words) / mean))
            score += math.log(1 + (len(corpus) - n + 0.5) / (n + 0.5)) * tf
        scores.append(score)
    return sorted(range(len(texts)), key=lambda i: (-round(scores[i], 9), i))


@pytest.mark.parametrize(
    "question", ["When does the ferry leave?", "ferry bridge bridge", "Is the bridge closed?", "zebra?", "the of", ""]
)
def test_texts_are_ranked_by_the_definition(question):
    assert bm25.ranking(TEXTS, question) == by_definition(TEXTS, question)
    assert bm25.ranking(["", "the"], question) == [0, 1]


@pytest.mark.parametrize("task", ["passkey", "questions", "ruler.niah_multikey", "kv", "perplexity"])
@pytest.mark.parametrize("chat", ["always", "never"])
def test_a_short_prompt_is_passages_in_order_and_the_question(task, chat):
    tokenizer = tiny_tokenizer()
    (made,) = find_tasks([task], haystacks=["pydoc"])
    example = made.make(Example(made, tokenizer, 1024, 1, chat=chat))
    ids, offsets = encode(tokenizer, example.prompt, special=example.special)
    for budget in (250, 400, 2000):
        short = bm25.shortened(tokenizer, example, budget)
        assert len(short) <= budget and (budget < 2000 or short == ids)
        at, last = 0, ids[-min(64, budget // 4) :]
        if example.text is not None:
            start, stop = example.text
            last = [token for token, (first, _) in zip(ids, offsets, strict=True) if first >= stop]
            assert tokenizer.decode(short).startswith(example.prompt[:start])
        assert short[-len(last) :] == last
        for token in short:  # a subsequence
            at = ids.index(token, at) + 1
        assert budget == 2000 or len(short) > budget - bm25.PASSAGE or len(short) > budget // 2
    if example.text is not None:
        with pytest.raises(ValueError, match="budget=3 must be at least"):
            bm25.shortened(tokenizer, example, 3)


@pytest.mark.parametrize("chat", ["always", "never"])
def test_a_prompt_within_the_budget_is_read_whole(chat, tmp_path):
    """Tasks that do not mark their text, also with fewer tokens than the question may have."""
    tokenizer, file = tiny_tokenizer(bos=True), tmp_path / "mine.jsonl"
    asked = [{"document": "The ferry leaves at noon. " * n, "question": "When?", "answer": "Noon."} for n in (1, 2, 9)]
    file.write_text("".join(json.dumps(record) + "\n" for record in asked))
    (task,) = find_tasks([str(file)])
    for sample in range(3):
        example = Example(task, tokenizer, 1024, sample, chat=chat).made()
        for budget in (len(example.ids), 400):
            assert bm25.shortened(tokenizer, example, budget) == [*example.ids]
    assert 0 < len(bm25.shortened(tokenizer, example, 2 + 30 * (chat == "always"))) <= 32
