"""BM25, a retrieval baseline without a cache: full attention reads the prompt's passages that share words with its
question.

The text between instruction and question is cut into passages of whole lines and sentences. The passages with the
highest scores are kept in text order. Together with instruction, question and chat template they fit into ``budget``
tokens, as a policy's slots must. The result is a short prompt.
Sources: Robertson and Zaragoza, The Probabilistic Relevance Framework: BM25 and Beyond, 2009. Lucene's variant with k1
= 1.5, b = 0.75 and English stop words, from the package bm25s.
"""

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
from transformers import PreTrainedTokenizerBase

from ...samples.haystack import starts
from ...text.template import render_prompt
from ...text.tokens import encode
from ...text.untrusted import Span
from ..metrics import library
from ..tasks.task import Example

PASSAGE = 64
"""Tokens that a passage has at most."""


def shortened(tokenizer: PreTrainedTokenizerBase, example: Example, budget: int) -> list[int]:
    """Token ids of the prompt with its best passages only, at most ``budget``. If the task does not mark its text,
    the last ``min(64, budget // 4)`` tokens, at least one, are the question, and the text is the rest after the chat
    template's beginning.

    Raises:
        ValueError: a budget below the tokens around the text, or a tokenizer without offsets.
    """
    prompt = example.prompt
    ids, offsets = encode(tokenizer, prompt, special=example.special)
    ends = [end for _, end in offsets]
    if example.text is None:
        template = "" if example.special else render_prompt(tokenizer, "")[0]
        first = bisect_right(ends, len(template))
        asked = max(first, len(ids) - max(1, min(64, budget // 4)))
    else:
        start, stop = example.text
        first, asked = (bisect_right(ends, at) for at in (start, len(prompt[:stop].rstrip())))
    room = budget - first - (len(ids) - asked)
    if room < 0:
        raise ValueError(f"budget={budget} must be at least {budget - room}, the tokens around the text")
    spans = cut(sorted({bisect_right(ends, start) for start in starts(prompt)}), first, asked)
    texts = [prompt[offsets[a][0] : offsets[b - 1][1]] for a, b in spans]
    kept = []
    for best in ranking(texts, prompt[offsets[asked - 1][1] :]) if texts else []:
        start, stop = spans[best]
        if stop - start <= room:
            kept.append((start, stop))
            room -= stop - start
    spans = [(0, first), *sorted(kept), (asked, len(ids))]
    return [token for start, stop in spans for token in ids[start:stop]]


def cut(borders: Sequence[int], first: int, stop: int) -> list[Span]:
    """Half-open spans of at most `PASSAGE` tokens that together are ``first`` to ``stop``. Each ends at the last of the ascending
    ``borders`` that it can reach, where there is one."""
    spans: list[Span] = []
    while first < stop:
        end = min(first + PASSAGE, stop)
        if end < stop and (near := bisect_right(borders, end)) and borders[near - 1] > first:
            end = borders[near - 1]
        spans.append((first, end))
        first = end
    return spans


def ranking(texts: Sequence[str], question: str) -> list[int]:
    """Numbers of the texts, the best first; of equal ones the earlier."""
    bm25s = library("bm25s")
    *corpus, asked = bm25s.tokenize([*texts, question], stopwords="english", return_ids=False, show_progress=False)
    known = {word for words in corpus for word in words}
    asked = [word for word in asked if word in known]
    if not asked:
        return list(range(len(texts)))
    index = bm25s.BM25(method="lucene", k1=1.5, b=0.75, dtype="float64")
    index.index(corpus, show_progress=False)
    return np.argsort(-index.get_scores(asked), kind="stable").tolist()
